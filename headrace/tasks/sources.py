"""Sources of tasks (lists of rows, JSONL and parquet files, `datasets.Dataset`, generated tasks), and the stream of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headrace.records import Plain, check_messages, check_plain
from headrace.tasks import reasoning_gym, sort_digits
from headrace.tasks.settings import TaskError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Row = dict[str, Plain]


class TaskSource(Protocol):
    """Rows by number; the same (seed, split, number) always gives the same row."""

    def row(self, index: int) -> Row:
        """Row `index` of an endless sequence."""


class RowSource:
    """A finite list, repeated forever and reshuffled each epoch."""

    def __init__(self, rows: Iterable[Any], *, name: str, seed: int) -> None:
        self.name: str = name
        self.rows: list[Row] = [_checked(row, f"{name}: row {number}") for number, row in enumerate(rows)]
        if not self.rows:
            raise TaskError(f"{name}: there are no tasks in it")
        self._seed = seed
        self._epoch, self._order = -1, np.arange(len(self.rows))

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Row:
        epoch, place = divmod(index, len(self.rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self.rows))
        return self.rows[int(self._order[place])]


class TaskStream:
    """An endless, resumable mix. (seed, position) decides at random which source is next; each source has its own order."""

    def __init__(self, sources: Sequence[tuple[TaskSource, float]], *, seed: int) -> None:
        self.sources = [source for source, _ in sources]
        weights = np.array([weight for _, weight in sources], dtype=np.float64)
        self._edges = np.cumsum(weights / weights.sum())
        self._seed = seed
        self._counts = [0] * len(self.sources)

    @property
    def position(self) -> int:
        return sum(self._counts)

    def next(self) -> Row:
        which = 0
        if len(self.sources) > 1:
            number = np.random.default_rng((self._seed, self.position)).random()
            which = min(int(np.searchsorted(self._edges, number, side="right")), len(self.sources) - 1)
        row = self.sources[which].row(self._counts[which])
        self._counts[which] += 1
        return row

    def state(self) -> list[int]:
        """Rows taken from each source: all that a checkpoint needs."""
        return list(self._counts)

    def restore(self, counts: list[int]) -> None:
        assert len(counts) == len(self.sources)
        self._counts = list(counts)


_GENERATORS: dict[str, tuple[Callable[..., TaskSource], Callable[[str], Callable[..., float | None]]]] = {
    "builtin": (sort_digits.open_source, sort_digits.reward_of),
    "reasoning_gym": (reasoning_gym.ReasoningGym, reasoning_gym.reward_of),
}
"""Generated tasks, by the prefix of their name: functions from the name to its source, and to its reward."""


def open_source(source: object, *, seed: int, split: str, options: dict[str, Any] | None = None) -> TaskSource:
    """Open `builtin:NAME`, `reasoning_gym:NAME`, a file, a list of dicts or a Dataset. `split` is train or held_out."""
    prefix, name = _split_name(source)
    if prefix in _GENERATORS:
        return _GENERATORS[prefix][0](name, seed=seed, split=split, options=options or {})
    if options:
        raise TaskError(f"tasks: {source}: only built-in and reasoning-gym tasks have options, not {', '.join(options)}")
    if isinstance(source, str | Path):
        return RowSource(_read(Path(source)), name=str(source), seed=seed)
    if not hasattr(source, "__iter__"):
        raise TaskError(f"tasks: a {type(source).__name__} is not a list of rows, a file or a Dataset")
    return RowSource(source, name="tasks", seed=seed)


def builtin_reward(source: object) -> Callable[..., float | None] | None:
    """The reward that comes with a source; None if it has none."""
    prefix, name = _split_name(source)
    return _GENERATORS[prefix][1](name) if prefix in _GENERATORS else None


def _split_name(source: object) -> tuple[str, str]:
    prefix, _, name = source.partition(":") if isinstance(source, str) else ("", "", "")
    return prefix, name


def _read(path: Path) -> list[Any]:
    if not path.is_file():
        raise TaskError(f"tasks: {path}: no such file (paths are relative to {Path.cwd()})")
    rows: list[Any] = []
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise TaskError(f"tasks: {path}: reading parquet needs `pip install headrace[parquet]`") from error
        rows = parquet.read_table(path).to_pylist()
    elif path.suffix in (".jsonl", ".json"):
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except json.JSONDecodeError as error:
                raise TaskError(f"{path}:{number}: not JSON: {error}") from error
    else:
        raise TaskError(f"tasks: {path}: must be a .jsonl or .parquet file")
    return rows


def _checked(row: Any, where: str) -> Row:  # noqa: ANN401
    if not isinstance(row, dict):
        raise TaskError(f"{where} is a {type(row).__name__}, not a dict of columns")
    if "prompt" not in row:
        raise TaskError(f"{where} has no 'prompt' column; it has: {', '.join(map(str, row)) or 'nothing'}")
    prompt = row["prompt"]
    is_chat = isinstance(prompt, list) and all(isinstance(m, dict) and "role" in m and "content" in m for m in prompt)
    if not prompt or not (isinstance(prompt, str) or is_chat):
        raise TaskError(f"{where}: 'prompt' must be text or a list of messages with role and content, and not empty")
    try:
        check_plain(row, where=where)
        if is_chat:
            check_messages(prompt)
    except ValueError as error:
        raise TaskError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error
    return row
