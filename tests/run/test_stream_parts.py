"""`train.stream_parts`: a batch is trained part by part, in one optimizer step or in one for each part. Every group is trained
once, in a whole version, and nothing of a version that is not whole is kept."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from helpers import SMALL, books_close, small_run
from hypothesis import given, strategies as st
from strategies import quick
from stubbed import make_roles

from headrace.bench.loads import finished
from headrace.bench.stubs import InstantEngine, StubTrainer, drive, make_run
from headrace.config import make_recipe
from headrace.observe import Observer
from headrace.observe.sinks import read_metrics
from headrace.run import POLICY, Run, StartedBatch
from headrace.run.loops import _note_idle
from headrace.sync import Lineage
from headrace.trainer.local import LocalTrainer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from headrace.buffer import Group
    from headrace.records import Batch, Rollout, Sampling
    from headrace.run import PolicyState
    from headrace.run.callbacks import CallbackState

# A step that nobody awaits fails the test; a file that another test left open does not.
pytestmark = pytest.mark.filterwarnings("error", "default::ResourceWarning")
GROUPS, VERSIONS = 5, 6
STREAMED: dict[str, Any] = {"mini_batches": 2, "stream_parts": 2}


def one_of_two(completion: str, **_: object) -> float:
    return float(sum(map(ord, completion)) % 2)


class Seen:
    """The version and the episodes of each part."""

    def __init__(self, act: Callable[[CallbackState, int], None] = lambda *_: None) -> None:
        self.versions, self.ids, self._act = list[int](), list[list[str]](), act

    def on_rollouts(self, state: CallbackState, groups: Sequence[Group]) -> None:
        self.versions.append(state.version)
        self.ids.append([episode.id for group in groups for episode in group.episodes])
        self._act(state, len(self.versions))


class RandomEngine(InstantEngine):
    """Each rollout takes a random number of turns of the event loop."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        for _ in range(self._random.choice((1, 5, 40))):
            await asyncio.sleep(0)
        tokens = [10 + self._random.randrange(3)]
        return finished(rollout, tokens, version=self._version, lineage=self._lineage, sampling=sampling)


class SeenTrainer(StubTrainer):
    """Records what it was told: the groups and the version of each part and of each step's last, and each publication."""

    def __init__(self, lineage: Lineage, *, is_inline: bool, turns: int) -> None:
        super().__init__(lineage, is_inline=is_inline)
        self._turns, self.told = turns, list[tuple[str, int, Counter[str]]]()
        self._last: asyncio.Future[Any] | None = None

    def step(self, batch: Batch, *, learning_rate: float) -> Awaitable[dict[str, float]]:
        groups, what = Counter(r.group for r in batch.rollouts), "step" if batch.is_last else "part"
        return self._in_order(what, batch.version, groups, partial(super().step, batch, learning_rate=0))

    def publish(self, version: int, **how: Any) -> Awaitable[Any]:
        return self._in_order("publish", version, Counter(), partial(super().publish, version, **how))

    def _in_order(self, what: str, version: int, groups: Counter[str], do: Callable[[], Awaitable[Any]]) -> Awaitable[Any]:
        before = self._last

        async def run() -> Any:
            if before is not None:
                await asyncio.wait([before])
            for _ in range(self._turns):
                await asyncio.sleep(0)
            self.told.append((what, version, groups))
            return await do()

        if self.is_inline:
            return run()
        self._last = asyncio.ensure_future(run())
        return self._last


@given(
    is_inline=st.booleans(),
    parts=st.integers(1, GROUPS),
    makes_a_step_of_each=st.booleans(),
    turns=st.integers(0, 12),
    buffer=st.sampled_from(
        [{"kind": "stream"}, {"order": "submission"}, {"kind": "ring", "depth": 1}, {"kind": "reserved", "depth": 1}]
    ),
    is_by_episode=st.booleans(),
    max_tied=st.sampled_from([1.0, 0.4, 0.0]),
    max_lag=st.sampled_from([1, 2]),
    stops_after=st.none() | st.sampled_from(range(60, 400, 5)),
    seed=st.sampled_from(range(100)),
)
@quick
def test_every_version_trains_a_whole_batch_once_part_by_part_and_is_published_after_the_last(
    is_inline, parts, makes_a_step_of_each, turns, buffer, is_by_episode, max_tied, max_lag, stops_after, seed
) -> None:
    """`stops_after` so many turns of the event loop."""
    of_episode, steps = is_by_episode and max_tied == 1, parts if makes_a_step_of_each else 1
    settings = {
        "train": {"mini_batches": steps, "stream_parts": parts, "batch": 2 * GROUPS, "group_size": 2},
        "staleness": {"max_lag": max_lag},
        "buffer": {**buffer, "unit": "episode" if of_episode else "group"},
        "filter": {"max_tied": max_tied, "max_draws": 3},
        "sync": {"canary_limit": 1e9},
    }
    settings["train"] |= {"advantage": "reward"} if of_episode else {}
    recipe = make_recipe({**SMALL, **settings, "steps": VERSIONS})
    lineage, trained = Lineage.new(), list[tuple[int, list[int]]]()
    trainer = SeenTrainer(lineage, is_inline=is_inline, turns=turns)
    prompts = [str(number) for number in range(400)]
    roles = make_roles(recipe, RandomEngine(seed), trainer, reward=one_of_two, prompts=prompts)
    runs: list[Run] = []

    def on_trained(policy: PolicyState, started: StartedBatch) -> None:
        trained.append((started.version, [group.number for group in started.groups]))
        if len(started.filtered) < (recipe.filter.max_draws - 1) * GROUPS:
            assert sum(group.is_tied for group in started.groups) <= max_tied * GROUPS, "over all its mini-batches"

    async def after_version(policy: PolicyState) -> None: ...

    async def on_end() -> None: ...

    async def stop() -> None:
        for _ in range(stops_after or 0):
            await asyncio.sleep(0)
        runs[0].stop()

    async def main() -> None:
        given = (recipe, roles, lineage, Observer())
        runs.append(make_run(Run, *given, versions=VERSIONS, after_version=after_version, on_trained=on_trained))
        stopping = None if stops_after is None else asyncio.ensure_future(stop())
        await asyncio.wait_for(drive(runs[0], on_end=on_end), 20)
        if stopping is not None:
            await stopping

    asyncio.run(main())
    policy, units = runs[0].policies[POLICY], 2 if of_episode else 1
    policy.ledger.check()
    assert not policy.started and policy.ledger.counts()["trained"] == policy.version * GROUPS * 2
    assert policy.version == VERSIONS or stops_after is not None
    numbers = [number for _, groups in trained for number in groups]
    assert len(set(numbers)) == len(numbers) and {len(groups) for _, groups in trained} <= {GROUPS * units}
    told = [each for each in trainer.told if each[:2] != ("publish", 0)]
    of_versions = [each for each in told if each[1] < policy.version or each[0] == "publish"]
    expected = [event for v in range(policy.version) for event in [("step", v)] * steps + [("publish", v + 1)]]
    assert [each[:2] for each in of_versions if each[0] != "part"] == expected
    given_up = told[len(of_versions) :]
    assert all(what == "part" for what, *_ in given_up) and told[: len(of_versions)] == of_versions
    for version in range(policy.version):
        sizes = [groups.total() for what, of, groups in of_versions if what != "publish" and of == version]
        whole = [len(range(part, GROUPS * units, parts)) * 2 // units for part in range(parts)]
        sums = list(itertools.accumulate(whole))
        assert sizes == whole if steps == parts else set(itertools.accumulate(sizes)) <= {*sums} and sum(sizes) == sums[-1]


@pytest.mark.parametrize(("mini_batches", "fails_at"), [(2, 3), (2, 4), (1, 3), (1, 4)])
def test_a_version_that_fails_is_begun_anew_and_its_groups_are_trained_once(
    tmp_path, monkeypatch, mini_batches, fails_at
) -> None:
    """In its first part, when the weights are still those of version 1, and in its second, when they are no version's if the
    first was a step."""
    train = {**STREAMED, "mini_batches": mini_batches}
    settings: dict[str, Any] = {"steps": 5, "held_out": None, "train": train, "staleness": {"max_lag": 1}}
    before, after, step = Seen(), Seen(), LocalTrainer.step
    num_steps = 0

    async def failing(self: LocalTrainer, *arguments: Any, **keywords: Any) -> dict[str, float]:
        nonlocal num_steps
        num_steps += 1
        if num_steps == fails_at:
            raise RuntimeError("the trainer has failed")
        return await step(self, *arguments, **keywords)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the trainer has failed"):
        patch.setattr(LocalTrainer, "step", failing)
        small_run(tmp_path / "run", callbacks=[before], checkpoint={"every": 10}, **settings)
    failed = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert books_close(failed) and failed["accounting"]["trained"] == 16
    assert before.versions[:4] == [0, 0, 1, 1][: len(before.versions)]
    result = small_run(tmp_path / "run", callbacks=[after], **settings)
    first = 0 if (mini_batches, fails_at) == (2, 4) else 1
    calls = Counter(after.versions)
    assert list(calls) == list(range(first, 5)) and (mini_batches == 1 or set(calls.values()) == {2}), "one for each mini-batch"
    trained = [*itertools.chain.from_iterable(before.ids[: 2 * first]), *itertools.chain.from_iterable(after.ids)]
    assert len(set(trained)) == len(trained) == 5 * 16 == result.summary["accounting"]["trained"]
    assert first == 0 or after.ids[0][:8] == before.ids[2], "what was returned is taken again"
    assert books_close(result.summary)
    assert [row["version"] for row in read_metrics(result.folder / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert result.summary["version"] == 5


@pytest.mark.parametrize("orchestrate", ["inline", pytest.param("local", marks=pytest.mark.long)])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_a_stop_completes_a_version_of_which_a_step_is_made_and_gives_up_any_other(tmp_path, mini_batches, orchestrate) -> None:
    def stop(state: CallbackState, calls: int) -> None:
        if state.version == 2 and not before.stopped_in:
            before.stopped_in = before.ids[-1]
            state.stop()

    before, after = Seen(stop), Seen()
    before.stopped_in = []
    train = {"mini_batches": mini_batches, "stream_parts": 2}
    how: dict[str, Any] = {"train": train, "staleness": {"max_lag": 1}, "orchestrate": orchestrate, "held_out": None}
    stopped = small_run(tmp_path / "run", callbacks=[before], **how).summary
    is_whole = mini_batches == 2 or len(before.stopped_in) == 16  # both parts may have been there
    assert (stopped["status"], stopped["version"]) == ("stopped", 3 if is_whole else 2)
    assert books_close(stopped) and stopped["accounting"]["trained"] == stopped["version"] * 16
    resumed = small_run(tmp_path / "run", callbacks=[after], **how).summary
    assert after.versions[0] == stopped["version"] and books_close(resumed) and resumed["accounting"]["trained"] == 6 * 16
    if not is_whole:
        assert after.ids[0][: len(before.stopped_in)] == before.stopped_in, "what was returned is taken again"


async def test_the_trainer_is_not_idle_while_a_part_is_on_its_way() -> None:
    """The part has left the buffer, and what is done before it is sent takes longer than what the trainer still had."""
    answered = asyncio.get_running_loop().create_future()
    started = StartedBatch(0, [], steps_before=0, left=[1, 1, 1], steps=[answered])
    lent = list[bool]()
    policy: Any = SimpleNamespace(unfinished=started, buffer=SimpleNamespace(ready=asyncio.Event()), pace=None)
    run: Any = SimpleNamespace(lend=lambda _: lent.append(started.is_waiting))
    noted = asyncio.ensure_future(_note_idle(run, policy, started))
    await asyncio.sleep(0)
    del started.left[0]
    answered.set_result({})
    await noted
    assert not lent and not started.is_waiting
    await _note_idle(run, policy, started)
    assert lent == [True]
