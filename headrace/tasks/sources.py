"""Sources of tasks (lists of rows, files, datasets, generated tasks), and the stream of a run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headrace.records import NOT_VARIABLES, Plain, check_messages, check_plain, is_template_variable
from headrace.tasks import pushed, reasoning_gym, sort_digits
from headrace.tasks.files import read_rows
from headrace.tasks.settings import TaskError, TaskSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Row = dict[str, Plain]
Prepare = Callable[[Any, str], Row | None]


@dataclass(frozen=True)
class Task:
    """A row and where it came from."""

    row: Row
    source: str = ""
    """The name of its source."""
    index: int = -1
    """Its place in the source: of a finite list, the row's number however often the list is repeated."""


class TaskSource(Protocol):
    """Rows by number; the same (seed, split, number) always gives the same row."""

    def row(self, index: int) -> Row:
        """Row `index` of an endless sequence."""


class RowSource:
    """A finite list, repeated forever and reshuffled each epoch."""

    def __init__(self, rows: Iterable[Any], *, name: str, seed: int, prepare: Prepare | None = None) -> None:
        """`prepare` gets each row and its name for errors, and returns the row to use, or None to drop it."""
        self.name: str = name
        prepared = [(prepare or check_row)(row, f"{name}: row {number}") for number, row in enumerate(rows)]
        self.rows: list[Row] = [row for row in prepared if row is not None]
        if not self.rows:
            raise TaskError(f"{name}: there are no tasks in it" + f"; map dropped all {len(prepared)}" * bool(prepared))
        self._seed = seed
        self._epoch, self._order = -1, np.arange(len(self.rows))

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Row:
        return self.rows[self.number(index)]

    def number(self, index: int) -> int:
        """Which row of the list is at `index` of the endless sequence."""
        epoch, place = divmod(index, len(self.rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self.rows))
        return int(self._order[place])


class TaskStream:
    """An endless, resumable mix. (seed, position) decides at random which source is next; each source has its own order."""

    def __init__(self, sources: Mapping[str, tuple[TaskSource, float]], *, seed: int) -> None:
        """`sources`: by name, each with its weight."""
        self.names, self.sources = list(sources), [source for source, _ in sources.values()]
        weights = np.array([weight for _, weight in sources.values()], dtype=np.float64)
        self._edges = np.cumsum(weights / weights.sum())
        self._seed = seed
        self._counts = [0] * len(self.sources)

    @property
    def position(self) -> int:
        return sum(self._counts)

    def next(self) -> Task:
        which = 0
        if len(self.sources) > 1:
            number = np.random.default_rng((self._seed, self.position)).random()
            which = min(int(np.searchsorted(self._edges, number, side="right")), len(self.sources) - 1)
        source, index = self.sources[which], self._counts[which]
        self._counts[which] += 1
        return self.get(self.names[which], source.number(index) if isinstance(source, RowSource) else index)

    def get(self, name: str, index: int) -> Task:
        """A task by the name of its source and its place there."""
        source = self.sources[self.names.index(name)]
        return Task(source.rows[index] if isinstance(source, RowSource) else source.row(index), name, index)

    def has(self, name: str, index: int) -> bool:
        """Whether `get` finds it; rows may have been removed since a checkpoint."""
        source = self.sources[self.names.index(name)] if name in self.names else None
        return source is not None and (not isinstance(source, RowSource) or index < len(source))

    def report(self, number: int, task: Task, rewards: list[float]) -> None:
        """Group `number` of `task` has ended. The order does not depend on it; a sampler's does."""

    def hand_over(self) -> None:
        """A version is trained: a sampler learns of all that was reported."""

    def state(self) -> list[int]:
        """Rows taken from each source: all that a checkpoint needs."""
        return list(self._counts)

    def restore(self, counts: list[int]) -> None:
        assert len(counts) == len(self.sources)
        self._counts = list(counts)


_GENERATORS: dict[str, tuple[Callable[..., TaskSource], Callable[[str], Callable[..., float | None] | None]]] = {
    "builtin": (sort_digits.open_source, sort_digits.reward_of),
    "pushed": (pushed.open_source, pushed.reward_of),
    "reasoning_gym": (reasoning_gym.ReasoningGym, reasoning_gym.reward_of),
}
"""Generated tasks, by the prefix of their name: functions from the name to its source, and to its reward, if it has one."""


def open_source(
    source: object,
    *,
    seed: int,
    split: str,
    function: Callable[[Row], Row | None] | None = None,
    is_sft: bool = False,
    settings: TaskSettings | None = None,
    options: dict[str, Any] | None = None,
) -> TaskSource:
    """Open generated tasks, a file, a folder, a dataset, or rows. `split` is train or held_out; `function` is the one that
    `settings.map` names. With `is_sft` rows need not be tasks: a chat to learn from will do."""
    settings = settings or TaskSettings(source="", options=options or {})
    prefix, name = _split_name(source)

    def prepare(row: object, where: str) -> Row | None:
        row = _transformed(row, where, settings, function)
        return None if row is None else check_row(row, where, is_sft=is_sft)

    if prefix in _GENERATORS:
        for key in ("split", "config", "revision"):
            if given := getattr(settings, key):
                raise TaskError(f"tasks: {source}: {key} = {given!r}: generated tasks have none; leave it out")
        generated = _GENERATORS[prefix][0](name, seed=seed, split=split, options=settings.options)
        if settings.limit:
            rows = (generated.row(index) for index in range(settings.limit))
            return RowSource(rows, name=str(source), seed=seed, prepare=prepare)
        for key in ("columns", "map", "system_prompt"):
            if getattr(settings, key) or (key == "map" and function is not None):
                raise TaskError(f"tasks: {source}: generated tasks have no end and take no {key}; set limit, such as 10000")
        return generated
    if settings.options:
        what = f"only built-in and reasoning-gym tasks have options, not {', '.join(settings.options)}"
        raise TaskError(f"tasks: {source}: {what}")
    named = str(source) if isinstance(source, str | Path) else "tasks"
    return RowSource(read_rows(source, settings), name=named, seed=seed, prepare=prepare)


def builtin_reward(source: object) -> Callable[..., float | None] | None:
    """The reward that comes with a source; None if it has none."""
    prefix, name = _split_name(source)
    return _GENERATORS[prefix][1](name) if prefix in _GENERATORS else None


def is_generated(source: object) -> bool:
    """Whether a source is made by a program and has no end."""
    return _split_name(source)[0] in _GENERATORS


def _split_name(source: object) -> tuple[str, str]:
    prefix, _, name = source.partition(":") if isinstance(source, str) else ("", "", "")
    return prefix, name


def _transformed(row: Any, where: str, settings: TaskSettings, function: Callable[[Row], Any] | None) -> Any:  # noqa: ANN401
    """The row after `columns`, `map` and `system_prompt`; None if `map` drops it. What is not a row is refused later."""
    if not isinstance(row, dict):
        return row
    for ours, theirs in settings.columns.items():
        if theirs not in row:
            has = ", ".join(map(str, row)) or "nothing"
            raise TaskError(f"{where} has no column {theirs!r} for columns.{ours}; it has: {has}")
    renamed = {ours: row[theirs] for ours, theirs in settings.columns.items()}
    row = {name: value for name, value in row.items() if name not in settings.columns.values()} | renamed
    if function is not None:
        try:
            row = function(copy.deepcopy(row))  # sources are opened several times: it must not change what they hold
        except Exception as error:
            raise TaskError(f"{where}: map raised {type(error).__name__}: {error}") from error
        if row is None:
            return None
        if not isinstance(row, dict):
            raise TaskError(f"{where}: map returned a {type(row).__name__}; return the row, or None to drop it")
    if settings.system_prompt:
        chat = "messages" if "prompt" not in row else "prompt"
        messages = [{"role": "user", "content": row[chat]}] if isinstance(row.get(chat), str) else row.get(chat)
        if isinstance(messages, list) and messages and isinstance(messages[0], dict) and messages[0].get("role") != "system":
            row = row | {chat: [{"role": "system", "content": settings.system_prompt}, *messages]}
    return row


def check_row(row: Any, where: str, *, is_sft: bool = False) -> Row:  # noqa: ANN401
    """The row, if it is one; raises `TaskError` otherwise."""
    if not isinstance(row, dict):
        raise TaskError(f"{where} is a {type(row).__name__}, not a dict of columns")
    chat = "messages" if is_sft and "prompt" not in row else "prompt"
    if chat not in row:
        has, fix = ", ".join(map(str, row)) or "nothing", 'columns = { prompt = "…" } renames one'
        raise TaskError(f"{where} has no {'prompt'!r} column{' nor messages' * is_sft}; it has: {has} ({fix})")
    variables = row.get("chat_template_kwargs")
    if not isinstance(variables, dict | None):
        raise TaskError(f"{where}: 'chat_template_kwargs' must be a dict of variables of the chat template")
    for name in variables or ():
        if not is_template_variable(str(name)):
            what = f"chat_template_kwargs has {name!r}, which is no variable that a row may set"
            raise TaskError(f"{where}: {what} (nor are {', '.join(NOT_VARIABLES)})")
    prompt = row[chat]
    is_chat = isinstance(prompt, list) and all(isinstance(m, dict) and "role" in m and "content" in m for m in prompt)
    if not prompt or not (is_chat or (isinstance(prompt, str) and chat == "prompt")):
        kinds = "text or a list" if chat == "prompt" else "a list"
        raise TaskError(f"{where}: {chat!r} must be {kinds} of messages with role and content, and not empty")
    try:
        check_plain(row, where=where)
        if is_chat:
            check_messages(prompt)
    except ValueError as error:
        raise TaskError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error
    return row
