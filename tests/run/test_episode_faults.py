"""The table of faults in docs/environments.md: each strikes an episode once, the run says so, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import ClassVar

import pytest
from helpers import books_close, small_run

import headrace

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
FAULTS = {
    "raises": "the environment raised KeyError: ",
    "exits": "SystemExit",
    "waits": "the episode took longer than episode.timeout = ",
    "hangs": "made no generate call for ",
    "nothing": "returned a NoneType, not an Episode",
    "another": ", but ran ",
    "unsampled": "returned no rollout with a sampled token",
    "forges": "with other sampled tokens than the engine's",
}
"""What the log says of each, and the table."""


class Faulty:
    """Fails once for each group, in the way that its task says, or always."""

    struck: ClassVar[set[str]] = set()

    async def run(self, task: dict, client: headrace.envs.Client) -> headrace.Episode:
        how = "" if client.group in self.struck and not task.get("always") else task["how"]
        self.struck.add(client.group)
        rollout = await client.generate(client.prompt(task["prompt"]))
        if how == "raises":
            raise KeyError("lost")
        if how == "exits":
            raise SystemExit(3)
        if how in ("waits", "hangs"):
            await asyncio.sleep(60)
        if how == "nothing":
            return None  # type: ignore[return-value]
        if how == "another":
            return headrace.Episode(id="x", group="x", task=task)
        if how == "unsampled":
            return headrace.Episode(id=client.episode, group=client.group, task=task)
        if how == "forges":
            rollout = rollout.replace(logprobs=rollout.logprobs / 2)
        return headrace.Episode(id=client.episode, group=client.group, task=task, rollouts=(rollout,))


@pytest.mark.parametrize("how", FAULTS)
def test_a_fault_costs_an_attempt_and_is_told(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Faulty.struck.clear()
    tasks = [{"prompt": f"{number}", "how": how} for number in range(8)]
    limit = {"deadline": 4.0} if how == "hangs" else {"episode": {"timeout": 0.5}}
    more = {**limit, "evaluate": {"limit": 1}, "staleness": {"max_lag": 0}}
    result = small_run(tmp_path / "run", tasks=tasks, held_out=tasks[:1], environment=Faulty, steps=2, **more)
    counts = result.summary["accounting"]
    assert counts["submitted"] == counts["trained"] == 32 and counts["failed"] == 0
    evaluations = result.summary["held_out"]
    assert any(group.startswith("eval/") for group in Faulty.struck), "they meet the fault too"
    assert evaluations["before"]["held_out_failed"] == evaluations["after"]["held_out_failed"] == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert next(row["retried"] for row in reversed(rows) if "retried" in row) == 8, "one of each group, of two versions"
    (told,) = [line for line in caplog.messages if "is run again" in line]
    assert FAULTS[how] in told and FAULTS[how] in PAGE


CRASHING = """
import asyncio, os
import headrace

class Crashing:
    async def run(self, task, client):
        rollout = await client.generate(client.prompt(task["prompt"]))
        if task["prompt"] == "3" and client.index == 1:
            os._exit(3)
        await asyncio.sleep(0.05)
        return headrace.Episode(id=client.episode, group=client.group, task=task, rollouts=(rollout,))
"""


@pytest.mark.long
def test_a_task_that_always_ends_its_process_costs_no_other_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "crashing.py").write_text(CRASHING)
    monkeypatch.chdir(tmp_path)
    tasks = [{"prompt": f"{number}"} for number in range(8)]
    more = {"train": {"batch": 14, "group_size": 2}, "staleness": {"max_lag": 0}, "steps": 1, "held_out": tasks[:1]}
    environment = {"name": "crashing.py:Crashing", "processes": 1}
    result = small_run(tmp_path / "run", tasks=tasks, environment=environment, **more)
    counts = result.summary["accounting"]
    assert counts["trained"] == 14 and counts["failed"] == 1 and books_close(result.summary)
    (failed,) = [line for line in caplog.messages if " is failed: " in line]
    assert "/1 is failed: the environment lost its process, which ended with status 3" in failed
    assert "in it are run again, apart from others" in caplog.text
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert next(row["retried"] for row in reversed(rows) if "retried" in row) == 2, "its own"


def test_an_episode_that_always_fails_is_counted_with_its_reason(tmp_path: Path) -> None:
    tasks = [{"prompt": f"{number}", "how": "raises", "always": number == 0} for number in range(4)]
    Faulty.struck.clear()
    result = small_run(tmp_path / "run", tasks=tasks, held_out=tasks[1:2], environment=Faulty, steps=1)
    reasons = result.summary["dropped_because"]
    assert result.summary["accounting"]["failed"] > 0 and books_close(result.summary)
    assert any("raised KeyError" in reason for reason in reasons), reasons
