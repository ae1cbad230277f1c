"""Callbacks of users: when they are called, and what they may do to the run."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import SMALL, TASKS, length_reward, same_weights, small_run, weights
from test_runs import run_and_kill

import headrace
from headrace.cli import main
from headrace.config import make_recipe
from headrace.observe import read_metrics
from headrace.run import CallbackError, changed
from headrace.run.callbacks import HOOKS, Callbacks
from headrace.run.changes import CHANGEABLE, Change, replay, value_of
from headrace.settings import ConfigError, describe

PAGE = Path(__file__).parents[2] / "docs" / "callbacks.md"
MODES = ["inline", pytest.param("local", marks=pytest.mark.long)]


class Recorder(headrace.Callback):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.states: dict[str, Any] = {}
        self.threads: set[str] = set()

    def note(self, hook: str, state: Any) -> None:
        self.calls.append((hook, state.version))
        self.states[hook] = state
        self.threads.add(threading.current_thread().name)

    def on_start(self, state: Any) -> None:
        self.note("start", state)

    def on_rollouts(self, state: Any, groups: Any) -> None:
        self.note("rollouts", state)
        self.rollouts = [rollout for group in groups for episode in group.episodes for rollout in episode.rollouts]

    async def on_evaluate(self, state: Any, evaluation: Any) -> None:
        await asyncio.sleep(0)
        self.note("evaluate", state)
        assert 0 <= evaluation.metrics["success"] <= 1

    def on_step(self, state: Any) -> None:
        self.note("step", state)

    def on_checkpoint(self, state: Any, folder: Path) -> None:
        self.note("checkpoint", state)
        assert (folder / "model.safetensors").exists()

    def on_end(self, state: Any) -> None:
        self.note("end", state)


class At:
    """Does something in `on_step` of a version."""

    def __init__(self, version: int, action: Any) -> None:
        self.version, self.action = version, action
        self.seen: list[int] = []

    def on_step(self, state: Any) -> None:
        self.seen.append(state.version)
        if state.version == self.version:
            self.action(state)


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Of a version the row it is trained with; those of evaluations are joined to it."""
    return read_metrics(folder / name) if name == "metrics.jsonl" else [json.loads(x) for x in (folder / name).open()]


@pytest.mark.parametrize("mode", MODES)
def test_every_method_is_called_in_its_place(tmp_path: Path, mode: str) -> None:
    noted = Recorder()
    result = small_run(
        tmp_path / "run", steps=4, orchestrate=mode, checkpoint={"every": 2}, callbacks=[noted], train={"stream_parts": 1}
    )
    between = [call for call in noted.calls if call[0] not in ("rollouts", "checkpoint")]
    assert between == [
        *[("start", 0), ("evaluate", 0), ("step", 1), ("step", 2), ("step", 3), ("step", 4), ("evaluate", 4), ("end", 4)]
    ]
    for hook, versions in (("rollouts", [0, 1, 2, 3]), ("checkpoint", [2, 4])):
        assert [version for name, version in noted.calls if name == hook] == versions
    assert noted.calls.index(("step", 2)) < noted.calls.index(("checkpoint", 2)) < noted.calls.index(("checkpoint", 4))
    last, end = noted.states["step"], noted.states["end"]
    assert last.metrics.items() <= rows(result.folder)[-1].items() and last.folder == result.folder and last.recipe.steps == 4
    assert (last.status, end.status) == ("running", "finished")
    assert len(noted.rollouts) == 16 and noted.rollouts[0].rewards.keys() == {"length_reward"}
    assert last.decode(noted.rollouts[0].token_ids[:1].tolist()) in {row["prompt"][0] for row in TASKS}
    assert noted.threads == ({"MainThread"} if mode == "inline" else {"MainThread", "callbacks"})  # the async one stays
    assert result.summary["callbacks"].keys() == {f"Recorder.{hook}" for hook in HOOKS}


@pytest.mark.long
def test_callbacks_that_only_look_change_nothing(tmp_path: Path) -> None:
    plain, watched = small_run(tmp_path / "a"), small_run(tmp_path / "b", callbacks=[Recorder()])
    assert same_weights(plain.checkpoint, watched.checkpoint)


def test_stop_saves_says_who_and_the_same_command_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop, noted = At(2, lambda state: state.stop()), Recorder()
    result = small_run(tmp_path / "run", callbacks=[stop, noted], quiet=False)
    version = result.summary["version"]
    assert version == 2 and result.summary["status"] == "stopped" and result.summary["stopped_by"] == "At.on_step"
    assert result.checkpoint == str(tmp_path / "run" / "checkpoints" / f"step-{version}")
    assert rows(tmp_path / "run", "events.jsonl") == [{"version": 2, "event": "stop", "by": "At.on_step"}]
    assert noted.calls[-1] == ("end", version) and noted.states["end"].status == "stopped"
    assert f"stopped by At.on_step   version {version} of 6" in capsys.readouterr().out
    again = small_run(tmp_path / "run", callbacks=[stop])
    assert again.summary["status"] == "finished" and stop.seen[-1] == 6 and stop.seen.count(1) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_change_holds_from_the_next_batch_and_is_an_event(
    tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(state: Any) -> None:
        state.change("train.learning_rate", 5e-4)
        assert state.recipe.train.learning_rate == 5e-4
        state.change("evaluate.every", 4)

    result = small_run(tmp_path / "run", orchestrate=mode, callbacks=[At(2, change)])
    rates = [row["train/learning_rate"] for row in rows(tmp_path / "run")]
    begins = 2 if mode == "inline" else 3  # the batch of version 3 was in training
    assert rates == [1e-3] * begins + [5e-4] * (6 - begins)
    assert [row["version"] for row in rows(tmp_path / "run") if "success" in row] == [4, 6]
    events = rows(tmp_path / "run", "events.jsonl")
    assert [(each["version"], each["key"], each["was"], each["value"], each["by"]) for each in events] == [
        (2, "train.learning_rate", 1e-3, 5e-4, "At.on_step"),
        (2, "evaluate.every", 0, 4, "At.on_step"),
    ]
    assert [each["key"] for each in result.summary["changes"]] == ["train.learning_rate", "evaluate.every"]
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-6" / "manifest.json").read_text())
    assert manifest["changes"] == result.summary["changes"]
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        main(["inspect", str(tmp_path / "run")])
    assert capsys.readouterr().out.startswith("version 2: train.learning_rate 0.001 -> 0.0005, by At.on_step\n")


def change_much(state: Any) -> None:
    state.change("train.learning_rate", 5e-4)
    state.change("train.constants.clip_high", 0.5)
    state.change("checkpoint.every", 2)
    state.change("steps", 9)


@pytest.mark.parametrize("mode", MODES)
def test_in_exact_mode_a_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    max_lag = 1 if mode == "inline" else 0  # between processes, only a synchronous run is the same each time
    how: dict[str, Any] = {
        **{"exact": True, "orchestrate": mode, "checkpoint": {"every": 4}, "staleness": {"max_lag": max_lag}}
    }
    whole = small_run(tmp_path / "whole", callbacks=[At(1, change_much)], **how)
    assert whole.summary["version"] == 9
    run_and_kill(tmp_path / "killed", monkeypatch, at=5, callbacks=[At(1, change_much)], **how)
    late = At(1, change_much)
    resumed = small_run(tmp_path / "killed", callbacks=[late], **how)
    assert late.seen[0] == 5 and late.seen[-1] == 9  # its change was made before the checkpoint
    assert same_weights(whole.checkpoint, resumed.checkpoint)
    assert [row["train/learning_rate"] for row in rows(tmp_path / "killed")] == [
        row["train/learning_rate"] for row in rows(tmp_path / "whole")
    ]
    events = [[{**each, "at": 0} for each in rows(tmp_path / name, "events.jsonl")] for name in ("whole", "killed")]
    assert events[0] == events[1] and len(events[0]) == 4


@pytest.mark.parametrize(("every", "version"), [(0, 0), (2, 2)])
def test_a_stopped_run_says_which_version_it_evaluated_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], every: int, version: int
) -> None:
    callbacks, settings = [At(3, lambda state: state.stop())], {"evaluate": {"every": every}}
    stopped = small_run(tmp_path / "run", callbacks=callbacks, quiet=False, **settings).summary
    out, held_out = capsys.readouterr().out, stopped["held_out"]
    (line,) = [line for line in out.splitlines() if line.startswith("held-out   ") and "no later one was evaluated" in line]
    assert stopped["version"] == 3 and held_out["version"] == version and (" -> " in line) == (version > 0)
    assert f"{held_out['before']['success']:.1%}" in line and (f"version {version}:" if version else "before RL:") in line
    assert (stopped["success_after"] is None) == (version == 0) and stopped["success_after"] == held_out["after"].get("success")
    finished = small_run(tmp_path / "run", quiet=False, **settings).summary
    assert (finished["status"], finished["held_out"]["version"]) == ("finished", 6) and finished["success_after"] is not None
    assert "no later one" not in capsys.readouterr().out


@pytest.mark.long
def test_in_exact_mode_a_stop_waits_for_the_checkpoint(tmp_path: Path) -> None:
    how: dict[str, Any] = {"exact": True, "staleness": {"max_lag": 1}, "checkpoint": {"every": 4}, "steps": 8}
    result = small_run(tmp_path / "run", callbacks=[At(1, lambda state: state.stop())], **how)
    assert (result.summary["status"], result.summary["version"]) == ("stopped", 4)
    again = small_run(tmp_path / "run", **how)
    assert same_weights(again.checkpoint, small_run(tmp_path / "whole", **how).checkpoint)


@pytest.mark.parametrize("steps", [8, pytest.param(4, marks=pytest.mark.long)])
def test_the_length_of_a_run_may_change(tmp_path: Path, steps: int) -> None:
    how: dict[str, Any] = {"callbacks": [At(2, lambda state: state.change("steps", steps))], "evaluate": {"every": 0}}
    result = small_run(tmp_path / "run", **how)
    assert (result.summary["status"], result.summary["version"], result.summary["steps"]) == ("finished", steps, steps)
    assert [row["version"] for row in rows(tmp_path / "run") if "success" in row] == [steps]


def test_a_setting_may_change_at_every_version(tmp_path: Path) -> None:
    """After the last it is for no batch, and no error."""
    changes = [At(version, lambda state: state.change("train.learning_rate", 1e-4 * state.version)) for version in (1, 2)]
    summary = small_run(tmp_path / "run", callbacks=changes, held_out=None, steps=2).summary
    assert summary["status"] == "finished" and [each["value"] for each in summary["changes"]] == [1e-4, 2e-4]


def test_a_run_that_a_callback_shortened_is_not_resumed_by_the_same_command(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    how: dict[str, Any] = {"callbacks": [At(1, lambda state: state.change("steps", 2))], "held_out": None, "steps": 3}
    first, second = small_run(None, **how), small_run(None, **how)
    assert first.summary["version"] == second.summary["version"] == 2 and first.folder != second.folder


@pytest.mark.long
def test_a_run_that_was_made_longer_is_resumed_past_its_recipe(tmp_path: Path) -> None:
    longer, stop = At(2, lambda state: state.change("steps", 9)), At(7, lambda state: state.stop())
    small_run(tmp_path / "run", callbacks=[longer, stop])
    assert small_run(tmp_path / "run").summary["version"] == 9


@pytest.mark.long
def test_the_temperature_of_later_rollouts_may_change(tmp_path: Path) -> None:
    noted = Recorder()
    change = At(3, lambda state: state.change("sampling.temperature", 0.5))
    small_run(tmp_path / "run", staleness={"max_lag": 0}, callbacks=[change, noted])
    assert {float(call.sampling.temperature) for rollout in noted.rollouts for call in rollout.calls} == {0.5}
    assert weights(tmp_path / "run" / "checkpoints" / "step-6")


@pytest.mark.parametrize("mode", MODES)
def test_the_lag_may_grow_and_shrink(tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is ahead when it shrinks is rejected if too old, and replaced."""
    grow, shrink = (At(at, lambda state, lag=lag: state.change("staleness.max_lag", lag)) for at, lag in ((2, 4), (8, 1)))
    longer = At(8, lambda state: state.change("steps", 14))
    how: dict[str, Any] = {"orchestrate": mode, "steps": 12, "held_out": None, "engine": {"slots": 128}}
    how["staleness"] = {"max_lag": 1}
    result = small_run(tmp_path / "run", callbacks=[grow, shrink, longer], quiet=False, **how)
    lags = [row["lag_max"] for row in rows(tmp_path / "run")]
    taken = 2 if mode == "inline" else 3  # by the change
    assert max(lags[:taken]) <= 1 and max(lags[taken + 6 :]) <= 1 and result.summary["status"] == "finished"
    if mode == "inline":  # between processes it depends on who is faster
        assert max(lags) > 1 and result.summary["accounting"]["rejected"] > 0
    shown = capsys.readouterr().out
    assert "\nstep 8/12 " in shown and "\nstep 14/14 " in shown


REFUSED = [
    ("train.batch", 8, "train.batch = 8: it cannot change while the run goes on; these can: steps, train.learning_rate"),
    ("train.learning_rat", 1.0, "cannot change while the run goes on"),
    ("train.value_learning_rate", 1.0, "train.value_learning_rate = 1.0: it cannot change while the run goes on"),
    ("train.learning_rate", -1.0, "train.learning_rate = -1.0: must be a number above 0"),
    ("train.learning_rate", "fast", "train.learning_rate = 'fast': must be a number"),
    ("train.constants.clip_hi", 0.3, "train.constants.clip_hi: the loss 'grpo' takes no 'clip_hi'; it takes: clip_low"),
    ("staleness.max_lag", 0, "staleness.max_lag = 0: with 0 engines and trainer take turns"),
    ("staleness.max_lag", -1, "staleness.max_lag = -1: must be ≥ 0"),
    ("steps", 2, "steps = 2: version 2 is trained already; to end the run now, call stop()"),
    ("train.kl", 0.1, "train.kl = 0.1: kl = 0 is a run without a reference model"),
    ("checkpoint.every", 0, "checkpoint.every = 0: must be ≥ 1"),
    ("observe.table_rows", -1, "observe.table_rows = -1: must be ≥ 0"),
    ("observe.print_rollouts", -2, "observe.print_rollouts = -2: must be ≥ 0"),
    ("observe.keep_rollouts_every", -1, "observe.keep_rollouts_every = -1: must be ≥ 0"),
]


@pytest.mark.parametrize(("key", "value", "problem"), REFUSED)
def test_what_cannot_change_is_refused_with_what_can(key: str, value: object, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        changed(make_recipe({"steps": 9}), key, value, version=2)
    assert problem in str(refused.value)


@pytest.mark.parametrize(("key", "value"), [("sampling.temperature", 0.5), ("staleness.max_lag", 2)])
def test_exact_runs_keep_what_rollouts_ahead_depend_on(key: str, value: float) -> None:
    exact = make_recipe({"exact": True, "staleness.max_lag": 1, "orchestrate": "inline", "device": "cpu"})
    with pytest.raises(ConfigError, match="with exact = true it cannot change"):
        changed(exact, key, value, version=0)


def test_everything_that_can_change_is_a_setting() -> None:
    known = {key for key, *_ in describe(headrace.Recipe)}
    assert {key.removesuffix(".*") for key in CHANGEABLE} <= known


def test_a_setting_that_the_user_edits_afterwards_keeps_the_users_value() -> None:
    base = make_recipe({"checkpoint.every": 5})
    changes = [Change(key="checkpoint.every", value=7, was=5, by="x"), Change(key="checkpoint.every", value=9, was=7, by="x")]
    assert value_of(replay(base, changes), "checkpoint.every") == 9
    assert value_of(replay(make_recipe({"checkpoint.every": 6}), changes), "checkpoint.every") == 6


@pytest.mark.parametrize("mode", MODES)
def test_what_a_callback_raises_ends_the_run_with_its_traceback(tmp_path: Path, mode: str) -> None:
    def fail(state: Any) -> None:
        raise KeyError("mine")

    noted = Recorder()
    with pytest.raises(CallbackError, match=r"At.on_step raised KeyError: 'mine'") as raised:
        small_run(tmp_path / "run", orchestrate=mode, callbacks=[At(2, fail), noted])
    cause = raised.value.__cause__
    assert isinstance(cause, KeyError) and cause.__traceback__ is not None
    assert cause.__traceback__.tb_frame.f_code.co_name == "on_step"
    assert noted.states["end"].status == "failed" and "the same command resumes from version" in raised.value.__notes__[0]
    assert "resumes from version 0" not in raised.value.__notes__[0], "versions in training were finished and saved"
    if mode == "inline":
        assert small_run(tmp_path / "run").summary["version"] == 6


def test_settings_are_changed_only_where_a_resumed_run_would_do_the_same(tmp_path: Path) -> None:
    class Early:
        def on_start(self, state: Any) -> None:
            state.change("steps", 9)

    with pytest.raises(CallbackError, match=r"a setting can be changed in on_step and on_evaluate, not in Early.on_start"):
        small_run(tmp_path / "run", callbacks=[Early])


def methods(**named: str) -> Any:
    return type("Mine", (), {name: lambda self, *_: None for name in named})()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (methods(on_step_end=""), "callbacks: Mine.on_step_end would never be called; did you mean on_step?"),
        (methods(on_save=""), "Mine.on_save would never be called; did you mean on_checkpoint?"),
        (methods(on_stepp="", on_step=""), "did you mean on_step?"),
        (methods(on_brightness=""), "there are: on_start, on_rollouts, on_step, on_evaluate, on_checkpoint, on_end"),
        (methods(), "has no method that a run calls"),
        (print, "has no method that a run calls"),
        ("nothing", "callbacks = 'nothing': write module:name or file.py:name"),
    ],
)
def test_an_object_that_would_never_be_called_is_refused_before_anything_is_made(
    tmp_path: Path, given: Any, problem: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        small_run(tmp_path / "run", callbacks=[given])
    assert problem in str(refused.value) and not (tmp_path / "run").exists()


def test_a_callback_of_transformers_is_told_apart() -> None:
    from transformers import TrainerCallback

    with pytest.raises(ConfigError, match=r"is a TrainerCallback of transformers; derive it from headrace.Callback"):
        Callbacks([TrainerCallback()], in_thread=False, deadline=1.0)


def test_a_class_is_made_and_a_name_is_imported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Stop:\n    def on_step(self, state):\n        state.stop()\n")
    result = small_run(tmp_path / "run", callbacks=[Recorder, f"{tmp_path}/mine.py:Stop"])
    assert result.summary["stopped_by"] == "Stop.on_step"


class Slow:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step(self) -> None:
        time.sleep(self.seconds)


def test_a_slow_call_is_timed_once_and_one_that_hangs_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(given: Any, *, deadline: float, times: int = 1) -> tuple[Callbacks, list[float]]:
        callbacks = Callbacks([given], in_thread=True, deadline=deadline)
        ((name, method),) = callbacks.methods("on_step")
        try:
            return callbacks, [await callbacks.call(name, method) for _ in range(times)]
        finally:
            callbacks.close()

    monkeypatch.setattr("headrace.run.callbacks.SLOW_SECONDS", 0.001)
    callbacks, (first, second) = asyncio.run(call(Slow(0.01), deadline=60.0, times=2))
    assert first > 0 and second == 0 and callbacks.seconds["Slow.on_step"] >= 0.02
    with pytest.raises(CallbackError, match=r"Slow.on_step has not returned within deadline = 0.2 seconds"):
        asyncio.run(call(Slow(3.0), deadline=0.2))


@pytest.mark.long
def test_the_examples_of_the_docs_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As they stand, but for the recipe."""
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for number, example in enumerate(examples):
        small = {name: value for name, value in SMALL.items() if name != "evaluate"}
        given = {**small, "tasks": TASKS, "reward": length_reward, "held_out": TASKS[:4], "run_dir": tmp_path / str(number)}
        exec(example.replace('recipe="recipes/quickstart.toml"', "**given"), {"given": given})
    stopped, finished = capsys.readouterr().out.splitlines()
    assert (
        stopped.startswith(("stopped EarlyStop.on_evaluate ['train.learning_rate']", "finished")) and finished == "finished 20"
    )


def test_the_page_names_every_method_and_every_setting_that_can_change() -> None:
    page = PAGE.read_text()
    assert all(f"`{hook}(state" in page for hook in HOOKS)
    assert all(f"`{key.replace('*', 'NAME')}`" in page for key in CHANGEABLE)
