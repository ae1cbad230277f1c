"""The small files in a run's folder."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headrace.launch.folder import logged

if TYPE_CHECKING:
    from pathlib import Path


def test_a_launcher_log_keeps_its_last_lines_and_never_grows_without_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("headrace.launch.folder._MAX_LOG", 10_000)
    with logged(tmp_path):
        for number in range(1000):
            logging.getLogger("headrace").warning("g%d/0 is failed: the reward raised", number)
    logs = sorted((tmp_path / "logs").iterdir())
    assert [log.name for log in logs] == ["launcher.log", "launcher.log.1"]
    assert sum(log.stat().st_size for log in logs) <= 20_000 and "g999/0" in logs[0].read_text()
