"""`reasoning_gym:NAME`: the generated tasks of the reasoning-gym package, scored by their own scorers.

A row names its task instead of containing it, because the metadata that scorers read is not always plain data. The same
name, seed, options and number generate the same task again.
"""

from __future__ import annotations

import difflib
import json
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.tasks.settings import TaskError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.records import Plain

INSTRUCTION = "Answer the question. Write the final answer, and nothing else, between <answer> and </answer>."
_SIZE = 20_000
"""Tasks to choose from by default: the most that every generator of the package allows."""
_HELD_OUT_SHARE = 8
"""One question in this many is held out. Its text alone decides, so no seed ever trains on it."""
_MAX_TRIES = 2_000
"""Questions to try before a split counts as empty."""
_MAX_EXAMPLES = 64
_EVALUATES = frozenset(
    [
        *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24"),
        *("simple_integration", "spiral_matrix", "string_insertion"),
    ]
)
"""Tasks whose scorer passes the model's text to `eval`, or to sympy's parser, which does so (reasoning-gym 0.1.25)."""
_BAD_ANSWER = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What scorers raise for an answer they cannot parse."""


class ReasoningGym:
    def __init__(self, name: str, *, seed: int, split: str, options: dict[str, Any]) -> None:
        """The options `instruction` (the system message) and `examples` (solved tasks shown before each question) are
        Headrace's; all others are the generator's."""
        options = {"size": _SIZE, "instruction": INSTRUCTION, "examples": 0, **options}
        if "seed" in options:
            raise _refused(name, f"options: seed = {options['seed']}: leave it out, the run's own seed is used")
        instruction, examples = options.pop("instruction"), options.pop("examples")
        if not isinstance(instruction, str):
            raise _refused(name, f"options: instruction = {instruction!r}: must be text")
        if type(examples) is not int or not 0 <= examples <= _MAX_EXAMPLES:
            raise _refused(name, f"options: examples = {examples!r}: must be a whole number up to {_MAX_EXAMPLES}")
        self._name, self._run_seed, self._split, self._options = name, seed, split, options
        # Generators add a task's number to the seed, so seeds 0 and 1 would share all tasks but one.
        self._seed = int(np.random.SeedSequence(seed).generate_state(1)[0]) >> 1
        self._dataset = _create(name, self._seed, options)
        self._shown: set[str] = set()
        self._before: list[Plain] = [{"role": "system", "content": instruction}] if instruction else []
        form = "<answer>{}</answer>" if "<answer>" in instruction else "{}"
        for index in range(examples):  # of the training split; rows never repeat them
            _, entry = self._pick("examples", index, is_held_out=False)
            if entry["answer"] is None:
                raise _refused(name, "options: examples: its tasks name no answer that could be shown; set it to 0")
            self._shown.add(entry["question"])
            self._before.append({"role": "user", "content": entry["question"]})
            self._before.append({"role": "assistant", "content": form.format(entry["answer"])})

    def row(self, index: int) -> dict[str, Plain]:
        number, entry = self._pick(self._split, index, is_held_out=self._split != "train")
        prompt: list[Plain] = [*self._before, {"role": "user", "content": entry["question"]}]
        origin: dict[str, Plain] = {"name": self._name, "seed": self._seed, "number": number, "options": dict(self._options)}
        return {"prompt": prompt, "answer": entry["answer"], "reasoning_gym": origin}

    def _pick(self, stream: str, index: int, *, is_held_out: bool) -> tuple[int, dict[str, Any]]:
        random = np.random.default_rng((self._run_seed, zlib.crc32(stream.encode()), index))
        for _ in range(_MAX_TRIES):
            number = int(random.integers(len(self._dataset)))
            entry = self._dataset[number]
            belongs = (zlib.crc32(entry["question"].encode()) % _HELD_OUT_SHARE == 0) == is_held_out
            if belongs and entry["question"] not in self._shown:
                return number, entry
        problem = f"none of {_MAX_TRIES} questions can be used for {stream}; there are too few different ones"
        raise _refused(self._name, f"{problem}, choose options that make more")


def reward_of(name: str) -> Callable[..., float | None]:
    """The task's own scorer, unless that would execute the model's text."""
    if name in _EVALUATES:
        problem = "its scorer evaluates the model's text as Python, which Headrace does not allow"
        raise _refused(name, f"{problem}; name a reward of your own in reward.functions")
    return score_answer


def score_answer(prompt: Any, completion: str, reasoning_gym: Any = None, **_: object) -> float | None:  # noqa: ANN401
    """The score of the answer in a completion by the task's own scorer, from 0 to 1; None for rows of another source."""
    if reasoning_gym is None:
        return None
    origin = reasoning_gym
    dataset = _remembered(origin["name"], origin["seed"], json.dumps(origin["options"], sort_keys=True))
    entry = dataset[origin["number"]]
    if entry["question"] != prompt[-1]["content"]:
        problem = f"task {origin['number']} reads differently from when it was made"
        raise _refused(origin["name"], f"{problem}; the generator depends on Python's hashing, set PYTHONHASHSEED=0")
    try:
        return float(dataset.score_answer(extract_answer(completion), entry))
    except _BAD_ANSWER:
        return 0.0


def extract_answer(completion: str) -> str:
    """The text in the last <answer></answer>, or else the last line that is not blank."""
    start = completion.rfind("<answer>", 0, max(completion.rfind("</answer>"), 0))
    if start >= 0:
        return completion[start:].removeprefix("<answer>").partition("</answer>")[0].strip()
    lines = completion.strip().splitlines()
    return lines[-1].strip() if lines else ""


@lru_cache(maxsize=64)
def _remembered(name: str, seed: int, options: str) -> Any:  # noqa: ANN401
    """The reward's own copy of a source's dataset, because rewards run in other threads than the task source."""
    return _create(name, seed, json.loads(options))


def _create(name: str, seed: int, options: dict[str, Any]) -> Any:  # noqa: ANN401  (the package's classes)
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise _refused(name, f"needs `pip install reasoning-gym`, which headrace[gym] includes ({error})") from error
    names = sorted(set(DATASETS) - {"composite"})
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        known = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(names)}"
        raise _refused(name, f"reasoning-gym has no such task; {known}")
    try:
        return create_dataset(name, seed=seed, **options)
    except (AssertionError, TypeError, ValueError) as error:
        problem = str(error).rpartition("() ")[2]  # without the name of the package's class
        raise _refused(name, f"options: {problem}") from error


def _refused(name: str, problem: str) -> TaskError:
    return TaskError(f"tasks: reasoning_gym:{name}: {problem}")
