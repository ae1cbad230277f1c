"""`reasoning_gym:NAME`, on a stand-in with the package's interface, and on the package itself where it is installed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import textwrap
from dataclasses import dataclass
from random import Random
from types import ModuleType, SimpleNamespace

import pytest

from headrace.config import make_recipe
from headrace.launch.inputs import UserInputs, held_out_tasks, open_tasks, reward_functions
from headrace.records import check_plain
from headrace.settings import ConfigError
from headrace.tasks import TaskError, builtin_reward, open_source, reasoning_gym as ours

SUMS = "reasoning_gym:sums"


@dataclass
class SumsConfig:
    most: int = 99
    names_answer: bool = True
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        assert self.most > 0, "most must be positive"


class Sums:
    """Sums whose metadata is no plain data, with a scorer of its own that reads it."""

    def __init__(self, config: SumsConfig) -> None:
        self.config = config

    def __len__(self) -> int:
        return self.config.size

    def __getitem__(self, index: int) -> dict:
        random = Random(self.config.seed + index)
        first, second = (random.randint(0, self.config.most) for _ in range(2))
        answer = str(first + second) if self.config.names_answer else None
        metadata = {"sum": SimpleNamespace(value=first + second), "terms": (first, second)}
        return {"question": f"{first} + {second} =", "answer": answer, "metadata": metadata}

    def score_answer(self, answer: str | None, entry: dict) -> float:
        return 1.0 if int(answer) == entry["metadata"]["sum"].value else 0.25


@pytest.fixture(autouse=True)
def fresh_cache():
    ours._remembered.cache_clear()
    yield
    ours._remembered.cache_clear()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    package, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    factory.DATASETS = dict.fromkeys(("sums", "differences", "composite", "countdown"), (Sums, SumsConfig))

    def create_dataset(name: str, **options: object) -> Sums:
        config = SumsConfig(**options)
        config.validate()
        return Sums(config)

    factory.create_dataset = create_dataset
    package.factory = factory
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    return factory


def rows_of(count: int, *, source: str = SUMS, seed: int = 0, split: str = "train", **options: object) -> list[dict]:
    opened = open_source(source, seed=seed, split=split, options=options)
    return [opened.row(index) for index in range(count)]


def question_of(row: dict) -> str:
    return row["prompt"][-1]["content"]


# Rows


def test_a_row_is_a_chat_an_answer_and_where_it_came_from(fake) -> None:
    for row in rows_of(20, most=9):
        check_plain(row, where="row")
        system, question = row["prompt"]
        assert system == {"role": "system", "content": ours.INSTRUCTION}
        first, _, second, _ = question["content"].split()
        assert question["role"] == "user" and max(int(first), int(second)) <= 9
        assert row["answer"] == str(int(first) + int(second))


def test_rows_depend_on_seed_and_number_alone(fake) -> None:
    source, again = (open_source(SUMS, seed=5, split="train") for _ in range(2))
    rows = [source.row(index) for index in range(50)]
    assert rows == [again.row(index) for index in reversed(range(50))][::-1]
    assert len({question_of(row) for row in rows}) > 40


def test_neighbouring_seeds_do_not_share_their_tasks(fake) -> None:
    """A generator adds the task's number to its seed, so that 0 and 1 would share all tasks but one."""
    numbers = [{row["reasoning_gym"]["seed"] + row["reasoning_gym"]["number"] for row in rows_of(500, seed=s)} for s in (0, 1)]
    assert not numbers[0] & numbers[1]


def test_the_splits_never_meet_whatever_the_seed(fake) -> None:
    options = {"most": 20}
    train, held_out = (
        {question_of(row) for seed in (0, 1) for row in rows_of(400, seed=seed, split=split, **options)}
        for split in ("train", "held_out")
    )
    assert not train & held_out
    assert len(train) > 200 and len(held_out) > 30


def test_held_out_rows_of_a_recipe(fake) -> None:
    task = {"source": SUMS, "options": {"most": 20}}
    recipe = make_recipe({"tasks": [task], "evaluate": {"tasks": [task], "limit": 30}})
    ((name, held_out),) = held_out_tasks(recipe, UserInputs()).items()
    stream = open_tasks(recipe, UserInputs())
    assert len(held_out) == 30 and SUMS.endswith(f":{name}")
    assert not {question_of(row) for row in held_out} & {question_of(stream.next().row) for _ in range(300)}


@pytest.mark.parametrize(("instruction", "shown"), [("Only the number.", "{}"), (ours.INSTRUCTION, "<answer>{}</answer>")])
def test_examples_are_solved_tasks_that_are_never_asked(fake, instruction: str, shown: str) -> None:
    given = {"examples": 3, "most": 4, "instruction": instruction}
    train, held_out = (rows_of(100, split=split, **given) for split in ("train", "held_out"))
    before = train[0]["prompt"][:-1]
    assert all(row["prompt"][:-1] == before for row in train + held_out)
    asked = before[1::2]
    assert [message["role"] for message in before] == ["system", *("user", "assistant") * 3]
    for question, answer in zip(asked, before[2::2], strict=True):
        first, _, second, _ = question["content"].split()
        assert answer["content"] == shown.format(int(first) + int(second))
    assert len({message["content"] for message in asked}) == 3
    assert not {message["content"] for message in asked} & {question_of(row) for row in train + held_out}


def test_no_instruction_is_no_system_message(fake) -> None:
    assert [message["role"] for message in rows_of(1, instruction="")[0]["prompt"]] == ["user"]


# The reward


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>5</answer>", "5"),
        ("first <answer>4</answer>, no: <answer>\n 5 </answer> so", "5"),
        ("<answer>5</answer> and </answer>", "5"),
        ("<answer>4</answer> <answer>5", "4"),
        ("<answer></answer>", ""),
        ("</answer>5<answer>", "</answer>5<answer>"),
        ("thinking\n\n 5 \n \n", "5"),
        ("5", "5"),
        ("", ""),
        (" \n", ""),
    ],
)
def test_the_answer_in_a_completion(completion: str, answer: str) -> None:
    assert ours.extract_answer(completion) == answer


def test_the_reward_is_the_tasks_own_score(fake) -> None:
    reward = builtin_reward(SUMS)
    for row in rows_of(5, most=30):
        right, wrong = row["answer"], str(int(row["answer"]) + 1)
        assert reward(completion=f"so <answer>{right}</answer>", **row) == 1.0
        assert reward(completion=f"well\n0{right}", **row) == 1.0
        assert reward(completion=wrong, **row) == 0.25


def test_an_answer_that_the_scorer_cannot_read_is_worth_nothing(fake) -> None:
    (row,) = rows_of(1)
    assert builtin_reward(SUMS)(completion="a number", **row) == 0.0
    assert builtin_reward(SUMS)(completion="", **row) == 0.0


def test_a_scorer_that_breaks_is_not_a_zero(fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> float:
        raise RuntimeError("no disk")

    (row,) = rows_of(1)
    monkeypatch.setattr(Sums, "score_answer", broken)
    with pytest.raises(RuntimeError, match="no disk"):
        builtin_reward(SUMS)(completion="5", **row)


def test_a_task_that_reads_otherwise_than_when_it_was_drawn_is_not_scored(fake) -> None:
    (row,) = rows_of(1)
    row["prompt"] = [{"role": "user", "content": "another question"}]
    with pytest.raises(TaskError, match=r"reads differently from when it was made.*PYTHONHASHSEED=0"):
        builtin_reward(SUMS)(completion="5", **row)


def test_rows_of_other_sources_are_not_judged(fake) -> None:
    assert builtin_reward(SUMS)(prompt="2 + 3", completion="5", answer="5") is None


def test_two_tasks_of_the_package_share_their_reward(fake) -> None:
    tasks = [{"source": SUMS}, {"source": "reasoning_gym:differences"}]
    ((reward, weight),) = reward_functions(make_recipe({"tasks": tasks}), UserInputs())
    assert (reward.function, weight) == (ours.score_answer, 1.0)
    other = [*tasks, {"source": "builtin:sort_digits"}]
    with pytest.raises(ConfigError, match=r"the tasks bring different ones.*reward\.functions"):
        reward_functions(make_recipe({"tasks": other}), UserInputs())


def test_scorers_that_execute_what_a_model_wrote_are_refused(fake) -> None:
    assert rows_of(1, source="reasoning_gym:countdown")
    with pytest.raises(TaskError, match=r"reasoning_gym:countdown: its scorer evaluates .* reward\.functions"):
        builtin_reward("reasoning_gym:countdown")


# Errors


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("reasoning_gym", "reasoning_gym.factory"):  # other tests may have imported it
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TaskError, match=r"tasks: reasoning_gym:sums: needs `pip install reasoning-gym`"):
        open_source(SUMS, seed=0, split="train")


@pytest.mark.parametrize(
    ("source", "options", "problem"),
    [
        ("reasoning_gym:sum", {}, r"reasoning_gym:sum: .*no such task.*did you mean sums\?"),
        ("reasoning_gym:zzz", {}, r"there are: countdown, differences, sums"),
        ("reasoning_gym:composite", {}, r"no such task"),
        (SUMS, {"moost": 3}, r"reasoning_gym:sums: options: got an unexpected keyword argument 'moost'"),
        (SUMS, {"most": 0}, r"reasoning_gym:sums: options: most must be positive"),
        (SUMS, {"seed": 4}, r"options: seed = 4: leave it out"),
        (SUMS, {"instruction": 4}, r"options: instruction = 4: must be text"),
        (SUMS, {"examples": -1}, r"options: examples = -1: must be a whole number"),
        (SUMS, {"examples": True}, r"options: examples = True: must be a whole number"),
        (SUMS, {"examples": 1, "names_answer": False}, r"name no answer that could be shown"),
        (SUMS, {"examples": 9, "most": 1}, r"questions can be used for examples; .*too few"),
    ],
)
def test_what_cannot_be_used_is_refused(fake, source: str, options: dict, problem: str) -> None:
    with pytest.raises(TaskError, match=problem):
        open_source(source, seed=0, split="train", options=options)


def test_a_split_without_questions_is_refused_and_not_searched_for_ever(fake) -> None:
    splits = [(rows_of, {"split": split, "most": 1, "size": 1}) for split in ("train", "held_out")]
    refused = 0
    for make, given in splits:
        try:
            make(1, **given)
        except TaskError as error:
            refused += 1
            assert "too few different ones" in str(error)
    assert refused == 1


# The package itself

SAMPLES = {
    "chain_sum": {"max_terms": 2, "max_digits": 2},
    "word_sequence_reversal": {"max_words": 4},
    "basic_arithmetic": {"operators": ["+", "-"], "max_terms": 2},
    "letter_counting": {},
    "prime_factorization": {},
}


@pytest.mark.parametrize("name", SAMPLES)
def test_tasks_of_the_package(name: str) -> None:
    source, options = f"reasoning_gym:{name}", SAMPLES[name]
    rows = {split: rows_of(30, source=source, split=split, examples=2, **options) for split in ("train", "held_out")}
    assert rows["train"] == rows_of(30, source=source, examples=2, **options)
    assert not {question_of(row) for row in rows["train"]} & {question_of(row) for row in rows["held_out"]}
    reward = builtin_reward(source)
    for row in rows["train"]:
        check_plain(row, where=name)
        assert reward(completion=f"thus <answer> {row['answer']} </answer>", **row) == 1.0
        assert reward(completion="~ qzx }{", **row) < 0.5


def test_wrong_options_of_the_package_are_told() -> None:
    with pytest.raises(TaskError, match=r"reasoning_gym:chain_sum: options: max_terms must be >= min_terms"):
        open_source("reasoning_gym:chain_sum", seed=0, split="train", options={"min_terms": 5, "max_terms": 2})
    with pytest.raises(TaskError, match="'max_term'"):
        open_source("reasoning_gym:chain_sum", seed=0, split="train", options={"max_term": 2})


def test_every_scorer_that_evaluates_its_answer_is_known() -> None:
    """By its source: `eval`, `exec` or sympy's parser, given `answer`."""
    found = set()
    datasets = importlib.import_module("reasoning_gym.factory").DATASETS
    for name, (dataset, _) in datasets.items():
        tree = ast.parse(textwrap.dedent(inspect.getsource(dataset.score_answer)))
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            function = ast.unparse(call.func).rpartition(".")[2]
            if function in ("eval", "exec", "parse_expr", "sympify") and "answer" in [ast.unparse(a) for a in call.args]:
                found.add(name)
    assert found == ours._EVALUATES
