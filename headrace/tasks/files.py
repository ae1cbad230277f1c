"""Reads rows from files, folders, the Hugging Face hub, pandas and `datasets`."""

from __future__ import annotations

import csv
import functools
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.tasks.settings import TaskError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.tasks.settings import TaskSettings

HUB = "hub:"
_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_LONGEST_CELL = 2**31 - 1


def is_hub_name(source: object) -> bool:
    """Whether `source` names a dataset of the hub: with the prefix, or because it looks like neither a file nor a folder."""
    if not isinstance(source, str) or source.startswith(HUB):
        return isinstance(source, str)
    is_path = source.startswith((".", "/", "~")) or source.endswith(_SUFFIXES) or source.count("/") > 1
    return bool(source) and not is_path and not Path(source).exists()


def read_rows(source: Any, settings: TaskSettings) -> Iterable[Any]:  # noqa: ANN401
    """The rows of anything but generated tasks, at most `settings.limit`, as they are."""
    path = Path(source) if isinstance(source, str | Path) and not is_hub_name(source) else None
    if path is None and isinstance(source, str):
        name, which = source.removeprefix(HUB), (settings.config, settings.split, settings.revision)
        return _load_dataset(source, name, *which, settings.limit)
    folder = path if path is not None and path.is_dir() else None
    for name in ("revision",) if folder else ("split", "config", "revision"):
        if given := getattr(settings, name):
            shown = source if isinstance(source, str | Path) else f"a {type(source).__name__}"
            why = f"only datasets of the hub{' and folders' * (name != 'revision')} have one"
            raise TaskError(f"tasks: {shown}: {name} = {given!r}: {why}; leave it out")
    if folder:
        stamp = max((file.stat().st_mtime_ns for file in folder.rglob("*")), default=0)
        return _load_dataset(str(folder), str(folder), settings.config, settings.split, "", settings.limit, stamp=stamp)
    rows = _read_object(source, limit=settings.limit) if path is None else _read_file(path)
    return itertools.islice(rows, settings.limit) if settings.limit else rows


def _read_object(source: Any, *, limit: int) -> Iterable[Any]:  # noqa: ANN401
    """Objects of pandas and `datasets` are known by what they have, since neither package need be installed."""
    kinds = {kind.__name__ for kind in type(source).__mro__}
    if "DataFrame" in kinds:
        try:
            import pyarrow
        except ImportError as error:
            raise TaskError("tasks: a DataFrame: reading it needs `pip install headrace[parquet]`") from error
        try:
            return list(pyarrow.Table.from_pandas(source, preserve_index=False).to_pylist())
        except pyarrow.ArrowException as error:
            raise TaskError(f"tasks: a DataFrame: {error}; give each column values of one type") from error
    if kinds & {"DatasetDict", "IterableDatasetDict"}:
        raise TaskError(f"tasks: a {type(source).__name__} has the splits {', '.join(source)}; pass one, such as data['train']")
    if "IterableDataset" in kinds and not limit:
        raise TaskError("tasks: an IterableDataset may have no end; pass {'source': data, 'limit': 10_000}")
    if isinstance(source, dict) or not hasattr(source, "__iter__"):
        what = "a list of rows, a file, the name of a dataset, a DataFrame or a Dataset"
        raise TaskError(f"tasks: a {type(source).__name__} is not {what}")
    rows: Iterable[Any] = source
    return rows


def _read_file(path: Path) -> list[Any]:
    if path.suffix not in _SUFFIXES:
        raise TaskError(f"tasks: {path}: must be a {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]} file, or a folder of them")
    if not path.is_file():
        raise TaskError(f"tasks: {path}: no such file (paths are relative to {Path.cwd()})")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise TaskError(f"tasks: {path}: reading parquet needs `pip install headrace[parquet]`") from error
        return list(parquet.read_table(path).to_pylist())
    if path.suffix == ".csv":
        return _read_csv(path)
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".json" and text.lstrip()[:1] == "[":
        try:
            return list(json.loads(text))
        except json.JSONDecodeError as error:
            raise TaskError(f"{path}:{error.lineno}: not JSON: {error}") from error
    rows: list[Any] = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise TaskError(f"{path}:{number}: not JSON: {error}") from error
    return rows


def _read_csv(path: Path) -> list[Any]:
    """Every value is text, as in the file."""
    csv.field_size_limit(_LONGEST_CELL)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        rows = []
        try:
            for row in reader:
                if None in row or None in row.values():
                    wanted = len(reader.fieldnames or ())
                    raise TaskError(f"{path}:{reader.line_num}: must have {wanted} cells, like the first line")
                rows.append(row)
        except csv.Error as error:
            raise TaskError(f"{path}:{reader.line_num}: not CSV: {error}") from error
    return rows


@functools.lru_cache(maxsize=8)
def _load_dataset(source: str, name: str, config: str, split: str, revision: str, limit: int, *, stamp: int = 0) -> list[Any]:
    """Of the hub or a folder. Remembered, because a run opens its sources several times; `stamp` notices an edited folder."""
    try:
        import datasets
    except ImportError as error:
        raise TaskError(f"tasks: {source}: datasets of the hub and folders need `pip install headrace[datasets]`") from error
    try:
        found = datasets.load_dataset(name, config or None, split=split or "train", revision=revision or None)
    except datasets.exceptions.DatasetNotFoundError as error:
        here = f"no file or folder of that name is in {Path.cwd()}, and the hub has no such dataset"
        at = f" at revision {revision!r}" if revision else ""
        raise TaskError(f"tasks: {source}: {here}{at}, or none that you may read; `hf auth login` gives access") from error
    except Exception as error:  # a download can fail in many ways
        problem = " ".join(str(error).split())[:600] or type(error).__name__
        fix = next((f"; set {name} to one of them" for name in ("split", "config") if name in str(error).lower()), "")
        raise TaskError(f"tasks: {source}: {problem}{fix}") from error
    return list((found.select(range(min(limit, len(found)))) if limit else found).to_list())
