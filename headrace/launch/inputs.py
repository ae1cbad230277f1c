"""A run's tasks and rewards, from a recipe or a Python caller. Imports no torch, so that a dry run is fast."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import itertools
import re
from collections.abc import Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.envs import MCP, check_environment, is_single_turn
from headrace.imports import import_name
from headrace.launch.examples import example_parts
from headrace.records import UNSHAPED
from headrace.score import OVERLONG, RESERVED, RewardFunction, cosine_length
from headrace.settings import ConfigError, build, to_dict
from headrace.tasks import (
    RowSource,
    SamplerSettings,
    TaskError,
    TaskSettings,
    TaskStream,
    builtin_reward,
    is_generated,
    open_source,
    read_rows,
    with_sampler,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from headrace.config import Recipe
    from headrace.records import Plain
    from headrace.tasks import SampledTasks, TaskSource


_MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")
_PIECE = 4096
ROWS = "rows"
"""The name of tasks that a Python caller passed as rows."""


@dataclass(frozen=True)
class UserInputs:
    """Objects passed by a Python caller instead of names in a recipe."""

    tasks: Any = None
    """Rows, a file, a dataset or its name, a dict of `TaskSettings` in which `source` may be rows and `map` a function, or a
    list of names, dicts or (source, weight) pairs; `held_out`, `sft` and `sft_held_out` too."""
    held_out: Any = None
    sft: Any = None
    sft_held_out: Any = None
    reward: Any = None
    """A function, its name, or a list of them."""
    environment: Any = None
    """An object with `run(task, client)`, or its class; None takes the recipe's `[environment]`."""
    tools: Any = None
    """Tools that the policy may call: functions, classes, names. None takes the recipe's `environment.tools`."""
    sampler: Any = None
    """A class or function that makes a `TaskSampler`; None takes the recipe's `[sampler]`."""

    def is_single_turn(self, recipe: Recipe) -> bool:
        """Whether a task is one prompt and one answer."""
        return is_single_turn(recipe.environment, environment=self.environment, tools=self.tools)

    def settled(self) -> UserInputs:
        """A copy with iterators turned into lists, since sources are opened more than once."""
        names = ("tasks", "held_out", "sft", "sft_held_out")
        return dataclasses.replace(self, **{name: _settled(getattr(self, name)) for name in names})


class Source(NamedTuple):
    """A source of a recipe or a Python caller."""

    rows: Any
    """The name in the recipe, or what the caller passed."""
    settings: TaskSettings
    function: Callable[[Any], Any] | None = None
    """What `map` names, or the caller's own."""

    def open(self, recipe: Recipe, *, split: str, is_sft: bool = False) -> TaskSource:
        how: dict[str, Any] = {"settings": self.settings, "function": self.function, "is_sft": is_sft}
        return open_source(self.rows, seed=recipe.seed, split=split, **how)


def sources_of(settings: Sequence[TaskSettings], given: object) -> list[Source]:
    """The caller's sources if there are any, or else the recipe's."""
    if given is None:
        return [Source(each.source, each, _imported(each.map, setting="map")) for each in settings]
    if isinstance(given, list) and given and all(isinstance(each, tuple) and len(each) == 2 for each in given):
        return [_source(source, weight) for source, weight in given]
    if isinstance(given, list) and given and all(isinstance(each, str) or _is_settings(each) for each in given):
        return [_source(each) for each in given]
    return [_source(given)]


def _settled(given: Any, limit: object = None) -> Any:  # noqa: ANN401
    """What was given, with lists of at most `limit` rows for the iterators in it."""
    if hasattr(given, "__next__"):
        return list(itertools.islice(given, limit if isinstance(limit, int) and limit > 0 else None))
    if _is_settings(given):
        return given | {"source": _settled(given["source"], given.get("limit"))}
    if isinstance(given, tuple) and len(given) == 2:
        return _settled(given[0]), given[1]
    return [_settled(each) for each in given] if isinstance(given, list) else given


def _is_settings(source: object) -> bool:
    """Whether it is a source's settings, not a row, which has a prompt, or a chat to learn from."""
    return isinstance(source, dict) and "source" in source and not source.keys() & {"prompt", "messages"}


def _source(given: Any, weight: float | None = None) -> Source:  # noqa: ANN401
    fields = dict(given) if _is_settings(given) else {"source": given}
    rows, function = fields["source"], fields.get("map")
    fields |= {"source": rows if isinstance(rows, str) else ROWS} | ({} if weight is None else {"weight": weight})
    if callable(function):
        del fields["map"]
    settings = build(TaskSettings, fields, prefix="tasks.")
    return Source(rows, settings, function if callable(function) else _imported(settings.map, setting="map"))


def _imported(name: str, *, setting: str) -> Callable[[Any], Any] | None:
    function = import_name(name, setting=setting) if name else None
    if function is not None and not callable(function):
        raise ConfigError(f"{setting} = {name!r}: it is a {type(function).__name__}, not a function")
    return function


def fingerprint_inputs(recipe: Recipe, given: UserInputs) -> dict[str, list[str]]:
    """[name, hash of the content] of whatever a run reads, by the setting that names it; for what a Python caller passed, by
    the argument. A resumed run is compared with it: the same name with other content has been edited, and another name with
    the same content has been moved. What has no content here, such as a generated task, has its name as the hash."""
    train = recipe.train
    models = {"model.path": recipe.model.path, "train.reference": train.reference, "train.teacher": train.teacher}
    found = {key: [path, _hash_model(path)] for key, path in models.items()}
    if recipe.model.chat_template:
        found["model.chat_template"] = [recipe.model.chat_template, _hash(Path(recipe.model.chat_template).read_bytes())]
    for argument, section, settings, rows in (
        ("sft", "sft.tasks", recipe.sft.tasks, given.sft),
        ("sft_held_out", "sft.held_out", recipe.sft.held_out, given.sft_held_out),
        ("tasks", "tasks", recipe.tasks, given.tasks),
        ("held_out", "evaluate.tasks", recipe.evaluate.tasks, given.held_out),
    ):
        for index, source in enumerate(sources_of(settings, rows)):
            content, code = _hash_rows(source), "" if source.function is None else _hash(_source_of(source.function))
            if rows is None:
                found[f"{section}.{index}.source"] = [source.rows, content]
                if code:
                    found[f"{section}.{index}.map"] = [source.settings.map, code]
                continue
            name = str(source.rows) if isinstance(source.rows, str | Path) else ROWS
            found[f"{argument}[{index}]"] = [name, _hash(to_dict(source.settings), content, code)]
    names = recipe.reward.functions if given.reward is None else ()
    for index, (reward, _) in enumerate(reward_functions(recipe, given) if recipe.uses_tasks else ()):
        key, name = (f"reward.functions.{index}", names[index]) if names else (f"reward[{index}]", reward.name)
        more: list[object] = [] if reward.own.weight is None else [reward.own.weight]
        judge = reward.own.options.get("correct") if reward.function is cosine_length else None
        if isinstance(judge, str):  # a missing one is refused elsewhere
            more.append(_source_of(import_name(judge, setting="reward.options.cosine_length.correct")))
        found[key] = [name, _hash(_source_of(reward.function), *more)]
    for key, name in (("train.loss", train.loss), ("train.schedule", train.schedule), ("sft.schedule", recipe.sft.schedule)):
        found[key] = [name, _hash(_source_of(import_name(name, setting=key))) if ":" in name else name]
    if given.sampler is None and ":" in recipe.sampler.kind:
        found["sampler.kind"] = _named(recipe.sampler.kind, setting="sampler.kind")
    named = [given.environment] if given.environment is not None else []
    if recipe.environment.name and not named:
        found["environment.name"] = _named(recipe.environment.name, setting="environment.name")
    for index, tool in enumerate(given.tools or (() if named else recipe.environment.tools)):
        is_server = isinstance(tool, str) and tool.startswith(MCP)
        own = import_name(tool, setting="environment.tools") if isinstance(tool, str) and not is_server else tool
        name = tool if isinstance(tool, str) else getattr(tool, "__qualname__", repr(tool))
        found[f"environment.tools.{index}"] = [name, name if is_server else _hash(_source_of(own))]
    for argument, own in (("sampler", given.sampler), ("environment", given.environment)):
        if own is not None:
            found[argument] = [getattr(own, "__qualname__", type(own).__qualname__), _hash(_source_of(own))]
    return found


def _named(name: str, *, setting: str) -> list[str]:
    """[name, hash of the code that it names]"""
    return [name, _hash(_source_of(import_name(name, setting=setting)))]


def _source_of(function: Any) -> str:  # noqa: ANN401
    """The code of a function; of a `functools.partial`, with its arguments."""
    if isinstance(function, functools.partial):
        code = [_source_of(function.func)]
        for name, value in [*enumerate(function.args), *sorted(function.keywords.items())]:
            shown = _source_of(value) if callable(value) else re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # as next time
            code.append(f"{name}={shown}")
        return " ".join(code)
    try:
        return inspect.getsource(function if hasattr(function, "__name__") else type(function))
    except (OSError, TypeError):
        return str(getattr(function, "__qualname__", type(function).__qualname__))


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _hash_rows(source: Source) -> str:
    digest, name = hashlib.sha256(), source.rows
    if is_generated(name):
        return str(name)
    if isinstance(name, str | Path) and Path(name).is_file():
        with Path(name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    else:
        for row in read_rows(name, source.settings):
            digest.update(repr(row).encode())
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
    sources = sources_of(recipe.tasks, given.tasks)
    if not sources:
        raise ConfigError("tasks: none are given; add a [[tasks]] section with a source, or pass tasks=")
    return _mixed(sources, recipe)


def open_examples(recipe: Recipe, given: UserInputs) -> TaskStream:
    """What SFT learns from: `sft.tasks`, or else the training tasks."""
    sources = sources_of(recipe.sft.tasks, given.sft) or sources_of(recipe.tasks, given.tasks)
    if not sources:
        raise ConfigError("sft: there is nothing to learn from; add [[sft.tasks]] with a source")
    return _mixed(sources, recipe, is_sft=True)


def _mixed(sources: list[Source], recipe: Recipe, *, is_sft: bool = False) -> TaskStream:
    opened = [(each.open(recipe, split="train", is_sft=is_sft), each.settings.weight) for each in sources]
    return TaskStream(dict(zip(_names(sources), opened, strict=True)), seed=recipe.seed)


def open_sampler(recipe: Recipe, given: UserInputs) -> TaskStream | SampledTasks:
    """Training tasks in the order of the caller's or the recipe's sampler."""
    if given.sampler is not None and recipe.sampler != SamplerSettings():
        raise ConfigError("sampler: the recipe has a [sampler] and sampler= is given too; leave out one of them")
    stream, success_at = open_tasks(recipe, given), recipe.evaluate.success_at
    return with_sampler(stream, recipe.sampler, seed=recipe.seed, success_at=success_at, given=given.sampler)


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
        sources = sources_of(recipe.tasks, given.tasks) or sources_of(recipe.evaluate.tasks, given.held_out)
        own = [builtin_reward(source.rows) for source in sources]
        functions = list({id(f): f for f in own if f is not None}.values())
        environment = recipe.environment
        if None in own and (given.environment is not None or environment.name or environment.command):
            functions = []  # the environment's episodes bring their rewards
        elif not functions or None in own:
            raise ConfigError("reward: none is given; name one in reward.functions, or pass reward=")
        if len(functions) > 1:
            raise ConfigError(
                "reward: the tasks bring different ones, which would each judge all tasks; name one in reward.functions"
            )
    rewards = [_with_options(function, recipe.reward.options) for function in functions]
    names = [reward.name for reward in rewards]
    for index, reward in enumerate(rewards):
        if names.count(reward.name) > 1:
            rewards[index] = RewardFunction(reward, name=f"{reward.name}_{index}")
    if unknown := recipe.reward.options.keys() - set(names):
        raise ConfigError(f"reward.options.{min(unknown)}: there is no such reward function (there are: {', '.join(names)})")
    if recipe.reward.overlong_buffer and OVERLONG in names:
        raise ConfigError("reward.overlong_buffer: a reward function is named 'overlong' too; rename it")
    if UNSHAPED in names:
        raise ConfigError("reward: a function is named 'unshaped', as rollouts call the reward before shaping; rename it")
    weights = recipe.reward.weights or [1.0 if reward.own.weight is None else reward.own.weight for reward in rewards]
    if len(weights) != len(rewards):
        raise ConfigError(f"reward.weights = {list(weights)}: there are {len(rewards)} reward functions")
    for reward in rewards:
        if recipe.reward.processes and reward.own.processes and not reward.is_async:
            _ = reward.reference  # raises if no process can import it
    return list(zip(rewards, weights, strict=True))


def _with_options(function: Any, options: dict[str, dict[str, Any]]) -> RewardFunction:  # noqa: ANN401  (or its name)
    own = {"reference": function} if isinstance(function, str) else {}
    reward = RewardFunction(import_name(function, setting="reward.functions") if own else function, **own)
    return RewardFunction(reward, options=options[reward.name]) if reward.name in options else reward


def check_inputs(recipe: Recipe, given: UserInputs) -> list[str]:
    """Raise if tasks or rewards are missing, or rows lack columns that a reward or SFT takes. Returns what to tell the user."""
    template = recipe.model.chat_template
    if template and not Path(template).is_file():
        raise ConfigError(f"model.chat_template = {template!r}: no such file (paths are relative to {Path.cwd()})")
    trained = check_examples(recipe, given) if recipe.sft.is_on else []
    if not recipe.uses_tasks:
        return []
    if recipe.buffer.wants_one_rollout and not given.is_single_turn(recipe):
        told = "all rollouts of an episode are scored at once, when it ends, so none could enter sooner"
        raise ConfigError(f"buffer.unit = 'sample': {told}; set it to 'episode'")
    stream, held_out = open_tasks(recipe, given), held_out_tasks(recipe, given)
    open_sampler(recipe, given)
    rewards = [function for function, _ in reward_functions(recipe, given)]
    check_environment(recipe.environment, environment=given.environment, tools=given.tools)
    if not given.is_single_turn(recipe):
        rewards = []  # an environment may give its episodes more columns
        if recipe.reward.overlong_buffer:
            told = "it compares the length of one answer with sampling.max_tokens, and an episode has several; set it to 0"
            raise ConfigError(f"reward.overlong_buffer = {recipe.reward.overlong_buffer:g}: {told}")
    check_task_columns(stream.sources, rewards)
    check_task_columns(held_out_sources(recipe, given).values(), rewards, kind="held-out ")
    _imported(recipe.evaluate.answer, setting="evaluate.answer")
    return shared_prompts([*stream.sources, *trained], held_out)


def check_examples(recipe: Recipe, given: UserInputs) -> list[TaskSource]:
    """The sources that SFT learns from. Raises if rows have nothing to learn."""
    sources = open_examples(recipe, given).sources
    for source in (*sources, *held_out_examples(recipe, given)):
        for number, row in enumerate(source.rows if isinstance(source, RowSource) else [source.row(0)]):
            example_parts(row, where=f"sft: row {number} of {getattr(source, 'name', 'tasks')}")
    if recipe.sft.epochs and not all(isinstance(source, RowSource) for source in sources):
        raise ConfigError(f"sft.epochs = {recipe.sft.epochs}: generated tasks have no end; set sft.steps, or their limit")
    return sources


def shared_prompts(trained: Iterable[TaskSource], held_out: Mapping[str, Sequence[dict[str, Plain]]]) -> list[str]:
    """A line that says how many held-out tasks are trained on too. Endless sources keep held-out tasks of their own."""
    rows = [row for source in trained if isinstance(source, RowSource) for row in source.rows] if held_out else []
    known = {_said(row) for row in rows}
    tasks = [task for each in held_out.values() for task in each]
    shared = [text for text in map(_said, tasks) if text in known]
    if not shared:
        return []
    first = " ".join(shared[0].split())
    first = first if len(first) <= 80 else first[:79] + "…"
    return [f"held-out   {len(shared)} of {len(tasks)} tasks are also in the training data; the first: {first!r}"]


def _said(row: dict[str, Plain]) -> str:
    """What a prompt says, as text or as a chat, under any system message."""
    prompt: Any = row.get("prompt", row.get("messages"))
    if isinstance(prompt, str):
        return prompt.strip()
    said = [message["content"] for message in prompt if message["role"] != "system"]
    if "prompt" not in row:  # a whole chat: its first question
        said = said[:1]
    return "\n".join(text.strip() if isinstance(text, str) else repr(text) for text in said)


def held_out_sources(recipe: Recipe, given: UserInputs) -> dict[str, TaskSource]:
    """Held-out sources by name; `held_out_tasks` picks the tasks to evaluate."""
    sources = sources_of(recipe.evaluate.tasks, given.held_out)
    try:
        opened = [each.open(recipe, split="held_out") for each in sources]
    except TaskError as error:
        raise TaskError(f"held-out {error}") from error
    return dict(zip(_names(sources), opened, strict=True))


def num_examples(recipe: Recipe, sources: Sequence[TaskSource]) -> int:
    """Rows that SFT learns from in all; with `sft.epochs` all sources have an end."""
    if not recipe.sft.epochs:
        return recipe.sft.steps * recipe.sft.batch
    return max(1, round(recipe.sft.epochs * sum(len(source.rows) for source in sources if isinstance(source, RowSource))))


def held_out_examples(recipe: Recipe, given: UserInputs) -> list[TaskSource]:
    """What SFT measures its held-out loss on."""
    sources = sources_of(recipe.sft.held_out, given.sft_held_out)
    return [each.open(recipe, split="held_out", is_sft=True) for each in sources]


def check_task_columns(sources: Iterable[TaskSource], rewards: Sequence[RewardFunction], *, kind: str = "") -> None:
    """Raise if a row lacks a column that a reward takes, or has one with a reserved name. Of generated rows, which are all
    alike, only the first is checked."""
    for source in sources:
        name, rows = (source.name, source.rows) if isinstance(source, RowSource) else ("tasks", [source.row(0)])
        for number, row in enumerate(rows):
            _check_row(row, rewards, where=f"row {number} of {kind}{name}")


def _check_row(row: dict[str, Plain], rewards: Sequence[RewardFunction], *, where: str) -> None:
    for name in RESERVED & row.keys():
        what = f"{where} has a column {name!r}, the name under which rewards get what the policy answered"
        raise ConfigError(f"{what}; rename the column, for example to 'answer'")
    for reward in rewards:
        for name in reward.signature.given & row.keys():
            what = f"reward {reward.name!r} asks for {name!r} of the policy's answer, but {where} has a column of that name"
            raise ConfigError(f"{what}; rename the column")
        for name in reward.signature.required:
            if name not in row:
                what = f"reward {reward.name!r} takes {name!r}, which {where} does not have (it has: {', '.join(row)})"
                fix = f"set reward.options.{reward.name}.{name}, or give the parameter {name} a default value"
                raise ConfigError(f"{what}; add the column to every row, {fix}")


def _names(sources: list[Source]) -> list[str]:
    """A unique name for each source, after its file, dataset or built-in task."""
    names: list[str] = []
    for text, *_ in sources:
        name = Path(str(text).rpartition(":")[2]).stem if isinstance(text, str | Path) else "tasks"
        number = sum(other.partition("#")[0] == name for other in names)
        names.append(f"{name}#{number + 1}" if number else name)
    return names
