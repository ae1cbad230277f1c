"""The buffer of groups against a model that keeps plain lists."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, strategies as st
from strategies import quick

from headrace.buffer import Group, GroupBuffer, kinds
from headrace.config import make_recipe
from headrace.records import Episode, Rollout
from headrace.settings import ConfigError


def make_group(number: int, size: int = 2) -> Group:
    return Group(number, tuple(Episode(id=f"g{number}/{index}", group=f"g{number}", task={}) for index in range(size)))


class Buffer(GroupBuffer):
    """A buffer beside a table of groups in flight: at first all of them are."""

    def __init__(self, *, batch: int, capacity: int | None, in_order: bool, max_bytes: int) -> None:
        self.in_flight = list(range(1000))
        waits_for = (lambda: self.in_flight[0]) if in_order else None
        super().__init__(batch=batch, capacity=capacity, max_bytes=max_bytes, waits_for=waits_for)

    def put(self, group: Group) -> None:
        self.in_flight.remove(group.number)
        super().put(group)

    def drop(self, number: int) -> None:
        if number in self.in_flight:
            self.in_flight.remove(number)
        super().drop(number)


def make_buffer(*, batch: int = 2, capacity: int | None = 4, in_order: bool = False, max_bytes: int = 1 << 40) -> Buffer:
    return Buffer(batch=batch, capacity=capacity, in_order=in_order, max_bytes=max_bytes)


def fill(buffer: GroupBuffer, *numbers: int) -> None:
    for number in numbers:
        buffer.put(make_group(number))


def numbers(groups: list[Group]) -> list[int]:
    return [group.number for group in groups]


def test_groups_leave_in_the_order_they_were_completed() -> None:
    buffer = make_buffer()
    fill(buffer, 3, 0, 2)
    assert numbers(buffer.take()) == [3, 0]
    assert numbers(buffer.groups()) == [2]


def test_groups_leave_in_the_order_they_were_submitted_and_wait_for_the_slow_one() -> None:
    buffer = make_buffer(in_order=True)
    fill(buffer, 3, 1, 2)
    assert not buffer.ready.is_set()
    fill(buffer, 0)
    assert buffer.ready.is_set()
    assert numbers(buffer.take()) == [0, 1]
    assert numbers(buffer.take()) == [2, 3]


def test_in_order_groups_that_never_come_are_not_waited_for() -> None:
    buffer = make_buffer(in_order=True)
    fill(buffer, 1, 4)
    buffer.drop(0)
    assert not buffer.ready.is_set()
    buffer.drop(3)
    buffer.drop(2)
    assert buffer.ready.is_set()
    assert numbers(buffer.take()) == [1, 4]
    fill(buffer, 5, 6)
    assert numbers(buffer.take()) == [5, 6]


@pytest.mark.parametrize("in_order", [False, True])
def test_a_group_can_be_taken_out(in_order: bool) -> None:
    buffer = make_buffer(in_order=in_order)
    fill(buffer, 0, 1)
    assert buffer.ready.is_set()
    buffer.drop(0)
    assert not buffer.ready.is_set()
    assert len(buffer) == 1
    fill(buffer, 2)
    assert numbers(buffer.take()) == [1, 2]


def test_ready_is_raised_while_a_whole_batch_can_be_taken() -> None:
    buffer = make_buffer(batch=2)
    assert not buffer.ready.is_set()
    fill(buffer, 0)
    assert not buffer.ready.is_set()
    fill(buffer, 1, 2, 3)
    assert buffer.ready.is_set()
    buffer.take()
    assert buffer.ready.is_set()
    buffer.take()
    assert not buffer.ready.is_set()
    with pytest.raises(AssertionError):
        buffer.take()


def test_putting_never_blocks_and_full_is_only_said() -> None:
    buffer = make_buffer(capacity=2)
    fill(buffer, 0)
    assert not buffer.is_full
    fill(buffer, 1)
    assert buffer.is_full
    fill(buffer, 2, 3, 4)
    assert buffer.is_full and len(buffer) == 5
    buffer.take()
    buffer.take()
    assert not buffer.is_full
    endless = make_buffer(capacity=None)
    fill(endless, *range(100))
    assert not endless.is_full


def large_group(number: int, *, length: int) -> Group:
    rollout = Rollout.from_prompt(np.zeros(length, dtype=np.int32), id="r", group=f"g{number}")
    return Group(number, (Episode(id="e", group=f"g{number}", task={}, rollouts=(rollout,)),))


def test_bytes_fill_it_too_but_a_batch_always_fits() -> None:
    """Otherwise nothing more would be submitted, and the trainer would wait for the rest of a batch forever."""
    group = large_group(0, length=100_000)
    assert 14 * 100_000 < group.num_bytes < 14 * 100_000 + 5000
    buffer = make_buffer(batch=3, capacity=None, max_bytes=5 * group.num_bytes)
    for number in range(4):
        buffer.put(large_group(number, length=100_000))
    assert not buffer.is_full
    buffer.put(large_group(4, length=100_000))
    assert buffer.is_full and buffer.num_bytes == 5 * group.num_bytes
    taken = buffer.take()
    assert not buffer.is_full and buffer.num_bytes == 2 * group.num_bytes
    buffer.put_back(taken)
    assert buffer.is_full and buffer.num_bytes == 5 * group.num_bytes
    buffer.drop(4)
    buffer.drop(999)
    assert not buffer.is_full and buffer.num_bytes == 4 * group.num_bytes
    narrow = make_buffer(batch=2, capacity=None, max_bytes=1)
    narrow.put(large_group(0, length=10))
    assert not narrow.is_full
    narrow.put(large_group(1, length=10))
    assert narrow.is_full


def test_episodes_are_counted_not_groups() -> None:
    buffer = make_buffer()
    buffer.put(make_group(0, size=3))
    buffer.put(make_group(1, size=2))
    assert (len(buffer), buffer.num_episodes) == (2, 5)


def test_a_group_cannot_come_twice() -> None:
    buffer = GroupBuffer(batch=1, capacity=None, max_bytes=1)
    fill(buffer, 0)
    with pytest.raises(AssertionError):
        fill(buffer, 0)


@pytest.mark.parametrize("in_order", [False, True])
def test_a_batch_that_was_put_back_leaves_first(in_order: bool) -> None:
    buffer = make_buffer(in_order=in_order)
    fill(buffer, 0, 1, 2, 3)
    taken = buffer.take()
    fill(buffer, 4)
    buffer.put_back(taken)
    assert numbers(buffer.take()) == [0, 1]
    assert numbers(buffer.take()) == [2, 3]


class Model:
    """The buffer as its docstring describes it."""

    def __init__(self, *, batch: int, in_order: bool) -> None:
        self.batch, self.in_order = batch, in_order
        self.waiting: list[int] = []
        self.gone: set[int] = set()

    def may_leave(self) -> list[int]:
        if not self.in_order:
            return list(self.waiting)
        result = []
        for number in range(100):
            if number in self.waiting:
                result.append(number)
            elif number not in self.gone:
                break
        return result

    def take(self) -> list[int]:
        taken = self.may_leave()[: self.batch]
        self.waiting = [number for number in self.waiting if number not in taken]
        self.gone |= set(taken)
        return taken

    def skip(self, number: int) -> None:
        self.waiting = [other for other in self.waiting if other != number]
        self.gone.add(number)


@given(st.booleans(), st.integers(1, 3), st.permutations(range(12)), st.data())
@quick
def test_any_course_of_events_is_the_models(in_order: bool, batch: int, arrivals: list[int], data: st.DataObject) -> None:
    buffer, model = make_buffer(batch=batch, in_order=in_order), Model(batch=batch, in_order=in_order)
    arrivals = list(arrivals)
    while arrivals or model.waiting:
        choices = ["put", "lose"] * bool(arrivals) + ["reject"] * bool(model.waiting)
        choices += ["take"] * (3 * (len(model.may_leave()) >= batch))
        event = data.draw(st.sampled_from(choices))
        if event == "put":
            number = arrivals.pop()
            buffer.put(make_group(number))
            model.waiting.append(number)
        elif event == "lose":
            number = arrivals.pop()
            buffer.drop(number)
            model.skip(number)
        elif event == "reject":
            number = data.draw(st.sampled_from(model.waiting))
            buffer.drop(number)
            model.skip(number)
        else:
            assert numbers(buffer.take()) == model.take()
        assert numbers(buffer.groups()) == model.waiting
        assert buffer.ready.is_set() == (len(model.may_leave()) >= batch)
        if not arrivals and len(model.may_leave()) < batch:
            break


def test_a_kind_of_buffer_is_a_line_in_the_table(monkeypatch) -> None:
    monkeypatch.setitem(kinds.POLICIES, "hoard", kinds.BufferPolicy("hoard", max_batches=3))
    recipe = make_recipe({"train.batch": 4, "train.group_size": 2, "staleness.max_lag": 2})
    chosen = dataclasses.replace(recipe, buffer=dataclasses.replace(recipe.buffer, kind="hoard"))
    buffer = kinds.make_buffer(chosen, waits_for=lambda: None, num_in_flight=int, slots=lambda: None)
    fill(buffer, *range(5))
    assert not buffer.is_full
    fill(buffer, 5)
    assert buffer.is_full and "buffer     hoard: 3 × 2 = 6 groups or 8 GB wait at most" in "\n".join(chosen.derivation())
    with pytest.raises(ConfigError, match=r"buffer\.depth = 1: only buffer\.kind = .*has a depth, not 'hoard'"):
        dataclasses.replace(recipe, buffer=dataclasses.replace(chosen.buffer, depth=1))
