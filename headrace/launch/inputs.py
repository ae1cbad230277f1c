"""A run's tasks and rewards, from a recipe or a Python caller. Imports no torch, so that a dry run is fast."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.imports import import_name
from headrace.score import GIVEN, RewardFunction
from headrace.settings import ConfigError
from headrace.tasks import RowSource, TaskError, TaskSettings, TaskStream, builtin_reward, open_source

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headrace.config import Recipe
    from headrace.records import Plain
    from headrace.tasks import TaskSource


_RESERVED = GIVEN - {"prompt"}
_MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")
_PIECE = 4096
ROWS = "rows"
"""The name of tasks that a Python caller passed as rows."""


@dataclass(frozen=True)
class UserInputs:
    """Objects passed by a Python caller instead of names in a recipe."""

    tasks: Any = None
    """Rows, a file or a Dataset, or a list of files or of (source, weight) pairs; `held_out` too."""
    held_out: Any = None
    reward: Any = None
    """A function, its name, or a list of them."""
    environment: Any = None
    """An object with `run(task, client)`; None is single-turn."""

    def settled(self) -> UserInputs:
        """A copy with iterators turned into lists, since sources are opened more than once."""
        tasks, held_out = (list(rows) if hasattr(rows, "__next__") else rows for rows in (self.tasks, self.held_out))
        return dataclasses.replace(self, tasks=tasks, held_out=held_out)


def fingerprint_inputs(recipe: Recipe, given: UserInputs) -> dict[str, list[str]]:
    """[name, hash of the content] of whatever a run reads, by the setting that names it; for what a Python caller passed, by
    the argument. A resumed run is compared with it: the same name with other content has been edited, and another name with
    the same content has been moved. What has no content here, such as a generated task, has its name as the hash."""
    train = recipe.train
    models = {"model.path": recipe.model.path, "train.reference": train.reference, "train.teacher": train.teacher}
    found = {key: [path, _hash_model(path)] for key, path in models.items()}
    for argument, section, sources, rows in (
        ("", "warmup.tasks", recipe.warmup.tasks, None),
        ("tasks", "tasks", recipe.tasks, given.tasks),
        ("held_out", "evaluate.tasks", recipe.evaluate.tasks, given.held_out),
    ):
        if rows is None:
            found |= {f"{section}.{i}.source": [each.source, _hash_tasks(each.source)] for i, each in enumerate(sources)}
            continue
        for index, (source, weight) in enumerate(_mix(rows)):
            name = str(source) if isinstance(source, str | Path) else ROWS
            found[f"{argument}[{index}]"] = [name, _hash(weight, _hash_tasks(source))]
    names = recipe.reward.functions if given.reward is None else ()
    for index, (reward, _) in enumerate(reward_functions(recipe, given)):
        key, name = (f"reward.functions.{index}", names[index]) if names else (f"reward[{index}]", reward.name)
        found[key] = [name, _hash(_source_of(reward.function))]
    own_loss = import_name(train.loss, setting="train.loss") if ":" in train.loss else None
    found["train.loss"] = [train.loss, train.loss if own_loss is None else _hash(_source_of(own_loss))]
    if given.environment is not None:
        found["environment"] = [type(given.environment).__qualname__, _hash(_source_of(given.environment))]
    return found


def _source_of(function: Any) -> str:  # noqa: ANN401
    try:
        return inspect.getsource(function if hasattr(function, "__name__") else type(function))
    except (OSError, TypeError):
        return str(getattr(function, "__qualname__", type(function).__qualname__))


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _hash_tasks(source: Any) -> str:  # noqa: ANN401
    digest = hashlib.sha256()
    if not isinstance(source, str | Path):
        for row in source:
            digest.update(repr(row).encode())
    elif Path(source).is_file():
        with Path(source).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    else:
        return str(source)
    return digest.hexdigest()[:16]


def _hash_model(path: str) -> str:
    """Of a folder's files: names, sizes and up to 64 pieces of each, since a model may be too large to read whole."""
    if not path or not Path(path).is_dir():
        return path
    digest = hashlib.sha256()
    for file in sorted(each for each in Path(path).iterdir() if each.suffix in _MODEL_FILES):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for start in range(0, size, max(_PIECE, size // 64)):
                content.seek(start)
                digest.update(content.read(_PIECE))
    return digest.hexdigest()[:16]


def open_tasks(recipe: Recipe, given: UserInputs) -> TaskStream:
    """Training tasks, from the caller or else the recipe."""
    sources = _mix(given.tasks) if given.tasks is not None else [(source, source.weight) for source in recipe.tasks]
    if not sources:
        raise ConfigError("tasks: none are given; add a [[tasks]] section with a source, or pass tasks=")
    return TaskStream([(_open(source, recipe, split="train"), weight) for source, weight in sources], seed=recipe.seed)


def held_out_tasks(recipe: Recipe, given: UserInputs) -> dict[str, list[dict[str, Plain]]]:
    """Evaluation tasks by source name: the same each time, at most `evaluate.limit` in all."""
    opened = held_out_sources(recipe, given)
    left, found = recipe.evaluate.limit, {}
    for place, (name, each) in enumerate(opened.items()):
        count = min(-(-left // (len(opened) - place)), len(each) if isinstance(each, Sized) else left)
        found[name] = [each.row(index) for index in range(count)]
        left -= count
    return {name: rows for name, rows in found.items() if rows}


def reward_functions(recipe: Recipe, given: UserInputs) -> list[tuple[RewardFunction, float]]:
    """(function, weight) pairs: the caller's, or else the recipe's, or else the built-in task's own."""
    if given.reward is not None:
        functions = list(given.reward) if isinstance(given.reward, list | tuple) else [given.reward]
    elif recipe.reward.functions:
        functions = list(recipe.reward.functions)
    else:
        own = [builtin_reward(source.source) for source in recipe.tasks]
        functions = list({id(f): f for f in own if f is not None}.values())
        if not functions or None in own:
            raise ConfigError("reward: none is given; name one in reward.functions, or pass reward=")
        if len(functions) > 1:
            raise ConfigError(
                "reward: the tasks bring different ones, which would each judge all tasks; name one in reward.functions"
            )
    functions = [import_name(f, setting="reward.functions") if isinstance(f, str) else f for f in functions]
    weights = recipe.reward.weights or (1.0,) * len(functions)
    if len(weights) != len(functions):
        raise ConfigError(f"reward.weights = {list(weights)}: there are {len(functions)} reward functions")
    rewards = [RewardFunction(function) for function in functions]
    names = [reward.name for reward in rewards]
    for index, reward in enumerate(rewards):
        if names.count(reward.name) > 1:
            rewards[index] = RewardFunction(reward, name=f"{reward.name}_{index}")
    return list(zip(rewards, weights, strict=True))


def check_inputs(recipe: Recipe, given: UserInputs) -> None:
    """Raise if tasks or rewards are missing, or rows lack columns that a reward takes."""
    stream, _ = open_tasks(recipe, given), held_out_tasks(recipe, given)
    rewards = [function for function, _ in reward_functions(recipe, given)]
    if given.environment is not None:
        rewards = []  # an environment may give its episodes more columns
    check_task_columns(stream.sources, rewards)
    check_task_columns(held_out_sources(recipe, given).values(), rewards, kind="held-out ")


def held_out_sources(recipe: Recipe, given: UserInputs) -> dict[str, TaskSource]:
    """Held-out sources by name; `held_out_tasks` picks the tasks to evaluate."""
    sources: list[Any] = [source for source, _ in _mix(given.held_out)] if given.held_out is not None else []
    sources = sources or list(recipe.evaluate.tasks)
    try:
        opened = [_open(each, recipe, split="held_out") for each in sources]
    except TaskError as error:
        raise TaskError(f"held-out {error}") from error
    return dict(zip(_names(sources), opened, strict=True))


def check_task_columns(sources: Iterable[TaskSource], rewards: Sequence[RewardFunction], *, kind: str = "") -> None:
    """Raise if a row lacks a column that a reward takes, or has one with a reserved name. Of generated rows, which are all
    alike, only the first is checked."""
    for source in sources:
        name, rows = (source.name, source.rows) if isinstance(source, RowSource) else ("tasks", [source.row(0)])
        for number, row in enumerate(rows):
            _check_row(row, rewards, where=f"row {number} of {kind}{name}")


def _check_row(row: dict[str, Plain], rewards: Sequence[RewardFunction], *, where: str) -> None:
    for name in _RESERVED & row.keys():
        what = f"{where} has a column {name!r}, the name under which rewards get what the policy answered"
        raise ConfigError(f"{what}; rename the column, for example to 'answer'")
    for reward in rewards:
        for name in reward.required:
            if name not in row:
                what = f"reward {reward.name!r} takes {name!r}, which {where} does not have (it has: {', '.join(row)})"
                raise ConfigError(f"{what}; add the column to every row, or give the parameter {name} a default value")


def _mix(tasks: Any) -> list[tuple[Any, float]]:  # noqa: ANN401
    """(source, weight) pairs from any form of `UserInputs.tasks`."""
    if isinstance(tasks, list) and tasks and all(isinstance(task, tuple) and len(task) == 2 for task in tasks):
        return [(source, float(weight)) for source, weight in tasks]
    if isinstance(tasks, list) and tasks and all(isinstance(task, str) for task in tasks):
        return [(source, 1.0) for source in tasks]
    return [(tasks, 1.0)]


def _names(sources: list[Any]) -> list[str]:
    """A unique name for each source, after its file or built-in task."""
    names: list[str] = []
    for source in sources:
        text = getattr(source, "source", source)
        name = Path(str(text).rpartition(":")[2]).stem if isinstance(text, str | Path) else "tasks"
        number = sum(other.partition("#")[0] == name for other in names)
        names.append(f"{name}#{number + 1}" if number else name)
    return names


def _open(source: Any, recipe: Recipe, *, split: str) -> Any:  # noqa: ANN401
    if isinstance(source, TaskSettings):
        return open_source(source.source, seed=recipe.seed, split=split, options=source.options)
    return open_source(source, seed=recipe.seed, split=split)
