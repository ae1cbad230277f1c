"""Starts a vLLM server on this machine; it ends with the process that started it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engine.vllm.api import VllmApi, VllmError
from headrace.rpc import socket_place
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_POLL = 0.25
_ENDING = 25.0  # seconds: more than `server_keeper` takes to end a server that ignores SIGTERM
_TAIL = 64 << 10  # bytes of a log that are searched for the reason
_REASON = re.compile(r"^(?:\(\w[^)]*\)\s*)?(?:\w+\.)*(?:\w*(?:Error|Exception)|pydantic_core\S*): .+")


@dataclass(frozen=True)
class VllmServer:
    """A running server; `process` is the `server_keeper` that runs it."""

    process: subprocess.Popen[bytes]
    api: VllmApi
    token: str
    log_start: int = 0
    """Where its lines begin in the log, which may have those of an earlier server."""

    async def close(self) -> None:
        """End it and everything it started."""
        await self.api.close()
        await asyncio.to_thread(end, self.process)


async def start(
    model: str,
    arguments: Sequence[str],
    *,
    python: str,
    log: Path,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    prefix: str = "headrace",
) -> VllmServer:
    """Run `vllm serve`, with a token and a temporary folder, PREFIX-…, of its own; returns once it answers. `python` has vLLM.
    It listens on a socket in that folder, which only this user can enter: vLLM guards the paths that change weights by no
    token."""
    package = await asyncio.to_thread(find_vllm, python)
    serve = [python, "-m", "vllm.entrypoints.cli.main", "serve", model, *_opening(package), *arguments]
    variables = {**_inherited(python), "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", **(environment or {})}
    server = _launch(serve, variables, log=log, prefix=prefix)
    try:
        await _until_up(server, seconds)
    except BaseException:
        await server.close()
        raise
    return server


def _launch(serve: list[str], variables: Mapping[str, str], *, log: Path, prefix: str) -> VllmServer:
    token = secrets.token_urlsafe(32)
    folder = str(socket_place() / f"{prefix}-{secrets.token_hex(3)}")  # for sockets and other files, which vLLM leaves behind
    compiled = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"  # outlives the server
    own = {"TMPDIR": folder, "VLLM_RPC_BASE_PATH": folder, "VLLM_API_KEY": token}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        log_start = output.tell()
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("server_keeper.py")), folder, *serve, "--uds", f"{folder}/http"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"TORCHINDUCTOR_CACHE_DIR": compiled, **variables, **own},
        )
    return VllmServer(process, VllmApi(f"unix:{folder}/http", token=token, log=str(log)), token, log_start)


async def _until_up(server: VllmServer, seconds: float) -> None:
    until, log = time.monotonic() + seconds, server.api.log
    while not await server.api.is_up():
        if server.process.poll() is not None:
            raise VllmError(f"vLLM did not start: {_reason_in(Path(log), server.log_start)} (log {log})")
        if time.monotonic() > until:
            raise VllmError(f"vLLM did not come up within {seconds:g} s (engine.vllm.start_seconds), log {log}")
        await asyncio.sleep(_POLL)


def find_vllm(python: str) -> Path:
    """The folder of vLLM in an interpreter's environment. Raises `ConfigError` if there is none."""
    hint = "install vLLM in an environment and name its interpreter in engine.vllm.python or HEADRACE_VLLM_PYTHON"
    look = "import importlib.util; print(*importlib.util.find_spec('vllm').submodule_search_locations)"
    try:
        found = subprocess.run([python, "-c", look], check=False, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.vllm.python = {python!r} is no interpreter that runs ({error}); {hint}") from error
    if found.returncode:
        raise ConfigError(f"engine.kind = 'vllm': {python} has no vLLM; {hint}")
    return Path(found.stdout.strip())


def _opening(package: Path) -> list[str]:
    """The flag that opens the token interface in newer releases; older ones do not know it."""
    words = (file.read_text(errors="replace") for file in package.glob("entrypoints/**/cli_args.py"))
    return ["--enable-scale-out"] if any("enable_scale_out" in text for text in words) else []


def choose_python(named: str) -> str:
    """The recipe's, else the environment's, else this one."""
    return named or os.environ.get("HEADRACE_VLLM_PYTHON", "") or sys.executable


def _inherited(python: str) -> dict[str, str]:
    """This process's variables, without those that would point another interpreter to this one's packages."""
    ignored = () if python == sys.executable else ("PYTHONPATH", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if name not in ignored}


def end(process: subprocess.Popen[bytes]) -> None:
    """Close the keeper's pipe, upon which it ends the server."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _reason_in(log: Path, start: int) -> str:
    """The last telling error: vLLM wraps the first one in others that say nothing."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - _TAIL))
        lines = file.read().decode(errors="replace").splitlines()
    reasons = [
        f"{match[0]}: {after.strip()}" if "validation error" in line else match[0]
        for line, after in zip(lines, [*lines[1:], ""], strict=False)
        if (match := _REASON.match(line.strip()))
    ]
    telling = [reason for reason in reasons if "See root cause above" not in reason and "Engine core" not in reason]
    return (telling or reasons or lines[-1:] or ["it ended without an error message"])[-1][:500]
