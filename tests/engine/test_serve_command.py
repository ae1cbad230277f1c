"""`headrace serve` as a process: it starts, answers, refuses what it must, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from helpers import small_run
from openai import OpenAI

from headrace.cli import main
from headrace.engine.server.address import bind, url_of
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMAND = [sys.executable, "-m", "headrace.cli", "serve"]
SECRETS = {"HEADRACE_API_TOKEN": "api-secret", "HEADRACE_CONTROL_TOKEN": "control-secret"}


@contextlib.contextmanager
def served(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """(the process, its URL, the line it printed when ready)"""
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**{name: value for name, value in os.environ.items() if name not in SECRETS}, **environment},
    )
    try:
        line = process.stdout.readline()
        found = re.search(r"http://[\d.]+:\d+", line)
        assert found, line + process.stderr.read()
        yield process, found[0], line
    finally:
        process.kill()
        process.communicate()


def stop(process: subprocess.Popen[str], how: signal.Signals) -> tuple[int, str]:
    began = time.monotonic()
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    return process.returncode, errors


def test_it_starts_answers_and_stops_with_a_stream_open(tmp_path: Path) -> None:
    with served("builtin:tiny", "--port", "0", "--name", "mine", TMPDIR=str(tmp_path), **SECRETS) as (process, url, line):
        assert "secret" not in line and "$HEADRACE_API_TOKEN" in line
        client = OpenAI(base_url=f"{url}/v1", api_key="api-secret", max_retries=0)
        assert [model.id for model in client.models.list()] == ["mine"]
        first = client.completions.create(model="mine", prompt="12", max_tokens=8, seed=1)
        again = client.completions.create(model="mine", prompt="12", max_tokens=8, seed=1)
        assert first.choices[0].text == again.choices[0].text and len(first.choices[0].text) > 0
        with pytest.raises(openai.AuthenticationError):
            OpenAI(base_url=f"{url}/v1", api_key="control-secret", max_retries=0).models.list()
        control = {"Authorization": "Bearer control-secret"}
        assert httpx.get(f"{url}/control/state", headers=control).json()["slots"] == 64
        assert httpx.get(f"{url}/health").json()["status"] == "ok"

        extra: dict[str, Any] = {"ignore_eos": True}
        stream = client.completions.create(model="mine", prompt="1", max_tokens=250, stream=True, extra_body=extra)
        next(stream)
        assert httpx.post(f"{url}/control/pause", json={"interrupt": "keep"}, headers=control).status_code == 200
        code, errors = stop(process, signal.SIGTERM)
        assert (code, errors) == (0, "")
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        bind("127.0.0.1", int(url.rsplit(":", 1)[1]), has_token=False).close()
    assert list(tmp_path.iterdir()) == [], "the built-in model's folder is gone"


@pytest.mark.parametrize("lora", [pytest.param({}, marks=pytest.mark.long), {"lora": {"rank": 2}}])
def test_ctrl_c_stops_it_and_a_checkpoint_is_served_as_its_version(tmp_path: Path, lora: dict[str, Any]) -> None:
    result = small_run(tmp_path / "run", steps=2, **lora)
    folder = str(result.checkpoint)
    with served(folder, "--port", "0", "--context", "32", "--slots", "2") as (process, url, _):
        answer = httpx.get(f"{url}/v1/models").json()["data"][0]
        assert answer["id"] == folder and answer["max_model_len"] == 32
        body = {"prompt": "1", "max_tokens": 2, "return_token_ids": True, "ignore_eos": True}
        choice = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]
        assert choice["versions"] == [2, 2] and "headrace_weight_version 2" in httpx.get(f"{url}/metrics").text
        assert httpx.post(f"{url}/control/resume").status_code == 403
        code, errors = stop(process, signal.SIGINT)
        assert (code, errors) == (0, "")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(["serve", *arguments])
    return int(caught.value.code or 0), capsys.readouterr().err


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is refused before a model loads."""
    from headrace.launch import serving

    def load(options: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(serving, "_load", load)
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_another_address_needs_a_token(capsys, no_model, host: str) -> None:
    code, said = run(capsys, "builtin:tiny", "--host", host, "--port", "0")
    assert code == 2 and said.count("\n") == 1 and "HEADRACE_API_TOKEN" in said and f"--host {host}:" in said


def test_a_control_token_does_not_open_another_address(capsys, no_model, monkeypatch) -> None:
    monkeypatch.setenv("HEADRACE_CONTROL_TOKEN", "control-secret")
    monkeypatch.setenv("HEADRACE_API_TOKEN", "")
    code, said = run(capsys, "builtin:tiny", "--host", "0.0.0.0", "--port", "0")
    assert code == 2 and "HEADRACE_API_TOKEN" in said and "secret" not in said


def test_a_port_that_is_taken_is_said_before_a_model_loads(capsys, no_model) -> None:
    with contextlib.closing(bind("127.0.0.1", 0, has_token=False)) as taken:
        port = taken.getsockname()[1]
        code, said = run(capsys, "builtin:tiny", "--port", str(port))
        assert code == 2 and said.count("\n") == 1 and f"--port {port}" in said and "give another --port" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("./absent",), "the folder does not exist"),
        (("builtin:tiny", "--slots", "0"), "--slots 0: must be ≥ 1"),
        (("builtin:tiny", "--context", "-1"), "--context -1: must be ≥ 0"),
        (("builtin:tiny", "--port", "70000"), "between 0 and 65535"),
        (("builtin:tiny", "--host", "no.such.host.invalid"), "--host no.such.host.invalid"),
        (("builtin:tiny", "--queue", "-1"), "--queue -1: must be ≥ 0"),
        (("builtin:tiny", "--api-token-file", "absent"), "--api-token-file absent: it cannot be read: [Errno 2] No such file"),
        (("builtin:tiny", "--control-token-file", os.devnull), f"--control-token-file {os.devnull}: it is empty"),
    ],
)
def test_a_mistake_is_answered_in_one_line(capsys, no_model, arguments, message) -> None:
    code, said = run(capsys, *arguments)
    assert code == 2 and said.startswith("headrace: ") and said.count("\n") == 1 and message in said


@pytest.mark.parametrize("option", [("--api-token", "secret"), ("--control-token=secret",)])
def test_a_token_as_an_option_is_not_taken_for_the_name_of_a_file(capsys, no_model, option) -> None:
    code, said = run(capsys, "builtin:tiny", "--port", "0", *option)
    name = option[0].partition("=")[0]
    assert code == 2 and f"unrecognized arguments: {name}" in said and "-file" not in said and "secret" not in said


def test_two_tokens_that_are_the_same_are_refused(capsys, no_model, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "token").write_text("same-secret\n")
    monkeypatch.setenv("HEADRACE_CONTROL_TOKEN", "same-secret")
    code, said = run(capsys, "builtin:tiny", "--api-token-file", str(tmp_path / "token"))
    assert code == 2 and "are the same" in said and "secret" not in said


def test_tokens_come_from_files_or_the_environment_but_not_from_options(tmp_path: Path, monkeypatch) -> None:
    """Options show in every user's process list."""
    from headrace import launch

    (tmp_path / "api").write_text("from-file\n")
    monkeypatch.setenv("HEADRACE_API_TOKEN", "from-environment")
    monkeypatch.setenv("HEADRACE_CONTROL_TOKEN", "control")
    found = []
    monkeypatch.setattr(launch, "serve", lambda how, listener: listener.close() or found.append(how) or 0)
    for arguments in ((), ("--api-token-file", str(tmp_path / "api"))):
        with pytest.raises(SystemExit) as ended:
            main(["serve", "builtin:tiny", "--host", "127.0.0.9", "--port", "0", "--queue", "7", *arguments])
        assert ended.value.code == 0
    assert [(how.api_token, how.control_token) for how in found] == [("from-environment", "control"), ("from-file", "control")]
    assert (found[0].host, found[0].queue) == ("127.0.0.9", 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("builtin:large",), "the built-in model is 'builtin:tiny'"), (("builtin:tiny", "--device", "cuda"), "torch sees no GPU")],
)
def test_a_model_that_cannot_be_served_is_one_line_too(capsys, arguments, message) -> None:
    import torch

    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, said = run(capsys, *arguments, "--port", "0")
    assert code == 2 and message in said and said.count("\n") == 1


def test_loopback_has_several_names() -> None:
    for host in ("127.0.0.1", "localhost", "127.0.0.9"):
        with contextlib.closing(bind(host, 0, has_token=False)) as listener:
            assert url_of(listener).startswith("http://")
    with contextlib.closing(bind("0.0.0.0", 0, has_token=True)) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    if socket.has_ipv6:
        with contextlib.suppress(ConfigError), contextlib.closing(bind("::1", 0, has_token=False)) as listener:
            assert url_of(listener).startswith("http://[::1]:")


@pytest.mark.long
def test_an_engine_that_dies_ends_the_server_with_status_1(tmp_path: Path) -> None:
    """A decode thread that fails cannot be waited for: whoever waits is told, and the process ends."""
    script = (
        "import sys; from headrace.engine.native.core import EngineCore\n"
        "def step(self): raise MemoryError('no room')\n"
        "EngineCore.step = step\n"
        "from headrace.cli import main; main(['serve', 'builtin:tiny', '--port', '0', '--threads', '1'])"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = re.search(r"http://[\d.]+:\d+", process.stdout.readline())[0]
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.InternalServerError, match="MemoryError: no room"):
            client.completions.create(model="builtin:tiny", prompt="1", timeout=60)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1 and errors == "headrace: the engine failed: MemoryError: no room\n"
