"""Sources of a Python caller, held-out tasks that are trained on too, and what a resumed run is compared with."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import pytest

from headrace.config import make_recipe
from headrace.launch.inputs import UserInputs, check_examples, check_inputs, fingerprint_inputs, open_tasks
from headrace.score import cosine_length
from headrace.settings import ConfigError
from headrace.tasks.sort_digits import partial_credit

if TYPE_CHECKING:
    from pathlib import Path

ROWS = [{"question": f"q{number}", "source": "web"} for number in range(4)]
RENAMED = {"prompt": "question"}


def prompts(given: object) -> list[list]:
    stream = open_tasks(make_recipe({}), UserInputs(tasks=given))
    return [sorted(row["prompt"] for row in source.rows) for source in stream.sources]


def shouted(row: dict) -> dict | None:
    return row | {"prompt": row["prompt"].upper()}


def test_a_caller_gives_settings_with_rows_and_functions() -> None:
    one = {"source": ROWS, "columns": RENAMED, "map": shouted, "limit": 2}
    assert prompts(one) == prompts([one]) == prompts([(one, 2.0)]) == [["Q0", "Q1"]]
    assert prompts([one, {"source": [{"prompt": "x"}], "weight": 3.0}]) == [["Q0", "Q1"], ["x"]]
    assert prompts([{"prompt": "a", "source": "web"}]) == [["a"]]  # rows
    with pytest.raises(ConfigError, match=r"tasks\.colums is not a setting; did you mean tasks\.columns\?"):
        prompts({"source": ROWS, "colums": RENAMED})
    with pytest.raises(ConfigError, match=r"tasks\.weight = -1\.0: must be a number above 0"):
        prompts([(ROWS, -1.0)])


def test_a_chat_to_learn_from_may_have_a_column_source() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rows = [{"messages": chat, "source": "wiki"}]
    (source,) = check_examples(make_recipe({"sft": {"steps": 1}}), UserInputs(sft=rows).settled())
    assert source.rows == rows


def test_iterators_are_read_once_wherever_they_are_given() -> None:
    def rows():
        return ({"prompt": text} for text in "ab")

    endless = {"source": ({"prompt": str(number)} for number in itertools.count()), "limit": 2}
    for make in (rows, lambda: {"source": rows()}, lambda: [(rows(), 1.0)], lambda: [({"source": rows()}, 1.0)]):
        given = UserInputs(tasks=make(), held_out=make(), sft=make(), sft_held_out=make()).settled()
        for each in (given.tasks, given.held_out, given.sft, given.sft_held_out):
            assert prompts(each) == prompts(each) == [["a", "b"]]
    mix = UserInputs(tasks=[endless, {"source": rows()}]).settled().tasks
    assert prompts(mix) == prompts(mix) == [["0", "1"], ["a", "b"]]


def test_map_by_name(tmp_path: Path) -> None:
    code = tmp_path / "clean.py"
    code.write_text("def keep(row):\n    return row if row['prompt'] != 'q1' else None\nnumber = 3\n")
    one = {"source": ROWS, "columns": RENAMED}
    assert prompts(one | {"map": f"{code}:keep"}) == [["q0", "q2", "q3"]]
    with pytest.raises(ConfigError, match=r"map = '.*clean\.py:kept': .* has no 'kept'"):
        prompts(one | {"map": f"{code}:kept"})
    with pytest.raises(ConfigError, match=r"it is a int, not a function"):
        prompts(one | {"map": f"{code}:number"})


def test_everything_that_changes_the_rows_changes_the_fingerprint(tmp_path: Path) -> None:
    file, code = tmp_path / "rows.jsonl", tmp_path / "clean.py"
    file.write_text('{"prompt": "a"}\n')
    code.write_text("def keep(row):\n    return row\n")
    recipe = make_recipe(
        {
            "tasks": [{"source": str(file), "map": f"{code}:keep"}],
            "reward.functions": ["headrace.tasks.sort_digits:partial_credit"],
        }
    )
    found = fingerprint_inputs(recipe, UserInputs())
    assert found["tasks.0.map"][0] == f"{code}:keep" and found["tasks.0.map"][1] != found["tasks.0.source"][1]

    def of(**settings: object) -> list[str]:
        given = UserInputs(tasks={"source": ROWS, "columns": RENAMED, **settings}, reward=partial_credit)
        return fingerprint_inputs(make_recipe({}), given)["tasks[0]"]

    same = [of(), of()]
    others = [of(limit=2), of(system_prompt="x"), of(map=shouted), of(map=lambda row: row), of(weight=2.0)]
    assert same[0] == same[1] and len({content for _, content in [*same, *others]}) == 6
    fixed = make_recipe({"tasks": [{"source": "a", "split": "test", "columns": RENAMED}]}).fixed_settings
    assert fixed.keys() >= {"tasks.0.split", "tasks.0.columns.prompt", "tasks.0.limit", "tasks.0.system_prompt"}
    assert "model.chat_template_kwargs.on" in make_recipe({"model.chat_template_kwargs": {"on": True}}).fixed_settings


def notes(tasks: object, held_out: object, **settings: object) -> list[str]:
    return check_inputs(
        make_recipe(settings), UserInputs(tasks=tasks, held_out=held_out, reward=lambda prompt, completion: 1.0)
    )


def test_a_partials_arguments_and_the_judge_of_a_cosine_are_in_the_fingerprint(tmp_path: Path) -> None:
    def hash_of(function: object, **settings: object) -> str:
        return fingerprint_inputs(make_recipe(settings), UserInputs(tasks=[{"prompt": "a"}], reward=function))["reward[0]"][1]

    first = hash_of(functools.partial(scaled, by=2.0, judge=shouted, other=object()))
    assert first == hash_of(functools.partial(scaled, other=object(), judge=shouted, by=2.0)), "of no address, in any order"
    assert len({first, hash_of(functools.partial(scaled, by=3.0)), hash_of(functools.partial(scaled, judge=prompts))}) == 3
    hashes = set()
    for version in "12":
        (tmp_path / f"mine{version}.py").write_text(f"def exact(completion):\n    return {version}")
        options = {"correct": f"{tmp_path}/mine{version}.py:exact", "max_length": 9}
        hashes.add(hash_of(cosine_length, **{"reward.options": {"cosine_length": options}}))
    assert len(hashes) == 2


def scaled(completion: str, by: float = 1.0, judge: object = None, other: object = None) -> float:
    return by


def test_held_out_tasks_that_are_trained_on_too_are_reported() -> None:
    trained = [{"prompt": f"task {number}"} for number in range(20)]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " task 3\n"}]
    fresh = [{"prompt": f"other {number}"} for number in range(5)]
    assert notes(trained, fresh) == notes(trained, None) == []
    said = notes(trained, [*fresh, {"prompt": chat}])
    assert said == ["held-out   1 of 6 tasks are also in the training data; the first: 'task 3'"]
    assert "2 of 7" in notes(trained, [*fresh, {"prompt": "task 4"}, {"prompt": chat}])[0]
    assert notes("builtin:sort_digits", fresh) == []
    learned = {"prompt": "other 2", "answer": "x"}
    given = UserInputs(tasks=trained, held_out=fresh, sft=[learned], reward=lambda prompt, completion: 1.0)
    assert "1 of 5 tasks" in check_inputs(make_recipe({"sft.steps": 1}), given)[0]


def test_a_template_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template = '.*none\.jinja': no such file"):
        notes([{"prompt": "x"}], None, model={"chat_template": str(tmp_path / "none.jinja")})
