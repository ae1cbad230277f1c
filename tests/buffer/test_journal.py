"""The journal: what was scored outlives the launcher, damage costs what is damaged, and what memory cannot hold waits there."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import io
import json
import resource
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers import small_run
from hypothesis import given, settings, strategies as st
from strategies import episodes, quick, seeds
from test_kinds import Seen, closes, kill

from headrace.bench.stubs import answer
from headrace.buffer import Entry, Facts, Group, GroupBuffer, Journal, JournalError
from headrace.buffer.segments import Segments
from headrace.records import Episode, InfraAbort, Scored, encode
from headrace.run.checkpoint import Checkpoint, CheckpointStore
from headrace.run.policy import PolicyState

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace.records import Rollout


few = settings(quick, max_examples=20)


def group_of(number: int, *, size: int = 2, version: int = 0, tokens: int = 20) -> Group:
    name = f"g{number}"

    def rollout(index: int) -> Rollout:
        made = answer(number % 50, version=version, lineage="life")
        made = made if tokens == 20 else made.forked(tokens, id="cut")
        return made.replace(id=f"{name}/{index}", episode=f"{name}/{index}", group=name, index=index, parent=None)

    made = (
        Episode(id=f"{name}/{index}", group=name, task={"n": number}, rollouts=(rollout(index),), outcome=Scored(0.5))
        for index in range(size)
    )
    return Group(number, tuple(made), "tasks", number)


def write(journal: Journal, *numbers: int, **how: Any) -> None:
    for number in numbers:
        journal.write(Entry(group_of(number, **how), task=7))


@pytest.fixture
def said() -> list[str]:
    return []


def open_journal(folder: Path, said: list[str], *, max_bytes: int = 1 << 30, in_thread: bool = False) -> Journal:
    return Journal(folder, max_bytes=max_bytes, in_thread=in_thread, say=said.append)


@given(st.lists(episodes(), max_size=3))
@few
def test_any_episodes_come_back_as_they_were(tmp_path_factory, given: list[Episode]) -> None:
    folder = tmp_path_factory.mktemp("journal")
    entry = Entry(Group(3, tuple(given), "tasks", 1), task=9)
    journal = open_journal(folder, [])
    journal.write(entry)
    journal.end(is_over=False)
    other = open_journal(folder, [])
    ((head, place),) = other.recover().values()
    assert (head.number, head.task) == (3, 9) and head.versions == entry.group.versions
    again = other.read(place)
    assert [each.id for each in again] == [each.id for each in given]
    for left, right in zip(again, given, strict=True):
        assert left.outcome == right.outcome and left.task == right.task
        for ours, theirs in zip(left.rollouts, right.rollouts, strict=True):
            assert np.array_equal(ours.token_ids, theirs.token_ids) and np.array_equal(ours.versions, theirs.versions)
    other.end(is_over=True)
    assert not folder.exists()


@given(st.floats(0, 1, exclude_max=True), st.booleans(), seeds)
@few
def test_what_is_before_a_cut_or_a_flipped_byte_is_used_and_the_rest_counted(
    tmp_path_factory, where: float, is_cut: bool, seed: int
) -> None:
    folder, said = tmp_path_factory.mktemp("journal"), list[str]()
    journal = open_journal(folder, said)
    ends = []
    for number in range(6):
        write(journal, number)
        ends.append(journal.num_bytes)
    journal.end(is_over=False)
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    place = int(where * len(content))
    if is_cut:
        content = content[:place]
    else:
        content[place] ^= 1 << (seed % 8)
    file.write_bytes(content)
    intact = sum(end <= place for end in ends)
    other = open_journal(folder, said)
    found = other.recover()
    assert list(found) == list(range(intact))
    for number, (_, at) in found.items():
        assert [episode.id for episode in other.read(at)] == [f"g{number}/0", f"g{number}/1"]
    lost = len(content) - (ends[intact - 1] if intact else 0)
    assert len(said) == bool(lost) and all(f"{lost:,} bytes" in line for line in said)
    write(other, 9)
    assert sorted(path.name for path in folder.iterdir()) == ["00000001.journal", "00000002.journal"]
    assert list(open_journal(folder, []).recover()) == [*range(intact), 9], "what is written later is not behind the damage"


def test_files_of_others_are_left_alone_and_named(tmp_path: Path, said: list[str]) -> None:
    journal = open_journal(tmp_path / "journal", said)
    write(journal, 0)
    journal.end(is_over=False)
    (tmp_path / "journal" / "notes.txt").write_text("mine")
    (tmp_path / "journal" / "00000007.journal").mkdir()
    (tmp_path / "journal" / "00000005.journal").write_text("not a segment at all")
    assert list(open_journal(tmp_path / "journal", said).recover()) == [0]
    assert len(said) == 2 and "20 bytes" in said[0] and "ignored" in said[1] and "00000007.journal, notes.txt" in said[1]


def test_blocks_of_another_form_are_counted_as_damaged(tmp_path: Path, said: list[str]) -> None:
    """As those of an earlier release, whose episodes were in frames of their own."""
    old = encode({"entries": [[0, 7, {}, 2]], "size": 5, "checksum": 1})
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "00000001.journal").write_bytes(old)
    assert not open_journal(tmp_path / "journal", said).recover() and f"{len(old)} bytes" in said[0]


def test_a_journal_is_bounded_and_a_checkpoint_makes_room(tmp_path: Path, said: list[str]) -> None:
    size = _size_of_one(tmp_path / "probe")
    journal, written = open_journal(tmp_path / "journal", said, max_bytes=20 * size), list[int]()
    journal.on_written = lambda number, place: written.append(number) if place else None
    write(journal, *range(30))
    assert 18 <= len(written) <= 20 and journal.is_full and journal.num_bytes <= 20 * size
    assert len(said) == 1 and "journal    full" in said[0]
    mark = journal.mark()
    journal.forget(mark)
    assert not journal.is_full and journal.num_bytes == 0 and not list((tmp_path / "journal").iterdir())
    write(journal, 40)
    assert written[-1] == 40


def _size_of_one(folder: Path) -> int:
    journal = open_journal(folder, [])
    write(journal, 25)
    journal.end(is_over=False)
    return journal.num_bytes


def test_a_segment_with_a_group_that_waits_only_there_outlives_the_checkpoint(tmp_path: Path, said: list[str]) -> None:
    journal = open_journal(tmp_path / "journal", said)
    buffer = GroupBuffer(batch=2, capacity=None, max_bytes=group_of(0).num_bytes + 3000, journal=journal)
    put(buffer, 0, 1, 2)
    assert [group.stored is None for group in buffer.groups()] == [True, False, False]
    journal.forget(journal.mark())
    taken = buffer.take()
    loaded = buffer.load(taken)
    assert [group.episodes[0].task for group in loaded if isinstance(group, Group)] == [{"n": 0}, {"n": 1}]
    for group in taken:
        group.leave_disk()
    journal.forget(journal.mark())
    assert list((tmp_path / "journal").iterdir()), "group 2 is still there"
    buffer.drop(2)
    journal.forget(journal.mark())
    assert not list((tmp_path / "journal").iterdir())


def test_groups_that_are_loaded_and_put_back_stay_on_the_disk(tmp_path: Path, said: list[str]) -> None:
    journal = open_journal(tmp_path / "journal", said)
    buffer = GroupBuffer(batch=4, capacity=None, max_bytes=1, journal=journal)
    put(buffer, 0, 1, 2, 3)
    taken = buffer.take()
    assert len(buffer.load(taken)) == 4  # by a task that was cancelled meanwhile
    buffer.put_back(taken)
    for number in (0, 1):
        buffer.drop(number)
    journal.forget(journal.mark())
    assert [group.loaded().episodes[0].task for group in buffer.groups()] == [{"n": 2}, {"n": 3}]


@contextlib.contextmanager
def full_after(num_bytes: int) -> Iterator[None]:
    """Within it the system writes files up to that size: a write that would go beyond stops there, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def put(buffer: GroupBuffer, *numbers: int, **how: Any) -> None:
    for number in numbers:
        group = group_of(number, **how)
        buffer.put(group, entry=Entry(group, task=7))


@pytest.mark.parametrize("in_order", [False, True])
def test_groups_past_the_bound_wait_on_disk_and_memory_stays_bounded(tmp_path: Path, said: list[str], in_order: bool) -> None:
    one = group_of(0, size=8).num_bytes
    buffer = GroupBuffer(
        batch=4,
        capacity=None,
        max_bytes=10 * one,
        journal=open_journal(tmp_path / "journal", said),
        waits_for=(lambda: None) if in_order else None,
    )
    for number in range(60):
        assert not buffer.is_full
        put(buffer, number, size=8)
        assert buffer.num_bytes <= 10 * one + 50 * 1024
    assert len(buffer) == 60 and buffer.num_episodes == 480
    assert sum(group.stored is None for group in buffer.groups()) < 10
    assert buffer.groups()[30].num_sampled == group_of(30, size=8).num_sampled
    assert [group.number for group in buffer.suspects(older_than=None)] == list(range(60))
    found = []
    while buffer.ready.is_set():
        found += buffer.load(buffer.take())
    assert [group.number for group in found if isinstance(group, Group)] == list(range(60))
    assert all(isinstance(group, Group) and group.num_episodes == 8 for group in found)
    assert buffer.num_bytes == buffer.num_episodes == 0


def test_stubs_fill_memory_too(tmp_path: Path, said: list[str]) -> None:
    """Otherwise the launcher would grow by a kB for each group on disk, without a bound."""
    buffer = GroupBuffer(batch=2, capacity=None, max_bytes=20_000, journal=open_journal(tmp_path / "journal", said))
    number = 0
    while not buffer.is_full:
        put(buffer, number)
        number += 1
        assert number < 30
    assert number > 10


def test_without_room_on_the_disk_the_run_goes_on_in_memory(tmp_path: Path, said: list[str], monkeypatch) -> None:
    buffer = GroupBuffer(
        batch=2, capacity=None, max_bytes=3 * group_of(0).num_bytes, journal=open_journal(tmp_path / "j", said)
    )
    put(buffer, 0, 1, 2, 3)
    is_in_memory = [group.stored is None for group in buffer.groups()]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Segments, "_opened", full)
    put(buffer, 4, 5)
    assert [group.stored is None for group in buffer.groups()] == [*is_in_memory, True, True]
    assert len(said) == 1 and "No space left on device" in said[0] and buffer.is_full
    loaded = [group for _ in range(3) for group in buffer.load(buffer.take())]
    assert [group.number for group in loaded if isinstance(group, Group)] == list(range(6))


def test_a_write_that_stops_half_way_costs_a_killed_run_that_group_alone(tmp_path: Path, said: list[str]) -> None:
    journal = open_journal(tmp_path / "j", said)
    buffer = GroupBuffer(batch=2, capacity=None, max_bytes=2 * group_of(0).num_bytes, journal=journal)
    put(buffer, 0, 1, 2)
    with full_after(journal.num_bytes + 300):
        put(buffer, 3)
    put(buffer, 4)
    assert len(said) == 1 and "File too large" in said[0] and "The run goes on without it" in said[0]
    assert [path.stat().st_size for path in (tmp_path / "j").iterdir()] == [journal.num_bytes + 300]
    other = open_journal(tmp_path / "j", said)
    found = other.recover()
    assert list(found) == [0, 1, 2] and "300 bytes" in said[1] and "the 3 groups before are intact" in said[1]
    assert [other.read(place)[0].id for _, place in found.values()] == ["g0/0", "g1/0", "g2/0"]
    assert any(group.stored is not None for group in buffer.groups()), "one waits in that file alone"
    loaded = [group for _ in range(2) for group in buffer.load(buffer.take())]
    assert [group.number for group in loaded if isinstance(group, Group)] == list(range(4)), "the run itself lost nothing"


async def test_what_is_written_after_a_write_that_stopped_half_way_is_not_behind_it(tmp_path: Path, said: list[str]) -> None:
    journal = open_journal(tmp_path / "j", said, in_thread=True)
    with full_after(300):
        write(journal, 0)
        assert journal._thread is not None
        journal._thread.submit(str).result()
    write(journal, 1)
    journal.end(is_over=False)  # before the event loop hears of it
    assert list(open_journal(tmp_path / "j", said).recover()) == [1]
    await asyncio.sleep(0)
    assert len(said) == 2 and "300 bytes" in said[0] and "File too large" in said[1]


async def test_what_cannot_be_written_ends_the_journal_and_not_the_run(tmp_path: Path, said: list[str]) -> None:
    journal = open_journal(tmp_path / "j", said, in_thread=True)
    buffer = GroupBuffer(batch=2, capacity=None, max_bytes=1 << 30, journal=journal)
    odd = group_of(1)
    odd.episodes[0].task["odd"] = object()
    for group in (group_of(0), odd, group_of(2), group_of(3)):
        buffer.put(group, entry=Entry(group, task=7))
        while journal.is_writing:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert len(said) == 1 and "does not travel" in said[0]
    assert [group.number for _ in range(2) for group in buffer.take()] == [0, 1, 2, 3]
    await asyncio.to_thread(journal.end, is_over=True)


async def test_whatever_a_write_raises_ends_the_journal_and_not_the_thread(
    tmp_path: Path, said: list[str], monkeypatch
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError(7)

    journal, written = open_journal(tmp_path / "j", said, in_thread=True), list[Any]()
    journal.on_written = lambda *told: written.append(told)
    monkeypatch.setattr(Segments, "append", broken)
    write(journal, 0, 1, 2)
    async with asyncio.timeout(20):
        while journal.is_writing:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert written == [(0, None), (1, None), (2, None)] and len(said) == 1 and "cannot be written: KeyError: 7" in said[0]
    await asyncio.to_thread(journal.end, is_over=True)


@pytest.mark.parametrize("when", ["opened", "written"])
def test_a_checkpoint_that_ends_during_a_write_deletes_nothing_of_it(
    when: str, tmp_path: Path, said: list[str], monkeypatch
) -> None:
    journal = open_journal(tmp_path / "j", said)
    buffer = GroupBuffer(batch=3, capacity=None, max_bytes=1, journal=journal)
    put(buffer, 0)
    opened = Segments._opened

    class Slow(io.FileIO):
        def write(self, frame: Any) -> int:
            journal.forget(journal.mark())
            return super().write(frame)

    def slow(*given: Any) -> Any:
        file = opened(*given)
        journal.forget(journal.mark())
        return file

    if when == "opened":
        monkeypatch.setattr(Segments, "_opened", slow)
    else:
        journal.mark()
        monkeypatch.setattr(type(tmp_path), "open", lambda path, mode: Slow(path, mode))
    put(buffer, 1, 2)
    monkeypatch.undo()
    assert all(group.stored is not None for group in buffer.groups()), "all wait on the disk alone"
    assert [group.number for group in buffer.load(buffer.take()) if isinstance(group, Group)] == [0, 1, 2]
    journal.forget(journal.mark())
    assert journal.num_bytes == sum(path.stat().st_size for path in (tmp_path / "j").iterdir())


def damaged_buffer(folder: Path, said: list[str]) -> GroupBuffer:
    """Of three groups, the second cannot be read back."""
    buffer = GroupBuffer(batch=3, capacity=None, max_bytes=1, journal=open_journal(folder / "journal", said))
    put(buffer, 0, 1, 2)
    (file,) = (folder / "journal").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return buffer


def test_a_damaged_copy_is_an_error_and_the_others_are_not(tmp_path: Path, said: list[str]) -> None:
    buffer = damaged_buffer(tmp_path, said)
    first, second, third = buffer.load(buffer.take())
    assert isinstance(first, Group) and isinstance(second, JournalError) and isinstance(third, Group)
    assert "has a damaged entry" in str(second)


def test_entries_that_are_queued_together_share_a_block_and_come_back_one_by_one(tmp_path: Path, said: list[str]) -> None:
    journal, places = open_journal(tmp_path / "journal", said, in_thread=True), dict[int, Any]()

    async def main() -> None:
        journal.on_written = lambda number, place: places.update({number: place})
        write(journal, 0)  # the thread has this one while the others are queued
        for number in range(1, 80):
            write(journal, number, size=1 + number % 3)
        while len(places) < 80:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    asyncio.run(main())
    assert len({place.block for place in places.values()}) == 4, "of 64 episodes at most, 2 or 3 more than that"
    for number in (79, 3, 40, 0, 41):
        size = 1 + number % 3 if number else 2
        assert [episode.id for episode in journal.read(places[number])] == [f"g{number}/{index}" for index in range(size)]
    journal.end(is_over=False)
    assert {number: place for number, (_, place) in open_journal(tmp_path / "journal", said).recover().items()} == places


def test_a_thread_writes_and_what_it_wrote_is_told_to_the_event_loop(tmp_path: Path, said: list[str]) -> None:
    journal, written = open_journal(tmp_path / "journal", said, in_thread=True), list[int]()

    async def main() -> None:
        journal.on_written = lambda number, place: written.append(number)
        for number in range(50):
            write(journal, number)
            if number % 7 == 0:
                await asyncio.sleep(0)
        assert len(written) < 50
        while len(written) < 50:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        write(journal, 50, 51)

    asyncio.run(main())
    journal.end(is_over=False)
    assert written[:50] == list(range(50))
    assert list(open_journal(tmp_path / "journal", said).recover()) == list(range(52)), "closing writes the rest"


# Runs


SETTINGS: dict[str, Any] = {
    "steps": 6,
    "held_out": None,
    "checkpoint": {"every": 2},
    "staleness": {"max_lag": 2},
    "model": {"context": 48},
    "sampling": {"max_tokens": 20},
    "buffer": {"journal_gb": 0.1},
}


@pytest.fixture
def generated(monkeypatch) -> Iterator[list[str]]:
    """Names of the episodes that were started."""
    from headrace.run.state import Run

    names, original = list[str](), Run.client

    def noting(self: Run, record: Any) -> Any:
        names.append(record.id)
        return original(self, record)

    monkeypatch.setattr(Run, "client", noting)
    yield names


@pytest.mark.parametrize(
    "buffer",
    [{}, pytest.param({"unit": "episode"}, marks=pytest.mark.long), pytest.param({"max_gb": 1e-5}, marks=pytest.mark.long)],
    ids=str,
)
def test_what_was_scored_since_the_checkpoint_is_not_generated_again(tmp_path, monkeypatch, generated, buffer, capsys) -> None:
    settings = {**SETTINGS, "buffer": {"journal_gb": 0.1, **buffer}, "train": {"advantage": "global"}}
    before, after = Seen(), Seen()
    kill(tmp_path / "run", monkeypatch, at=3, seen=before, **settings)
    shutil.copytree(tmp_path / "run", tmp_path / "without")
    shutil.rmtree(tmp_path / "without" / "journal")
    assert list((tmp_path / "run" / "journal").iterdir())
    generated.clear()
    result = small_run(tmp_path / "run", callbacks=[after], quiet=False, **settings)
    with_journal = list(generated)
    assert "groups in the journal that need not be generated again" in capsys.readouterr().out
    generated.clear()
    without = small_run(tmp_path / "without", **settings)
    spared = set(generated) - set(with_journal)
    assert len(spared) >= 8 and len(with_journal) < len(generated)
    trained = {episode.id for batch in after.batches for group in batch for episode in group.episodes}
    assert spared & trained, "they are trained, and were not generated"
    for each in (result, without):
        assert each.summary["accounting"]["trained"] == 6 * 16 and closes(each.summary)
    ids = [episode.id for batch in [*before.batches[:2], *after.batches] for group in batch for episode in group.episodes]
    assert len(ids) == len(set(ids)) == 6 * 16
    assert not (tmp_path / "run" / "journal").exists(), "a finished run needs none"


def test_tokens_of_weights_that_are_gone_are_not_taken_from_the_journal(tmp_path, monkeypatch) -> None:
    used: list[tuple[int, int]] = []
    original = PolicyState._keep_recovered

    def noting(self: PolicyState) -> None:
        newest = [max(each[1] for each in head.versions.values()) for head, _ in self.recovered._found.values()]
        assert max(newest) > self.version, "the killed run had sampled with newer weights"
        original(self)
        kept = [max(each[1] for each in head.versions.values()) for head, _ in self.recovered._found.values()]
        used.append((len(newest), len(kept)))
        assert max(kept, default=0) <= self.version

    how = {**SETTINGS, "checkpoint": {"every": 3}}
    kill(tmp_path / "run", monkeypatch, at=5, seen=Seen(), **how)
    monkeypatch.setattr(PolicyState, "_keep_recovered", noting)
    assert closes(small_run(tmp_path / "run", **how).summary)
    assert used and used[0][1] < used[0][0]


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("killed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        kill(folder, patch, at=3, seen=Seen(), **SETTINGS)
    return folder


@pytest.mark.parametrize("harm", ["cut", pytest.param("flip", marks=pytest.mark.long), "garbage", "task"])
def test_a_damaged_journal_costs_what_is_damaged_and_the_run_is_resumed(killed, tmp_path, monkeypatch, capsys, harm) -> None:
    shutil.copytree(killed, tmp_path / "run")
    files = sorted((tmp_path / "run" / "journal").iterdir())
    for file in files:
        content = bytearray(file.read_bytes())
        if harm == "cut":
            del content[len(content) // 2 :]
        elif harm == "flip":
            content[len(content) // 2] ^= 16
        elif harm == "garbage":
            content = bytearray(b"garbage" * 100)
        file.write_bytes(content)
    if harm == "task":
        original = PolicyState.submit
        monkeypatch.setattr(
            PolicyState, "submit", lambda self, task: original(self, dataclasses.replace(task, row={**task.row, "x": 1}))
        )
    result = small_run(tmp_path / "run", quiet=False, **SETTINGS)
    assert result.summary["accounting"]["trained"] == 6 * 16 and closes(result.summary)
    assert ("bytes in" in capsys.readouterr().out) == (harm != "task")


def test_a_run_that_spills_trains_every_group_once(tmp_path, monkeypatch) -> None:
    """A buffer of a few kB: nearly all that waits is on disk, also when checkpoints are written."""
    seen, num_read, original = Seen(), list[int](), Segments.read
    monkeypatch.setattr(Segments, "read", lambda self, place: num_read.append(1) or original(self, place))
    settings = {**SETTINGS, "staleness": {"max_lag": 4}, "buffer": {"journal_gb": 0.1, "max_gb": 1e-5}}
    result = small_run(tmp_path / "run", callbacks=[seen], **settings)
    ids = [episode.id for batch in seen.batches for group in batch for episode in group.episodes]
    assert len(ids) == len(set(ids)) == 6 * 16 and closes(result.summary)
    assert len(num_read) > 6 * 4 / 2, "more than half of the groups, and some for checkpoints"


@pytest.mark.long
def test_unscored_episodes_of_a_group_are_counted_once_more(tmp_path, monkeypatch) -> None:
    def flaky(prompt: str, completion: str, answer: str, **_: object) -> float | None:
        return None if (len(completion) + int(answer)) % 4 == 0 else 1.0 / (1 + len(completion))

    settings = {**SETTINGS, "reward": flaky}
    kill(tmp_path / "run", monkeypatch, at=3, seen=Seen(), **settings)
    result = small_run(tmp_path / "run", **settings)
    assert closes(result.summary) and result.summary["accounting"]["filtered"] > 0


def test_an_aborted_episode_is_in_the_entry(tmp_path: Path, said: list[str]) -> None:
    group = group_of(0)
    lost = Episode(id="g0/2", group="g0", task={}, outcome=InfraAbort("dead worker"))
    journal = open_journal(tmp_path / "journal", said)
    journal.write(Entry(group, 7, (lost,)))
    ((_, place),) = journal.recover().values()
    assert journal.read(place)[-1].outcome == InfraAbort("dead worker")


def test_a_group_that_a_checkpoint_cannot_read_is_left_out_of_it(tmp_path: Path, said: list[str]) -> None:
    buffer = damaged_buffer(tmp_path, said)

    async def weights(folder: Path) -> dict[str, list[int]]:
        folder.mkdir(parents=True)  # noqa: ASYNC240
        return {}

    store = CheckpointStore(tmp_path / "checkpoints", rescue=tmp_path / "rescue", keep=1)
    asyncio.run(store.save(4, write_weights=weights, buffered=buffer.groups(), in_flight=[], manifest={}))
    checkpoint = store.latest(warn=said.append)
    assert checkpoint is not None and not said
    first, lost, third = checkpoint.buffered()
    assert [len(group.episodes) for group in (first, lost, third)] == [2, 0, 2]
    assert (lost.number, lost.num_episodes, lost.num_sampled) == (1, 2, group_of(1).num_sampled)


def test_a_group_that_its_checkpoint_lost_counts_as_failed_and_is_replaced(tmp_path, monkeypatch) -> None:
    settings = {**SETTINGS, "checkpoint": {"every": 2}}
    kill(tmp_path / "run", monkeypatch, at=3, seen=Seen(), **settings)
    shutil.rmtree(tmp_path / "run" / "journal")
    manifests = sorted((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))
    state = json.loads(manifests[-1].read_text())
    number = state["submitted_groups"]
    state["submitted_groups"] += 1  # it was complete, and waited on disk
    state["ledger"]["submitted"] += 4
    manifests[-1].write_text(json.dumps(state))
    original = Checkpoint.buffered

    def with_lost(self: Checkpoint) -> Iterator[Group]:
        yield from original(self)
        yield Group(number, (), told=Facts([], {}, 4, 80))

    monkeypatch.setattr(Checkpoint, "buffered", with_lost)
    result = small_run(tmp_path / "run", **settings)
    accounting = result.summary["accounting"]
    assert (accounting["failed"], accounting["trained"]) == (4, 6 * 16) and closes(result.summary)


FAULTS: dict[str, tuple[dict[str, float], str]] = {
    "damaged": ({"journal_gb": 0.1, "max_gb": 1e-5}, ""),
    "full journal": ({"journal_gb": 3e-5}, "journal    full"),
    "full disk": ({"journal_gb": 0.1, "max_gb": 1e-5}, "File too large"),
}


@pytest.mark.parametrize(
    ("fault", "steps", "parts"), [*((fault, 1, 1) for fault in FAULTS), ("damaged", 2, 2), ("damaged", 1, 2)]
)
def test_a_fault_of_the_disk_while_a_run_goes_on_loses_nothing_else(
    tmp_path, monkeypatch, capsys, fault: str, steps: int, parts: int
) -> None:
    """Without a checkpoint that would make room in the journal."""
    buffer, words = FAULTS[fault]
    seen, num_calls = Seen(), {"read": 0, "append": 0}
    read, append = Segments.read, Segments.append

    def reading(self: Segments, place: Any) -> list[Episode]:
        num_calls["read"] += 1
        if fault == "damaged" and num_calls["read"] in (2, 5):
            raise JournalError("a changed byte")
        return read(self, place)

    def appending(self: Segments, *arguments: Any) -> Any:
        num_calls["append"] += 1
        with full_after(self.num_bytes + 300) if fault == "full disk" and num_calls["append"] > 3 else contextlib.nullcontext():
            return append(self, *arguments)

    monkeypatch.setattr(Segments, "read", reading)
    monkeypatch.setattr(Segments, "append", appending)
    settings = {**SETTINGS, "buffer": buffer, "checkpoint": {"every": 10}, "staleness": {"max_lag": 4}}
    settings["train"] = {"mini_batches": steps, "stream_parts": parts}
    result = small_run(tmp_path / "run", callbacks=[seen], quiet=False, **settings)
    ids = [episode.id for batch in seen.batches for group in batch for episode in group.episodes]
    assert len(ids) == len(set(ids)) == 6 * 16 and closes(result.summary)
    assert result.summary["accounting"]["failed"] == (8 if fault == "damaged" else 0)
    said = capsys.readouterr().out
    assert said.count(words or "journal    ") == bool(words)
    assert num_calls["read"] or fault == "full journal"


def test_a_disk_that_fills_up_half_way_through_a_group_costs_a_killed_run_that_group(tmp_path, monkeypatch, capsys) -> None:
    places, append = dict[int, Any](), Segments.append

    def appending(self: Segments, heads: Any, members: Any) -> Any:
        with full_after(self._sizes.get(self._current, 0) + 300) if len(places) >= 11 else contextlib.nullcontext():
            found = append(self, heads, members)
        places.update({head.number: place for head, place in zip(heads, found, strict=True)})
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Segments, "append", appending)
        kill(tmp_path / "run", monkeypatch, at=3, seen=Seen(), quiet=False, **SETTINGS)
    assert capsys.readouterr().out.count("journal    cannot be written: OSError: [Errno 27] File too large") == 1
    left = {int(path.name[:8]) for path in (tmp_path / "run" / "journal").iterdir()}
    kept = {number: place for number, place in places.items() if place.block.segment in left}
    found = open_journal(tmp_path / "run" / "journal", []).recover()
    assert {number: place for number, (_, place) in found.items()} == kept and kept
    result = small_run(tmp_path / "run", quiet=False, **SETTINGS)
    assert "300 bytes in" in capsys.readouterr().out
    assert result.summary["groups_from_journal"] > 0
    assert result.summary["accounting"]["trained"] == 6 * 16 and closes(result.summary)
