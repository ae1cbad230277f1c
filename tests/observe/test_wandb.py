"""Metrics in W&B, whose place a few lines take: the real one starts a process."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from headrace.observe.sinks import open_sinks

ROWS = [{"prompt": "1+1", "completion": "2|3\n<b>", "reward": 0.5}, {"prompt": "2", "completion": "", "reward": 1.0}]


class Run:
    """What is done with a run of W&B."""

    def __init__(self, **settings) -> None:
        self.settings = settings
        self.rows: list[dict] = []
        self.axes: list[tuple] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, row: dict) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        pass


@pytest.fixture
def runs(monkeypatch) -> list[Run]:
    """Those begun, in the place of W&B's."""
    begun: list[Run] = []

    def init(**settings) -> Run:
        begun.append(Run(**settings))
        return begun[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Table=lambda **given: given))
    for name in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    return begun


def opened(folder, *, restored: int | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    sinks = open_sinks(("wandb",), folder, restored=restored, config={"steps": 5, "train": {"batch": 8}})
    for sink in sinks:
        sink.write(3, {"reward": 0.5, "note": "text"})
        sink.close()


def test_folders_of_one_name_are_runs_of_their_own_and_a_resumed_one_goes_on(runs: list[Run], tmp_path) -> None:
    for place, restored in (("a", None), ("b", None), ("a", 2), ("a", None)):
        opened(tmp_path / place / "seed0", restored=restored)
    first, other, resumed, anew = (run.settings["id"] for run in runs)
    assert first == resumed and len({first, other, anew}) == 3
    assert {run.settings["name"] for run in runs} == {"seed0"} and {run.settings["resume"] for run in runs} == {"allow"}


def test_the_project_is_the_users_and_the_config_the_recipe(runs: list[Run], tmp_path, monkeypatch) -> None:
    opened(tmp_path / "run")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    opened(tmp_path / "other")
    assert [run.settings["project"] for run in runs] == ["headrace", "mine"]
    assert runs[0].settings["config"] == {"steps": 5, "train": {"batch": 8}}


def test_versions_are_the_axis_so_that_those_trained_again_are_shown(runs: list[Run], tmp_path) -> None:
    opened(tmp_path / "run")
    assert runs[0].axes == [("version", None), ("*", "version")] and runs[0].rows == [{"version": 3, "reward": 0.5}]


def test_rollouts_are_a_table_of_their_version(runs: list[Run], tmp_path) -> None:
    _, sink = open_sinks(("wandb",), tmp_path, restored=None, config={})
    sink.write_table(4, ROWS)
    table = {"columns": ["prompt", "completion", "reward"], "data": [["1+1", "2|3\n<b>", 0.5], ["2", "", 1.0]]}
    assert runs[0].rows == [{"version": 4, "rollouts": table}]


def test_the_real_one_takes_what_it_is_given(tmp_path, monkeypatch) -> None:
    import wandb

    settings = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_PROJECT": "mine"}
    folders = {name: str(tmp_path / name) for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")}
    for name, value in {**settings, **folders}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "seed0").mkdir()
    try:
        _, sink = open_sinks(("wandb",), tmp_path / "seed0", restored=None, config={"train": {"batch": 8}})
        run = wandb.run
        assert (run.project, run.name, run.config["train"]) == ("mine", "seed0", {"batch": 8})
        sink.write(3, {"reward": 0.5})
        assert run.summary["reward"] == 0.5 and run.summary["version"] == 3
        sink.write_table(3, ROWS)
        assert run.summary["rollouts"]["nrows"] == 2
        sink.close()
    finally:
        wandb.teardown()
    assert list((tmp_path / "seed0" / "wandb").glob(f"offline-run-*-{run.id}"))
