"""Groups that are unfinished when a batch is taken or a run stops: cancelled, recycled, or gone on with after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import weakref

import numpy as np
import pytest
from helpers import TASKS, books_close, failing_loss, small_run
from test_runs import run_and_kill

from headrace.bench.stubs import answer
from headrace.engine import InFlight
from headrace.envs import ENVIRONMENT, EngineClient, SingleTurn, StepEnvironment
from headrace.envs.steps import Step, World
from headrace.launch.stop import StopRequest
from headrace.observe.inspect import read_rollouts
from headrace.records import (
    Episode,
    FinishReason,
    InfraAbort,
    Invalid,
    Rollout,
    Scored,
    frames,
    unpack_episodes,
    unpack_rollouts,
)
from headrace.run.in_flight import GroupInFlight, InFlightTable
from headrace.run.policy import PolicyState
from headrace.run.policy_groups import max_generate_calls
from headrace.run.state import Run
from headrace.staleness import Rejection
from headrace.staleness.gate import gate_depth
from headrace.tasks import Task
from headrace.trainer.local import LocalTrainer

LONG_TAIL = {
    "model": {"context": 128},
    "sampling": {"max_tokens": 96},
    "engine": {"slots": 24},
    "train": {"batch": 8, "group_size": 2},
    "held_out": None,
    "observe": {"keep_rollouts_every": 1},
}
"""An untrained model ends a rollout by chance: most are short, a few are long."""


def check_books_always(monkeypatch) -> list[int]:
    """The equation is checked whenever something has moved; how often that was."""
    checks: list[int] = []
    original = Run.note_progress

    def checking(self):
        original(self)
        for policy in self.policies.values():
            policy.ledger.check()
            checks.append(len(policy.in_flight))

    monkeypatch.setattr(Run, "note_progress", checking)
    return checks


def note_runs(monkeypatch) -> list[Run]:
    """The runs whose legs start."""
    runs: list[Run] = []
    start = Run.start_leg
    monkeypatch.setattr(Run, "start_leg", lambda self, tasks: (runs.append(self), start(self, tasks)))
    return runs


def rollouts_of(result) -> list:
    return [rollout for step in range(1, result.summary["version"] + 1) for rollout in read_rollouts(result.folder, step)[1]]


# Cancelling what is over age


def test_what_is_over_age_is_cancelled_in_flight(tmp_path, monkeypatch):
    checks = check_books_always(monkeypatch)
    settings = {**LONG_TAIL, "steps": 16, "staleness": {"max_lag": 1}}
    never = small_run(tmp_path / "never", **settings)
    result = small_run(tmp_path / "cancel", **settings, partial={"cancel": "over_age"})
    reasons = result.summary["dropped_because"]
    assert reasons["rejected: lag, cancelled in flight"] > 0 and books_close(result.summary)
    assert result.summary["accounting"]["trained"] == 16 * 8 and result.summary["lag"]["max"] <= 1
    assert never.summary["dropped_because"].get("rejected: lag", 0) > reasons.get("rejected: lag", 0)
    assert "rejected: lag, cancelled in flight" not in never.summary["dropped_because"]
    assert result.summary["tokens"]["wasted"] > 0 and len(checks) > 100


def test_nothing_is_cancelled_that_could_have_been_trained(tmp_path, monkeypatch):
    """What would have been given up is let go on instead: all of it that ends before the run does is rejected."""
    doomed: set[str] = set()
    monkeypatch.setattr(PolicyState, "cancel", lambda self, group, tokens: doomed.add(group))
    rejected: set[str] = set()
    trained: set[str] = set()
    reject, settle = PolicyState.reject_stale, PolicyState.settle_trained

    def names(groups) -> set[str]:
        return {f"g{group.number}" for group in groups}

    def rejecting(self, version):
        before = names(self.buffer.groups())
        reject(self, version)
        rejected.update(before - names(self.buffer.groups()))

    def settling(self, started):
        settle(self, started)
        trained.update(names(started.groups))

    monkeypatch.setattr(PolicyState, "reject_stale", rejecting)
    monkeypatch.setattr(PolicyState, "settle_trained", settling)
    small_run(tmp_path / "run", steps=24, staleness={"max_lag": 1}, partial={"cancel": "over_age"}, **LONG_TAIL)
    assert not doomed & trained and len(doomed & rejected) > 3


def test_a_cancelled_group_frees_its_slots_and_its_calls(tmp_path, monkeypatch):
    """Also those of episodes that were cancelled before they started."""
    original = PolicyState.cancel
    left: list[tuple[int, int]] = []

    def cancelling(self, group, tokens):
        running = {request.rollout.group for request in runs[0].roles.engine.core.scheduler.running.values()}
        original(self, group, tokens)
        left.append((group in running, group in self.in_flight.groups))

    monkeypatch.setattr(PolicyState, "cancel", cancelling)
    runs = note_runs(monkeypatch)
    small_run(tmp_path / "run", steps=16, staleness={"max_lag": 1}, partial={"cancel": "over_age"}, **LONG_TAIL)
    assert any(was_running for was_running, _ in left) and not any(is_pending for _, is_pending in left)
    assert runs[0].generate_calls.num_free == max_generate_calls(runs[0].recipe), "every call has given its place back"
    core = runs[0].roles.engine.core
    assert not core.num_started and not core.num_waiting


def test_an_episode_that_will_not_be_cancelled_is_not_counted_twice(tmp_path, monkeypatch):
    class Stubborn(SingleTurn):
        async def run(self, task, client):
            with contextlib.suppress(BaseException):
                return await super().run(task, client)
            return Episode(id=client.episode, group=client.group, task=task)

    checks = check_books_always(monkeypatch)
    settings = {"staleness": {"max_lag": 1}, "partial": {"cancel": "over_age"}, "environment": Stubborn()}
    result = small_run(tmp_path / "run", steps=16, **settings, **LONG_TAIL)
    assert result.summary["dropped_because"]["rejected: lag, cancelled in flight"] > 0 and books_close(result.summary)
    assert result.summary["accounting"]["trained"] == 16 * 8 and checks


def test_a_group_is_as_old_as_its_oldest_token_that_may_be_trained():
    def episode(id: str, version: int, outcome=None) -> Episode:
        rollouts = (answer(0, version=version).replace(id=id, group=id.partition("/")[0]),)
        return Episode(id=id, group=id.partition("/")[0], task={}, rollouts=rollouts, outcome=outcome)

    class Engine:
        async def in_flight(self):
            prompt = Rollout.from_prompt([1, 2], id="young/0", episode="young/0", group="young")
            grown = prompt.replace(id="grown/0", episode="grown/0", group="grown", index=0)
            unknown = prompt.replace(id="unknown/0", episode="unknown/0", group="unknown", index=0)
            other = prompt.replace(id="eval3/0", episode="eval3/0", group="eval3/0", index=0)
            return [
                InFlight.of(prompt, num_sampled=3, first=4, partial=lambda: prompt),
                InFlight.of(grown, num_sampled=7, first=3, partial=lambda: grown),
                InFlight.of(unknown, num_sampled=0, first=-1, partial=lambda: unknown),
                InFlight.of(other, num_sampled=7, first=0, partial=lambda: other),
            ]

    table = InFlightTable(Engine())  # type: ignore[arg-type]
    for number, name in enumerate(("young", "grown", "unknown", "scored", "invalid", "unscored", "failed", "resumed", "empty")):
        table.add(GroupInFlight("policy", name, number, Task({})), indexes=range(2))
    outcomes = {"scored/0": Scored(1.0), "scored/1": Invalid("no answer"), "invalid/0": Invalid("no answer")}
    for id, outcome in {**outcomes, "unscored/0": None, "failed/0": InfraAbort("")}.items():
        table.end(table.groups[id[:-2]].episodes[int(id[-1])], episode(id, 3, outcome))
    assert table.num_unfinished == 18 - 5
    resumed = answer(0, version=3).replace(id="resumed/0", group="resumed")
    table.groups["resumed"].episodes[0].partials["resumed/0"] = resumed
    found = asyncio.run(table.over_age(Rejection(max_lag=2), next_version=6, held=5))
    assert found == {"grown": 7, "scored": 20, "unscored": 10, "resumed": 10}, "what will not be trained is lost too"
    assert asyncio.run(table.over_age(Rejection(max_lag=2), next_version=5, held=5)) == {}
    cancelled, again = table.groups["unscored"].episodes[1], table.groups["failed"].episodes[0]
    table.cancel("unscored")
    table.end(cancelled, episode("unscored/1", 3, None))
    table.end(again, None)
    assert table.num_unfinished == sum(record.ended is None for record in table.episodes()) == 13 - 1 + 1


def test_a_group_that_has_left_is_freed_at_once():
    table = InFlightTable(None)  # type: ignore[arg-type]
    table.add(GroupInFlight("policy", "g", 0, Task({})), indexes=range(2))
    group = weakref.ref(table.groups["g"])
    gc.disable()  # collected seldom in a run: what waits for it keeps the tokens of many batches
    try:
        for record in list(table.episodes()):
            table.end(record, Episode(id=record.id, group="g", task={}, outcome=Scored(1.0)))
            left = table.leave(record)
        assert [record.id for record in left] == ["g/0", "g/1"] and not len(table)
        del record, left
        assert group() is None
    finally:
        gc.enable()


# More than a batch needs


@pytest.mark.parametrize(
    "settings",
    [
        {"buffer": {"kind": "synchronous"}, "partial": {"interrupt": "abort"}},
        pytest.param({"buffer": {"kind": "synchronous"}, "partial": {"interrupt": "keep"}}, marks=pytest.mark.long),
        pytest.param(
            {"buffer": {"kind": "synchronous"}, "partial": {"interrupt": "abort", "cancel": "over_age"}}, marks=pytest.mark.long
        ),
        pytest.param({"partial": {"interrupt": "abort"}}, marks=pytest.mark.long),
        {"partial": {"interrupt": "retract"}},
    ],
    ids=["in turn, abort", "in turn, keep", "in turn, cancel", "abort", "retract"],
)
def test_a_batch_is_trained_when_it_is_whole_and_the_unfinished_go_on(tmp_path, monkeypatch, settings):
    checks = check_books_always(monkeypatch)
    most: list[int] = []
    submit = PolicyState.submit

    def counting(self, task):
        works = submit(self, task)
        untrained = self.submitted_groups - self.dropped_groups - self.version * 4
        most.append(untrained - (gate_depth(self.recipe) + 1) * 4)
        return works

    monkeypatch.setattr(PolicyState, "submit", counting)
    settings["partial"]["oversample"] = 1.75
    result = small_run(tmp_path / "run", steps=16, staleness={"max_lag": 2}, **settings, **LONG_TAIL)
    assert result.summary["status"] == "finished" and books_close(result.summary) and len(checks) > 100
    assert result.summary["accounting"]["trained"] == 16 * 8 and result.summary["lag"]["max"] <= 2
    assert max(most) == 3, "three groups more than four a batch, and never a fourth, however many are recycled"
    spans = [rollout for rollout in rollouts_of(result) if len(set(rollout.versions[rollout.is_sampled].tolist())) > 1]
    assert spans, "some were unfinished when a batch was taken, went on and were trained"
    if settings["partial"]["interrupt"] == "abort":
        assert all(rollout.calls[0].finish_reason is FinishReason.ABORT for rollout in spans)


def test_what_is_recycled_goes_on_before_anything_new_begins(tmp_path, monkeypatch):
    """And in the order it was in."""
    from headrace.engine.native.scheduler import Scheduler

    admitted: list[tuple[str, bool]] = []
    place = Scheduler._place
    monkeypatch.setattr(
        Scheduler,
        "_place",
        lambda self, request, runner: (
            place(self, request, runner) and (admitted.append((request.rollout.id, bool(request.rollout.calls))) or True)
        ),
    )
    swaps: list[int] = []
    resume = Run.resume_engines

    async def noting(self, policy):
        swaps.append(len(admitted))
        await resume(self, policy)

    monkeypatch.setattr(Run, "resume_engines", noting)
    settings = {"buffer": {"kind": "synchronous"}, "partial": {"interrupt": "abort", "oversample": 2.0}}
    small_run(tmp_path / "run", steps=10, staleness={"max_lag": 3}, **settings, **LONG_TAIL)
    num_recycled = 0
    for start, stop in zip(swaps, [*swaps[1:], len(admitted)], strict=True):
        kinds = [is_resumed for _, is_resumed in admitted[start:stop]]
        assert kinds == sorted(kinds, reverse=True), kinds
        numbers = [int(id[1:].partition("/")[0]) for id, is_resumed in admitted[start:stop] if is_resumed]
        assert numbers == sorted(numbers)
        num_recycled += sum(kinds)
    assert num_recycled > 10


def test_in_turn_nothing_is_drawn_while_a_batch_is_trained(tmp_path, monkeypatch):
    runs = note_runs(monkeypatch)
    step = LocalTrainer.step
    seen: list[tuple[int, int]] = []

    async def stepping(self, batch, *, learning_rate):
        engine = runs[0].roles.engine
        seen.append((engine.core.num_running, len(runs[0].policies["policy"].in_flight)))
        assert engine._is_paused
        return await step(self, batch, learning_rate=learning_rate)

    monkeypatch.setattr(LocalTrainer, "step", stepping)
    settings = {"buffer": {"kind": "synchronous"}, "partial": {"interrupt": "abort", "oversample": 1.5}}
    small_run(tmp_path / "run", steps=6, staleness={"max_lag": 2}, **settings, **LONG_TAIL)
    assert all(running == 0 for running, _ in seen) and any(pending for _, pending in seen)


def test_at_lag_0_what_is_too_many_is_given_up(tmp_path):
    partial = {"interrupt": "abort", "oversample": 2.0, "cancel": "over_age"}
    result = small_run(tmp_path / "run", steps=10, staleness={"max_lag": 0}, partial=partial, **LONG_TAIL)
    assert result.summary["lag"]["max"] == 0 and result.summary["accounting"]["trained"] == 80
    assert result.summary["dropped_because"]["rejected: lag, cancelled in flight"] > 0 and books_close(result.summary)


# Checkpoints


def saved(folder, step: int) -> list[dict]:
    with (folder / "checkpoints" / f"step-{step}" / "partial.wire").open("rb") as file:
        groups = list(frames.read_frames(file))
    for group in groups:
        group["episodes"], group["rollouts"] = unpack_episodes(group["episodes"]), unpack_rollouts(group["rollouts"])
    return groups


def note_generated(monkeypatch) -> list[str]:
    """The ids of rollouts that were begun from nothing."""
    begun: list[str] = []
    generate = EngineClient.generate

    async def noting(self, rollout):
        if rollout.id not in self.partials:
            begun.append(rollout.id)
        return await generate(self, rollout)

    monkeypatch.setattr(EngineClient, "generate", noting)
    return begun


@pytest.mark.parametrize("interrupt", ["keep", pytest.param("abort", marks=pytest.mark.long)])
def test_what_is_half_drawn_goes_on_after_a_restart(tmp_path, monkeypatch, interrupt):
    folder = tmp_path / "run"
    settings = {**LONG_TAIL, "steps": 12, "staleness": {"max_lag": 6}, "partial": {"interrupt": interrupt}}
    run_and_kill(folder, monkeypatch, at=5, **settings)
    groups = saved(folder, 3)
    manifest = json.loads((folder / "checkpoints" / "step-3" / "manifest.json").read_text())
    assert {group["number"] for group in groups} == {number for number, *_ in manifest["in_flight"]}
    assert all(source == "tasks" and TASKS[index] == row for _, row, source, index in manifest["in_flight"])
    partials = {rollout.id: rollout for group in groups for rollout in group["rollouts"]}
    ended = [episode.id for group in groups for episode in group["episodes"]]
    assert len(partials) > 3 and ended and not partials.keys() & set(ended)
    assert all(rollout.versions.max() <= 3 and rollout.lineage == manifest["lineage"] for rollout in partials.values())
    begun = note_generated(monkeypatch)
    result = small_run(folder, **settings)
    assert result.summary["status"] == "finished" and books_close(result.summary) and result.summary["lag"]["max"] <= 6
    assert not {*begun} & {*partials, *ended}, "none of them is begun again"
    last = json.loads((folder / "checkpoints" / "step-12" / "manifest.json").read_text())
    trained = {rollout.id: rollout for rollout in rollouts_of(result)}
    went_on = trained.keys() & partials.keys()
    assert len(went_on) > 2 and trained.keys() & set(ended)
    for id in went_on:
        before, after = partials[id], trained[id]
        stop = len(before)
        assert np.array_equal(after.token_ids[:stop], before.token_ids) and np.array_equal(
            after.versions[:stop], before.versions
        )
        assert np.array_equal(after.logprobs[:stop], before.logprobs) and len(after) > stop
        assert after.lineage == last["lineage"] != before.lineage
        assert after.num_sampled <= 96 and after.versions[stop:].min() >= 3


def check_none_begins_anew(folder, settings, partials, monkeypatch) -> None:
    begun = note_generated(monkeypatch)
    result = small_run(folder, **settings)
    assert result.summary["status"] == "finished" and books_close(result.summary) and not partials & {*begun}


def test_a_stopped_run_leaves_what_was_half_drawn(tmp_path, monkeypatch):
    stops: list[StopRequest] = []
    heard = StopRequest.heard_by
    monkeypatch.setattr(StopRequest, "heard_by", lambda self, stop: (stops.append(self), heard(self, stop))[1])
    settings = {**LONG_TAIL, "steps": 12, "staleness": {"max_lag": 6}, "checkpoint": {"every": 100, "keep": 10}}
    from headrace.run.session import Session

    measure = Session._write_version

    def stopping(self, *arguments):
        if self.policy.version == 4:
            stops[0].make()
        return measure(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Session, "_write_version", stopping)
        small_run(tmp_path / "run", **settings)
    step = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    partials = {rollout.id for group in saved(tmp_path / "run", step) for rollout in group["rollouts"]}
    assert 4 <= step < 12 and len(partials) > 3
    check_none_begins_anew(tmp_path / "run", settings, partials, monkeypatch)


def test_a_run_that_fails_leaves_what_was_half_drawn(tmp_path, monkeypatch):
    """Noted before the failure ends the tasks that have it under way."""
    settings = {**LONG_TAIL, "steps": 8, "staleness": {"max_lag": 6}, "checkpoint": {"every": 100, "keep": 10}}
    settings["train"] = {**LONG_TAIL["train"], "loss": failing_loss(tmp_path)}
    with pytest.raises(RuntimeError, match="out of luck"):
        small_run(tmp_path / "run", **settings)
    partials = {rollout.id for group in saved(tmp_path / "run", 4) for rollout in group["rollouts"]}
    assert len(partials) > 3
    check_none_begins_anew(tmp_path / "run", settings, partials, monkeypatch)


def test_what_would_be_too_old_is_begun_anew(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    settings = {
        **LONG_TAIL,
        "steps": 12,
        "staleness": {"max_lag": 1},
        "model": {"context": 256},
        "sampling": {"max_tokens": 240},
    }
    run_and_kill(folder, monkeypatch, at=10, **settings)
    old = {r.id for group in saved(folder, 9) for r in group["rollouts"] if r.oldest_version < 8}
    assert old
    begun = note_generated(monkeypatch)
    result = small_run(folder, **settings)
    assert old <= {*begun} and books_close(result.summary) and result.summary["lag"]["max"] <= 1


class TwoTurns:
    """Asks, answers by itself, and asks again."""

    can_resume = False

    async def run(self, task, client):
        first = await client.generate(client.prompt(task["prompt"]))
        asked = first.append([9])
        if len(asked) >= 120:
            return Episode(id=client.episode, group=client.group, task=task, rollouts=(first,))
        return Episode(id=client.episode, group=client.group, task=task, rollouts=(await client.generate(asked),))


class Resumed(TwoTurns):
    can_resume = True


class Counted(World):
    """Pays one for the first action, two for the second, three for the last."""

    def __init__(self):
        self.count = 0

    async def reset(self, seed):
        return ""

    async def step(self, action):
        self.count += 1
        return Step(f"{self.count}:", float(self.count), is_last=self.count == 3)

    async def close(self): ...


class Counting(StepEnvironment):
    def _world(self, task):
        return Counted()


def num_turns(rollout) -> int:
    """How often something the policy sampled follows what it did not."""
    return int((np.diff(rollout.is_sampled.astype(int)) == 1).sum())


@pytest.mark.parametrize(
    ("environment", "resumes"),
    [(TwoTurns(), False), (Resumed(), True), (Counting(), False), (Counting(can_resume=True), True)],
    ids=["two turns", "two turns that resume", "steps", "steps that resume"],
)
def test_an_environment_with_turns_is_run_again_or_gets_its_turns_again(tmp_path, monkeypatch, environment, resumes, capsys):
    folder = tmp_path / "run"
    settings = {**LONG_TAIL, "steps": 8, "staleness": {"max_lag": 6}, "environment": environment}
    settings["sampling"] = {"max_tokens": 48}
    unfinished: list[str] = []
    entries = InFlightTable.entries

    async def noting(self):
        calls = [call.rollout for call in await self._engine.in_flight()]
        unfinished[:] = [rollout.id for rollout in calls if (np.diff(rollout.is_sampled.astype(int)) < 0).any()]
        return await entries(self)

    with monkeypatch.context() as patch:
        patch.setattr(InFlightTable, "entries", noting)
        run_and_kill(folder, monkeypatch, at=5, **settings)
    partials = {rollout.id: rollout for group in saved(folder, 3) for rollout in group["rollouts"]}
    assert unfinished and partials
    assert set(unfinished) <= partials.keys() if resumes else not partials.keys() & set(unfinished)
    begun = note_generated(monkeypatch)
    result = small_run(folder, **settings, quiet=False)
    assert result.summary["status"] == "finished" and books_close(result.summary)
    anew = f"anew       episodes in flight begin again: environment '{type(environment).__name__}' does not say"
    assert (anew in capsys.readouterr().out) is not resumes
    if resumes:
        assert not set(unfinished) & {*begun}, "in their second turn: they go on"
    else:
        assert set(unfinished) <= {*begun}, "in their second turn: begun anew"
    trained = {rollout.id: rollout for rollout in rollouts_of(result)}
    went_on = [(partials[id], trained[id]) for id in trained.keys() & partials.keys()]
    assert went_on and all(np.array_equal(after.token_ids[: len(before)], before.token_ids) for before, after in went_on)
    for rollout in trained.values() if isinstance(environment, Counting) else ():
        actions = num_turns(rollout) - (rollout.finish_reason is FinishReason.LENGTH)
        assert rollout.rewards[ENVIRONMENT] == actions * (actions + 1) / 2, "the world took all actions, also those before"
