"""metrics.jsonl across a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from headrace.observe.sinks import JsonLines, TensorBoard, read_metrics

if TYPE_CHECKING:
    from pathlib import Path


def versions(path: Path) -> list[int]:
    return [row["version"] for row in read_metrics(path)]


def test_rows_past_the_restored_version_go_and_new_ones_follow(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"version": 1}\n{"version": 2}\n{"version": 3}\n{"vers')
    sink = JsonLines(path, restored=2)
    sink.write(3, {"loss": 0.5})
    sink.close()
    assert versions(path) == [1, 2, 3] and [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("method", ["write_text", "replace"])
def test_a_rewrite_that_fails_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A full disk, or a kill at any moment: the file is the old one or the new one, never part of either."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"version": 1}\n{"version": 2}\n{"version": 3}\n')

    def full(self: Path, *_: object, **__: object) -> None:
        self.open("w").close()
        raise OSError("No space left on device")

    monkeypatch.setattr(type(path), method, full)
    with pytest.raises(OSError, match="No space"):
        JsonLines(path, restored=2)
    assert versions(path) == [1, 2, 3]


def test_a_table_of_rollouts_keeps_its_cells_whatever_they_hold(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path)
    sink.write_table(3, [{"prompt": "1|2", "completion": "a\n<b> & c", "reward": 0.123456}])
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (shown,) = events.Tensors("rollouts/text_summary")
    lines = shown.tensor_proto.string_val[0].decode().splitlines()
    assert shown.step == 3 and lines[0] == "| prompt | completion | reward |"
    assert lines[2] == "| 1&#124;2 | a<br>&lt;b> &amp; c | 0.1235 |"
