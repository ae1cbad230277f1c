"""Where metrics go. A sink that fails (a full disk, a service that is down) is dropped with a message."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from typing import TYPE_CHECKING, Any, Protocol

from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class Sink(Protocol):
    """Receives flat metrics once per version, and once per evaluation, which may end after later versions."""

    def write(self, version: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: one object per version and one per evaluation, whole lines only."""

    def __init__(self, path: Path, *, restored: int | None) -> None:
        """`restored`: the version a run resumes from; later rows are removed, since they will be written again."""
        if path.exists():
            kept = [row for row in read_lines(path) if restored is not None and row["version"] <= restored]
            temporary = path.with_name(f".{path.name}.tmp")  # a kill or a full disk here loses no row
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
            temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, version: int, metrics: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"version": version, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(self, version: int, metrics: Mapping[str, Any]) -> None:
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, version)

    def write_table(self, version: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """As Markdown, which TensorBoard renders under "Text"."""
        lines = [list(rows[0]), ["---"] * len(rows[0]), *([_markdown(value) for value in row.values()] for row in rows)]
        self._writer.add_text("rollouts", "\n".join(f"| {' | '.join(cells)} |" for cells in lines), version)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run named after the folder, which stores its id: a resumed run continues it, a fresh one starts another."""

    def __init__(self, folder: Path, *, config: Mapping[str, Any], is_resumed: bool) -> None:
        import wandb

        kept = folder / "wandb_id"
        if not (is_resumed and kept.exists()):
            kept.write_text(uuid.uuid4().hex, encoding="utf-8")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "headrace",
            name=os.environ.get("WANDB_NAME") or folder.name,
            dir=str(folder),
            id=kept.read_text(encoding="utf-8"),
            resume="allow",
            config=dict(config),
        )
        # W&B's own step can only rise, but a resumed run logs the versions after its checkpoint again.
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")

    def write(self, version: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"version": version, **_numbers(metrics)})

    def write_table(self, version: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table for each version: W&B shows the newest, and the others with the slider."""
        import wandb

        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({"version": version, "rollouts": table})

    def close(self) -> None:
        self._run.finish()


def _numbers(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def _markdown(value: object) -> str:
    """A cell of a table: neither a `|` nor the end of a line ends it, and no tag of a completion is taken for HTML."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    for sign, shown in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("\n", "<br>")):
        text = text.replace(sign, shown)
    return text


def remove_oldest(files: Sequence[Path], *, max_bytes: int) -> int:
    """Remove files, the first ones first, until the others have at most `max_bytes`. Returns the bytes left."""
    sizes = [file.stat().st_size for file in files]
    total = sum(sizes)
    for file, size in zip(files, sizes, strict=True):
        if total > max_bytes:
            file.unlink()
            total -= size
    return total


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """A row per version, with its held-out metrics if it was evaluated; a line truncated by a crash is skipped."""
    rows: dict[int, dict[str, Any]] = {}
    for row in read_lines(path):
        rows.setdefault(row["version"], {}).update(row)
    return list(rows.values())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Each line of a .jsonl file as it was written."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def open_sinks(names: tuple[str, ...], folder: Path, *, restored: int | None, config: Mapping[str, Any]) -> list[Sink]:
    """metrics.jsonl, and the sinks in `observe.sinks`. `config`: the recipe, for sinks that show it."""
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", restored=restored)]
    for name in names:
        try:
            if name == "tensorboard":
                sinks.append(TensorBoard(folder))
            else:
                sinks.append(WeightsAndBiases(folder, config=config, is_resumed=restored is not None))
        except ImportError as error:
            raise ConfigError(f"observe.sinks: {name!r} needs `pip install headrace[{name}]` ({error})") from error
        except Exception as error:
            how = "; `wandb login`, or set WANDB_MODE=offline" if name == "wandb" else ""
            raise ConfigError(f"observe.sinks: {name!r} cannot be opened: {type(error).__name__}: {error}{how}") from error
    return sinks
