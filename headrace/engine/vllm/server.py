"""A vLLM server of our own: started on this machine, waited for, and ended with whoever started it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engine.vllm.api import VllmApi, VllmError
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ATTEMPTS = 3
"""To find a port that nobody else takes meanwhile."""
_POLL = 0.25
_ENDING = 25.0
"""Seconds: more than its keeper takes to end what does not heed it."""
_TAIL = 64 << 10
"""Bytes of a log that are looked at for why a server did not come up."""
_PORT_TAKEN = re.compile(r"address already in use|Errno 98", re.IGNORECASE)
_REASON = re.compile(r"^(?:\(\w[^)]*\)\s*)?(?:\w+\.)*(?:\w*(?:Error|Exception)|pydantic_core\S*): .+")


class VllmServer:
    """A running one. `api` speaks to it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, *, token: str, log: Path, begins_at: int) -> None:
        """`begins_at`: where in the log its own lines begin."""
        self.process, self.token, self.log = process, token, log
        self._begins_at = begins_at
        self.api = VllmApi(f"http://127.0.0.1:{port}", token=token, log=str(log))

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def why(self) -> str:
        """The last reason its log gives."""
        return reason_in(self.log, self._begins_at)

    def output(self) -> str:
        """The last of what it wrote."""
        return _tail(self.log, self._begins_at)

    async def close(self) -> None:
        """End it, and everything it started."""
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
) -> VllmServer:
    """`vllm serve`, reached from this machine alone, with a token of its own, once it answers. `python` has vLLM."""
    opening = await asyncio.to_thread(lambda: _opening(find_vllm(python)))
    token = secrets.token_urlsafe(32)
    variables = {
        **_inherited(python),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_API_KEY": token,
        **(environment or {}),
    }
    for attempt in range(1, _ATTEMPTS + 1):
        port = _free_port()
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
        process, begins_at = _run([*command, *opening, *arguments], variables, log)
        server = VllmServer(process, port, token=token, log=log, begins_at=begins_at)
        try:
            await _wait_up(server, seconds)
        except BaseException as error:
            await server.close()
            if isinstance(error, VllmError) and _PORT_TAKEN.search(server.output()) and attempt < _ATTEMPTS:
                continue
            raise
        return server
    raise AssertionError("the last attempt returns or raises")


def find_vllm(python: str) -> Path:
    """Where an interpreter has vLLM; refused where it has none, before anything is waited for."""
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
    """What opens the interface for tokens: newer releases keep it shut unless told, older ones do not know the word."""
    words = (file.read_text(errors="replace") for file in package.glob("entrypoints/**/cli_args.py"))
    return ["--enable-scale-out"] if any("enable_scale_out" in text for text in words) else []


def choose_python(named: str) -> str:
    """The interpreter that the recipe names, or the environment, or this one."""
    return named or os.environ.get("HEADRACE_VLLM_PYTHON", "") or sys.executable


def _inherited(python: str) -> dict[str, str]:
    """This process's variables; another interpreter finds its own packages, not those this one was pointed to."""
    is_ours = Path(python).resolve() == Path(sys.executable).resolve() and Path(python).parent == Path(sys.executable).parent
    return {name: value for name, value in os.environ.items() if is_ours or name not in ("PYTHONPATH", "PYTHONHOME")}


def end(process: subprocess.Popen[bytes]) -> None:
    """Its keeper ends it when it is told to, or when its pipe closes."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(_ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _run(command: list[str], variables: dict[str, str], log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """(the process of its keeper, where in the log it begins): the log of one before it stays."""
    log.parent.mkdir(parents=True, exist_ok=True)
    keeper = str(Path(__file__).with_name("keep.py"))
    with log.open("ab") as output:
        begins_at = output.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            [sys.executable, keeper, *command], stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=variables
        )
    return process, begins_at


async def _wait_up(server: VllmServer, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not await server.api.is_up():
        if server.has_ended:
            raise VllmError(f"vLLM did not start: {server.why()} (log {server.log})")
        if time.monotonic() > until:
            raise VllmError(f"vLLM did not come up within {seconds:g} s (engine.vllm.start_seconds), log {server.log}")
        await asyncio.sleep(_POLL)


def reason_in(log: Path, start: int = 0) -> str:
    """From that byte on, the first error of the last traceback in a log that says something: vLLM wraps one in another."""
    lines = _tail(log, start).splitlines()
    reasons = [
        f"{match[0]}: {after.strip()}" if "validation error" in line else match[0]
        for line, after in zip(lines, [*lines[1:], ""], strict=False)
        if (match := _REASON.match(line.strip()))
    ]
    telling = [reason for reason in reasons if "See root cause above" not in reason and "Engine core" not in reason]
    return (telling or reasons or lines[-1:] or ["it ended without a word"])[-1][:500]


def _tail(log: Path, start: int = 0) -> str:
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(start, file.tell() - _TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
