"""Agents that are programs of their own, started for each episode."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from agent_bench import END, Answering, check_exact, run

from headrace.envs import EnvironmentSettings, ProgramAgent, can_resume, check_environment, make_environment
from headrace.records import Scored
from headrace.settings import ConfigError

PROGRAM = """
import json, os, sys, urllib.request

row = json.load(sys.stdin)
print("x" * 10_000_000)  # nobody reads it

def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

messages = [{"role": "user", "content": row["prompt"]}]
for _ in range(2):
    said = post("/chat/completions", {"model": "m", "messages": messages})["choices"][0]["message"]
    messages += [said, {"role": "user", "content": "again"}]
if "reward" in row:
    post("/reward", {"reward": row["reward"] if said["content"] == "ok" else -1})
"""


def program(folder: Path, text: str) -> ProgramAgent:
    (folder / "agent.py").write_text(text)
    return ProgramAgent([sys.executable, str(folder / "agent.py")])


def answering() -> Answering:
    return Answering(lambda text: f"ok{END}")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("row", [{"prompt": "go"}, {"prompt": "go", "reward": 0.5}], ids=["scored by the run", "posts"])
def test_a_program_gets_its_task_and_the_model(tmp_path: Path, row: dict[str, Any]) -> None:
    engine = answering()
    episode = run(program(tmp_path, PROGRAM), engine, row=row)
    assert episode.outcome == (Scored(0.5) if "reward" in row else None)
    (rollout,) = episode.rollouts
    assert len(rollout.calls) == 2
    check_exact(episode, engine)


def test_a_program_that_fails_shows_the_end_of_its_stderr(tmp_path: Path) -> None:
    text = "import sys\nfor n in range(100_000):\n    print('line', n, file=sys.stderr)\nsys.exit(3)"
    reason = run(program(tmp_path, text), answering()).outcome.reason
    assert "ended with status 3; the end of its stderr:" in reason and reason.endswith("line 99999") and len(reason) < 3000
    killed = run(program(tmp_path, "import os\nos.kill(os.getpid(), 9)"), answering()).outcome.reason
    assert "was killed by SIGKILL" in killed
    assert "has not answered it once" in run(program(tmp_path, "pass"), answering()).outcome.reason


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    text = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    started = time.monotonic()
    outcome = run(program(tmp_path, text), answering(), timeout=2).outcome
    assert "episode.timeout = 2 s" in outcome.reason and time.monotonic() - started < 30
    wait_for_death(int((tmp_path / "pid").read_text()))


def test_children_that_a_program_leaves_behind_are_killed(tmp_path: Path) -> None:
    text = f"""{PROGRAM}
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
"""
    assert run(program(tmp_path, text), answering()).outcome is None
    wait_for_death(int((tmp_path / "pid").read_text()))


def wait_for_death(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.02)


def test_a_program_inherits_no_token_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_TOKEN", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    text = f"import json, os\njson.dump(dict(os.environ), open({str(tmp_path / 'env')!r}, 'w'))"
    run(program(tmp_path, text), answering())
    seen = (tmp_path / "env").read_text()
    assert "secret" not in seen and "the user's own" not in seen and f'"PATH": "{os.environ["PATH"]}"' in seen


def test_a_program_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment.command = \['no-such', 'x'\]: there is no program 'no-such'"):
        ProgramAgent(["no-such", "x"])


def test_a_program_declares_that_it_can_resume_and_has_no_other_option() -> None:
    command: dict[str, Any] = {"command": (sys.executable, "x")}
    for options in ({}, {"can_resume": True}):
        assert can_resume(make_environment(EnvironmentSettings(**command, options=options))) == bool(options)
    with pytest.raises(ConfigError, match=r"environment.options.max_turns: is no option of a program"):
        check_environment(EnvironmentSettings(**command, options={"max_turns": 2}))


def test_the_public_name_is_the_function_whatever_was_imported_first() -> None:
    """A room's submodule of the same name would hide it."""
    code = "import headrace.envs.program, headrace; assert callable(headrace.agent)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
