"""The small files in a run's folder."""

from __future__ import annotations

import logging
from pathlib import Path

from headrace.config import make_recipe
from headrace.launch.folder import find_folder, logged, prepare_folder, set_aside, write_summary


def test_a_launcher_log_keeps_its_last_lines_and_never_grows_without_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("headrace.launch.folder._MAX_LOG", 10_000)
    with logged(tmp_path):
        for number in range(1000):
            logging.getLogger("headrace").warning("g%d/0 is failed: the reward raised", number)
    logs = sorted((tmp_path / "logs").iterdir())
    assert [log.name for log in logs] == ["launcher.log", "launcher.log.1"]
    assert sum(log.stat().st_size for log in logs) <= 20_000 and "g999/0" in logs[0].read_text()


def test_a_run_set_aside_is_not_picked_up_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, folder = make_recipe({"tasks": [{"source": "builtin:sort_digits"}]}), Path("runs/sort-20260101-000000")
    prepare_folder(folder, recipe, recipe_text="", inputs={})
    write_summary(folder, {"status": "interrupted", "version": 3})

    def found() -> tuple[Path, bool]:
        place, comparison, _ = find_folder("sort", recipe, inputs={}, run_dir=None, fresh=False)
        return place, comparison is not None

    assert found() == (folder, True)
    old = set_aside(folder)
    place, is_resumed = found()
    assert place not in (folder, old) and not is_resumed


def test_a_new_run_beside_an_unfinished_one_says_what_differs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"tasks": [{"source": "builtin:sort_digits"}]}
    for index, status in enumerate(("interrupted", "finished")):
        folder = Path(f"runs/sort-20260101-00000{index}")
        prepare_folder(folder, make_recipe(settings), recipe_text="", inputs={})
        write_summary(folder, {"status": status, "version": 3})
    other = make_recipe({**settings, "train.learning_rate": 0.5})
    place, comparison, (note,) = find_folder("sort", other, inputs={}, run_dir=None, fresh=False)
    assert not place.exists() and comparison is None
    assert "runs/sort-20260101-000000 has other settings: train.learning_rate was" in note and note.endswith("is 0.5")
    assert find_folder("sort", other, inputs={}, run_dir=None, fresh=True)[2] == []
