"""Sources of tasks, their mixing, and the built-in one."""

from __future__ import annotations

import contextlib
import datetime
import json
import signal
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, strategies as st
from strategies import quick

from headrace.config import make_recipe
from headrace.launch.inputs import UserInputs, held_out_tasks
from headrace.tasks import TaskError, TaskStream, builtin_reward, open_source
from headrace.tasks.sort_digits import SortDigits, partial_credit

if TYPE_CHECKING:
    from pathlib import Path


def numbered(name: str, count: int) -> list[dict]:
    return [{"prompt": f"{name}{index}"} for index in range(count)]


def prompts(source, count: int, *, start: int = 0) -> list[str]:
    return [source.row(index)["prompt"] for index in range(start, start + count)]


def make_stream(*, seed: int = 0, weights: tuple[float, ...] = (1, 2)) -> TaskStream:
    names = "abcdef"[: len(weights)]
    sources = [open_source(numbered(name, 7), seed=seed, split="train") for name in names]
    return TaskStream(dict(zip(names, zip(sources, weights, strict=True), strict=True)), seed=seed)


# Streams


@given(st.integers(0, 40), st.integers(0, 5))
@quick
def test_a_restored_stream_goes_on_with_the_very_next_task(taken: int, seed: int) -> None:
    stream, other = make_stream(seed=seed), make_stream(seed=seed)
    for _ in range(taken):
        stream.next()
    other.restore(json.loads(json.dumps(stream.state())))
    assert other.position == stream.position == taken
    assert [other.next() for _ in range(30)] == [stream.next() for _ in range(30)]


def test_a_streams_state_is_not_changed_by_what_follows() -> None:
    stream = make_stream()
    stream.next()
    state = stream.state()
    expected = [stream.next() for _ in range(10)]
    stream.restore(state)
    assert [stream.next() for _ in range(10)] == expected
    assert sum(state) == 1


def test_the_seed_decides_the_stream() -> None:
    first, same, other = (make_stream(seed=seed) for seed in (0, 0, 1))
    rows = [first.next() for _ in range(20)]
    assert rows == [same.next() for _ in range(20)]
    assert rows != [other.next() for _ in range(20)]


@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (0.5, 0.25, 0.25), (10, 1)])
def test_sources_are_mixed_by_weight(weights: tuple[float, ...]) -> None:
    count = 2000
    stream = make_stream(weights=weights)
    drawn = Counter(str(stream.next().row["prompt"])[0] for _ in range(count))
    for name, weight in zip("abc", weights, strict=False):
        share = weight / sum(weights)
        assert abs(drawn[name] / count - share) < 4 * (share * (1 - share) / count) ** 0.5


def test_each_source_of_a_mix_is_walked_without_gaps() -> None:
    stream = make_stream(weights=(1, 3))
    drawn = [str(stream.next().row["prompt"]) for _ in range(400)]
    for name in "ab":
        own = [prompt for prompt in drawn if prompt[0] == name]
        for epoch in range(len(own) // 7):
            assert sorted(own[7 * epoch : 7 * epoch + 7]) == [f"{name}{index}" for index in range(7)]


def test_a_task_says_where_its_row_came_from() -> None:
    stream = make_stream(weights=(1, 3))
    for task in [stream.next() for _ in range(60)]:
        assert task.row == {"prompt": f"{task.source}{task.index}"}, "the same row has the same index in every epoch"
    generated = TaskStream({"sort": (open_source("builtin:sort_digits", seed=0, split="train"), 1.0)}, seed=0)
    assert [generated.next().index for _ in range(3)] == [0, 1, 2]


# Finite sources


def test_every_epoch_covers_every_row_in_another_order() -> None:
    source = open_source(numbered("r", 20), seed=3, split="train")
    epochs = [prompts(source, 20, start=20 * epoch) for epoch in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(f"r{index}" for index in range(20))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert len(source) == 20


def test_a_row_depends_on_its_number_alone() -> None:
    source, again = (open_source(numbered("r", 5), seed=3, split="train") for _ in range(2))
    forwards = {index: source.row(index) for index in range(25)}
    order = np.random.default_rng(0).permutation(25).tolist()
    assert {index: again.row(index) for index in order} == forwards


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_seeds_shuffle_differently(split: str) -> None:
    orders = {tuple(prompts(open_source(numbered("r", 12), seed=seed, split=split), 12)) for seed in range(4)}
    assert len(orders) == 4


def test_held_out_tasks_are_some_of_all_rows_and_the_same_each_time() -> None:
    """The first rows of a file may all be of one kind."""

    def held_out(*sources: list[dict], limit: int = 8, seed: int = 3) -> dict[str, list[dict]]:
        recipe = make_recipe({"evaluate.limit": limit, "seed": seed})
        return held_out_tasks(recipe, UserInputs(held_out=[(rows, 1.0) for rows in sources]))

    rows = numbered("r", 100)
    (chosen,) = held_out(rows).values()
    assert len(chosen) == 8 and max(rows.index(row) for row in chosen) > 20
    assert held_out(rows) == {"tasks": chosen} != held_out(rows, seed=4)
    shares = held_out(rows, numbered("s", 2), numbered("t", 50), limit=12)
    assert {name: len(found) for name, found in shares.items()} == {"tasks": 4, "tasks#2": 2, "tasks#3": 6}
    assert not held_out(rows, limit=0)


def test_held_out_sources_are_named_for_people(tmp_path: Path) -> None:
    file = tmp_path / "riddles.jsonl"
    file.write_text(json.dumps({"prompt": "a"}))
    sources = [{"source": "builtin:sort_digits"}, {"source": str(file)}, {"source": "builtin:sort_digits", "options": {}}]
    found = held_out_tasks(make_recipe({"evaluate.tasks": sources}), UserInputs())
    assert list(found) == ["sort_digits", "riddles", "sort_digits#2"]


# Files and datasets

ROWS = [
    {"prompt": "one", "answer": 1},
    {"prompt": [{"role": "user", "content": "zwei é \u2028 ünd"}], "answer": None, "tags": ["a", {"b": 1.5}]},
]


def taken(source: object) -> list[dict]:
    opened = open_source(source, seed=0, split="held_out")
    return sorted((opened.row(index) for index in range(len(opened))), key=str)  # as those below are


def test_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    assert taken(str(file)) == taken(file) == ROWS


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x1c", "é"])
def test_json_lines_end_at_newlines_alone(tmp_path: Path, character: str) -> None:
    """JSON allows these inside a string unescaped (but \\x1c, which dumps escapes); Python's splitlines breaks at them."""
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"a{character}b"}, {"prompt": "c"}]
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    assert taken(file) == rows


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    file = tmp_path / "rows.parquet"
    rows = [{"prompt": "one", "answer": 1}, {"prompt": "two", "answer": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    assert taken(file) == rows
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "x", "when": datetime.datetime(2020, 1, 1)}]), file)
    with pytest.raises(TaskError, match=r"rows.parquet: row 0\['when'\] is a datetime"):
        taken(file)


def test_a_dataset_a_generator_and_a_list_are_taken_alike() -> None:
    from datasets import Dataset

    assert taken(row for row in ROWS) == taken(tuple(ROWS)) == taken(ROWS) == ROWS
    chats = [{"prompt": [{"role": "user", "content": str(number)}], "answer": number} for number in range(3)]
    assert taken(Dataset.from_list(chats)) == chats


# Errors


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], r"tasks: there are no tasks in it"),
        ([{"prompt": "x"}, {"question": 1, "answer": 2}], r"row 1 has no 'prompt' column; it has: question, answer"),
        ([{}], r"row 0 has no 'prompt' column; it has: nothing"),
        (["x"], r"row 0 is a str, not a dict"),
        ([{"prompt": "x", "n": np.int64(3)}], r"row 0\['n'\] is a int64"),
        ([{"prompt": "x", "n": [1, {"deep": {1, 2}}]}], r"row 0\['n'\]\[1\]\['deep'\] is a set"),
        ([{"prompt": "x", 3: 4}], r"row 0: key 3 is not a string"),
        ([{"prompt": 5}], r"row 0: 'prompt' must be text or a list of messages"),
        ([{"prompt": None}], r"row 0: 'prompt' must be text or a list of messages"),
        ([{"prompt": []}], r"row 0: 'prompt' must be text or a list of messages"),
        ([{"prompt": ["hello"]}], r"row 0: 'prompt' must be text or a list of messages"),
        ([{"prompt": [{"role": "user"}]}], r"row 0: 'prompt' must be text or a list of messages"),
        (
            [{"prompt": [{"role": "user", "content": None}]}],
            r"row 0: message 0 .*\(user\) has the content None",
        ),
        ([{"prompt": [{"role": "user", "content": 7}]}], r"row 0: message 0 .* has the content 7; give text"),
        (5, r"a int is not a list of rows"),
        (None, r"a NoneType is not a list of rows"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(rows, problem: str) -> None:
    with pytest.raises(TaskError, match=problem):
        open_source(rows, seed=0, split="train")


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"missing.jsonl: no such file"):
        taken(tmp_path / "missing.jsonl")
    with pytest.raises(TaskError, match=r"doesn't contain any data files"):
        taken(tmp_path)
    (tmp_path / "rows.txt").write_text("prompt\nx\n")
    with pytest.raises(TaskError, match=r"rows.txt: must be a .jsonl, .json, .csv or .parquet file, or a folder"):
        taken(tmp_path / "rows.txt")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(TaskError, match=r"empty.jsonl: there are no tasks"):
        taken(tmp_path / "empty.jsonl")


def test_a_line_that_is_not_json_is_named_by_number(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": "b"\n')
    with pytest.raises(TaskError, match=r"rows.jsonl:3: not JSON"):
        taken(file)


def test_an_unknown_builtin_or_option_is_refused_with_what_there_is() -> None:
    with pytest.raises(TaskError, match=r"no built-in task 'sort_digit'; there is .*sort_digits"):
        open_source("builtin:sort_digit", seed=0, split="train")
    with pytest.raises(TaskError, match="max_lenght"):
        open_source("builtin:sort_digits", seed=0, split="train", options={"max_lenght": 4})
    for options in ({"min_length": 0}, {"min_length": 9}, {"max_length": 11}, {"min_length": 5, "max_length": 4}):
        with pytest.raises(TaskError, match=r"min_length = .* must lie between"):
            open_source("builtin:sort_digits", seed=0, split="train", options=options)


# builtin:sort_digits


def digits_of(row: dict) -> str:
    (message,) = row["prompt"]
    assert message["role"] == "user"
    return message["content"]


def test_sort_digits_is_deterministic_and_its_answers_are_right() -> None:
    source, again, other = (open_source("builtin:sort_digits", seed=seed, split="train") for seed in (5, 5, 6))
    rows = [source.row(index) for index in range(300)]
    assert rows == [again.row(index) for index in reversed(range(300))][::-1]
    assert rows != [other.row(index) for index in range(300)]
    for row in rows:
        digits = digits_of(row)
        assert digits.isdigit() and len(set(digits)) == len(digits)
        assert row["answer"] == "".join(str(digit) for digit in sorted(map(int, digits)))
    assert len({len(digits_of(row)) for row in rows}) > 2
    assert any(row["answer"] != digits_of(row) for row in rows)


@pytest.mark.parametrize("length", range(2, 9))
def test_the_splits_of_sort_digits_never_meet(length: int) -> None:
    """Neither in their prompts nor in their answers, whatever the seed. A length that leaves a split empty is refused."""
    settings = [(seed, split) for seed in (0, 1) for split in ("train", "held_out")]
    try:
        sources = {key: SortDigits(seed=key[0], split=key[1], min_length=length, max_length=length) for key in settings}
    except TypeError:
        assert length > 8
        return
    with within(5):
        train, held_out = (
            [source.row(index) for (_, name), source in sources.items() if name == split for index in range(100)]
            for split in ("train", "held_out")
        )
    assert not {row["answer"] for row in train} & {row["answer"] for row in held_out}
    assert {len(digits_of(row)) for row in train + held_out} == {length}


@contextlib.contextmanager
def within(seconds: float):
    """Turns an endless loop into a failure."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_partial_credit() -> None:
    cases = {"1234": 1.0, "1243": 0.5, "": 0.0, "12": 0.5, "12345": 0.8, "4321": 0.0, "01234": 0.0, "1234 ": 0.8}
    assert {given: partial_credit("1324", given, answer="1234", more="ignored") for given in cases} == cases


@given(st.text("0123 ", max_size=5), st.text("0123", min_size=1, max_size=4))
@quick
def test_partial_credit_is_whole_only_for_the_answer_itself(completion: str, answer: str) -> None:
    credit = partial_credit("", completion, answer=answer)
    assert 0 <= credit <= 1
    assert (credit == 1) == (completion == answer)
    assert partial_credit("", answer, answer=answer) == 1


def test_a_built_in_task_brings_its_reward() -> None:
    assert builtin_reward("builtin:sort_digits") is partial_credit
    assert builtin_reward("rows.jsonl") is None
    assert builtin_reward(ROWS) is None
