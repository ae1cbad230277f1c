"""What may change when a run is resumed: the table in docs/orchestration.md, row by row."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers import TASKS, books_close, small_run
from test_runs import run_and_kill
from test_unfinished import LONG_TAIL, note_generated, saved
from test_unfinished_processes import SLOW

from headrace.config import make_recipe
from headrace.launch.folder import FolderLock, compare, prepare_folder, rescue_folder, set_aside, write_summary
from headrace.model import ModelSettings
from headrace.model.tiny import build_folder
from headrace.observe.sinks import read_metrics
from headrace.score import RewardError
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.launch import RunResult

ROOT = Path(__file__).parents[2]


def shorter(prompt: str, completion: str, **_: object) -> float:
    return 1.0 / (1 + len(completion))


def mended(prompt: str, completion: str, **_: object) -> float:
    return 2.0 / (2 + len(completion))


mended.__name__ = "shorter"

BASE: dict[str, Any] = {
    **LONG_TAIL,
    "model": {"path": "./model", "context": 128},
    "recipe": "recipe.toml",
    "tasks": None,
    "reward": shorter,
    "train": {"batch": 8, "group_size": 2, "schedule": "linear"},
    "steps": 4,
    "staleness": {"max_lag": 4},
    "checkpoint": {"every": 2},
}


def resume(**changes: Any) -> RunResult:
    """Run BASE in `run`, with changes by dotted key or argument."""
    settings = {key: dict(value) if isinstance(value, dict) else value for key, value in BASE.items()}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            settings.setdefault(section, {})[name] = value
        else:
            settings[key] = value
    return small_run(Path("run"), **{"quiet": False, **settings})


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run killed after version 3, with a checkpoint of version 2 and rollouts in flight."""
    place = tmp_path_factory.mktemp("killed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        build_folder(Path("model"), ModelSettings(hidden_size=32, num_heads=1, num_layers=1), seed=0)
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TASKS))
        Path("recipe.toml").write_text('[[tasks]]\nsource = "rows.jsonl"\n')
        run_and_kill(Path("run"), patch, at=3, **BASE)
    return place


@pytest.fixture
def copied(killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A copy of the killed run to resume, in the working directory."""
    shutil.copytree(killed, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    yield


@pytest.fixture
def finished(copied: None) -> None:
    resume(quiet=True)


def edit_rows() -> None:
    rows = Path("rows.jsonl")
    rows.write_text(rows.read_text().replace("11", "12"))


def edit_model() -> None:
    weights = Path("model/model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def move_inputs() -> None:
    Path("rows.jsonl").rename("moved.jsonl")
    Path("recipe.toml").write_text('[[tasks]]\nsource = "moved.jsonl"\n')


def forget_inputs() -> None:
    """As a version of Headrace left it that kept no record of inputs and hashed settings otherwise."""
    Path("run/inputs.json").unlink()
    for file in (Path("run/summary.json"), Path("run/checkpoints/step-2/manifest.json")):
        file.write_text(json.dumps({**json.loads(file.read_text()), "config_hash": "of-old"}))


RESUMES: dict[str, tuple[Callable[[], None] | None, dict[str, Any], list[str]]] = {
    "nothing": (None, {}, []),
    "`engine.slots`": (None, {"engine__slots": 3}, ["engine.slots was 24, is 3"]),
    "`engine.kv_blocks`, `engine.block_size`": (
        None,
        {"engine__kv_blocks": 64, "engine__block_size": 8},
        ["engine.block_size was 16, is 8, engine.kv_blocks was 0, is 64"],
    ),
    "`train.micro_batch_tokens`": (
        None, {"train__micro_batch_tokens": 64}, ["train.micro_batch_tokens was 16384, is 64"],
    ),
    "`threads`, `device`": (None, {"threads": 2, "device": "cpu"}, ["device was 'auto', is 'cpu', threads was 1, is 2"]),
    "`evaluate.every`, `evaluate.beside`, `checkpoint.every`, `[observe]`": (
        None,
        {"evaluate__every": 2, "checkpoint__every": 1, "observe__trace": False},
        ["checkpoint.every was 2, is 1, evaluate.every was 0, is 2", "observe.trace was True, is False"],
    ),
    "timeouts, restarts, `[sync]`": (
        None,
        {"heartbeat": 9.0, "engine__restarts": 1, "sync__patience": 1.0, "deadline": 99.0},
        ["deadline was 600.0, is 99.0", "engine.restarts was 3, is 1", "heartbeat was 60.0, is 9.0", "sync.patience"],
    ),
    "`steps`, to more": (None, {"steps": 5}, ["steps was 4, is 5"]),
    "`steps`, to more, with a decaying learning rate": (
        None,
        {"steps": 8},
        ["the linear schedule now ends at version 8: the learning rate was 0.00075 at version 2, and is 0.00075 at version 3"],
    ),
    "a reward's code": (None, {"reward": mended}, ["reward 'shorter' has changed since version 2"]),
    "the path of tasks or model, with the same content": (
        move_inputs, {}, ["tasks.0.source was 'rows.jsonl', is 'moved.jsonl'"],
    ),
    "`inputs.json`, if the folder has none": (forget_inputs, {"engine__slots": 3}, ["engine.slots was 24, is 3"]),
    "tasks, with `--resume-anyway`": (
        edit_rows, {"resume_anyway": True}, ["the content of tasks.0.source = 'rows.jsonl' has changed since version 2"],
    ),
    "the model's files, with `--resume-anyway`": (
        edit_model, {"resume_anyway": True}, ["the content of model.path = './model' has changed since version 2"],
    ),
}  # fmt: skip
"""What changed -> (edits, settings, what is said)."""


@pytest.mark.parametrize("row", RESUMES)
def test_it_resumes_and_says_what_changed(copied: None, row: str, capsys, monkeypatch) -> None:
    edit, changes, said = RESUMES[row]
    if edit is not None:
        edit()
    groups = saved(Path("run"), 2)
    kept = {rollout.id for group in groups for rollout in group["rollouts"]}
    kept |= {episode.id for group in groups for episode in group["episodes"]}
    begun = note_generated(monkeypatch)
    result = resume(**changes)
    output = capsys.readouterr().out
    assert "resumed    version 2 of" in output and all(each in output for each in said), output
    assert ("changed    " in output) == bool(said)
    assert result.summary["status"] == "finished" and result.summary["version"] == changes.get("steps", 4)
    assert books_close(result.summary) and result.summary["accounting"]["trained"] == 8 * changes.get("steps", 4)
    assert len(kept) > 3 and not kept & {*begun}, "what was in flight goes on"
    with pytest.raises(ConfigError, match="versions already"):  # and nothing has to be said twice
        resume(**{**changes, "resume_anyway": False})


REFUSED: dict[str, tuple[Callable[[], None] | None, dict[str, Any], str]] = {
    "`train.batch`, `train.group_size`": (
        None,
        {"train__batch": 16, "train__group_size": 4},
        r"run holds another run \(train.batch was 8, is 16, train.group_size was 2, is 4\); resume it with the settings it "
        r"had, or give another --run-dir \(--model.path=run/checkpoints/step-2 starts from its weights\)",
    ),
    "`seed`, `[sampling]`, `[staleness]`, the loss": (
        None,
        {"seed": 1, "sampling__max_tokens": 90, "staleness__max_lag": 3, "train__loss": "cispo"},
        r"\(sampling.max_tokens was 96, is 90, seed was 0, is 1, staleness.max_lag was 4, is 3, train.loss was 'grpo', is",
    ),
    "another reward": (
        None, {"reward": lambda prompt, completion, **_: 0.0}, r"reward\[0\] was 'shorter', is '<lambda>'",
    ),
    "`steps`, to fewer than are trained": (None, {"steps": 1}, r"steps = 1: run .* 2 versions already.*--steps above 2"),
    "tasks": (
        edit_rows, {}, r"tasks.0.source = 'rows.jsonl': its content has changed since version 2 .*--resume-anyway .*--fresh",
    ),
    "the model's files": (edit_model, {}, r"model.path = './model': its content has changed since version 2 .*--resume-anyway"),
    "tasks, to another file with other rows": (
        lambda: (edit_rows(), move_inputs()), {}, r"tasks.0.source was 'rows.jsonl', is 'moved.jsonl'",
    ),
}  # fmt: skip
"""What changed -> (edits, settings, why it is refused)."""


@pytest.mark.parametrize("row", REFUSED)
def test_it_is_refused_by_name_and_nothing_is_touched(copied: None, row: str) -> None:
    edit, changes, why = REFUSED[row]
    if edit is not None:
        edit()
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=why):
        resume(**changes)
    assert before == {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 2},
        {"engine.slots": 9},
        {"train.micro_batch_tokens": 64},
        {"steps": 9},
        {"orchestrate": "inline"},
        {"buffer.max_gb": 1.0},
    ],
)
def test_exact_what_could_change_a_bit_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    settings = {"exact": True, "staleness.max_lag": 1, "tasks": [{"source": "builtin:sort_digits"}]}
    exact, inputs = make_recipe(settings), {}
    prepare_folder(tmp_path, exact, recipe_text="", inputs=inputs)
    write_summary(tmp_path, {"status": "interrupted", "version": 3})
    found = compare(tmp_path, make_recipe({**settings, **change}), inputs=inputs)
    (key,) = change
    assert [each.partition(" ")[0] for each in found.other] == [key] and "which exact = true fixes" in found.other[0]
    for harmless in ({"deadline": 5.0}, {"checkpoint.keep": 9}, {"sync.patience": 1.0}):
        found = compare(tmp_path, make_recipe({**settings, **harmless}), inputs=inputs)
        assert not found.other and len(found.changed) == 1


def test_a_finished_run_is_extended_and_says_what_the_rate_does(finished: None, capsys) -> None:
    result = resume(steps=6)
    said = capsys.readouterr().out
    assert "resumed    version 4 of 6" in said and "steps was 4, is 6" in said
    assert "the learning rate was 0.00025 at version 4, and is 0.000333 at version 5" in said
    assert result.summary["version"] == 6 and books_close(result.summary)
    rows = read_metrics(result.folder / "metrics.jsonl")
    assert [row["version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[4]["train/learning_rate"] == pytest.approx(1e-3 * 2 / 6)


def test_fresh_moves_what_was_there_with_what_was_rescued(finished: None, capsys) -> None:
    rescued = rescue_folder(Path("run"))
    (rescued / "step-3").mkdir(parents=True)
    result = resume(fresh=True, steps=2, seed=1)
    (old,) = Path().glob("run.old-*")
    assert f"moved      the run before is now in {old}" in capsys.readouterr().out
    assert result.summary["version"] == 2 and json.loads((old / "summary.json").read_text())["version"] == 4
    assert not rescued.exists() and (rescue_folder(old) / "step-3").exists()


def test_fresh_does_not_move_a_run_in_use_or_the_working_directory(copied: None, monkeypatch) -> None:
    lock = FolderLock(Path("run"))
    assert lock.acquire()
    with pytest.raises(ConfigError, match="in use by another process"):
        resume(fresh=True)
    lock.release()
    monkeypatch.chdir("run")
    with pytest.raises(ConfigError, match="holds the working directory"):
        set_aside(Path())
    assert Path("summary.json").exists()


def test_fresh_does_not_move_the_model_it_starts_from(copied: None) -> None:
    model = "run/checkpoints/step-2"
    with pytest.raises(ConfigError, match=f"model.path = '{model}' is in run, which --fresh moves; give another --run-dir"):
        resume(fresh=True, model__path=model)
    assert Path(model).exists() and not [*Path().glob("run.old-*")]


class Broken(Exception):
    """What a reward raises."""


def test_without_a_folder_the_run_that_is_meant_is_found(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)

    def reward(prompt: str, completion: str, **_: object) -> float:
        raise Broken

    broken = reward

    def reward(prompt: str, completion: str, **_: object) -> float:
        return 1.0 / (1 + len(completion))

    def run(**changes: Any) -> str:
        with contextlib.suppress(RewardError):
            result = small_run(None, **{"held_out": None, "reward": reward, "steps": 1, **changes})
            return str(result.folder)
        return ""

    run(reward=broken, quiet=False)
    first = run(quiet=False)
    assert "reward 'reward' has changed since version 0" in capsys.readouterr().out
    assert len(list(Path("runs").iterdir())) == 1, "a mended reward resumes"
    assert run(steps=2, engine={"slots": 4}) == first, "more steps train it further"
    assert run(steps=2) != first, "a finished run is not trained again"
    assert run(steps=3, tasks=TASKS[:5]) not in ("", first), "other rows are another experiment"
    assert run(steps=3, reward=broken) == "" and len(list(Path("runs").iterdir())) == 4, "so is another reward, once finished"


@pytest.mark.long
def test_fewer_engines_in_other_processes_go_on(tmp_path: Path, monkeypatch) -> None:
    settings = {**SLOW, "steps": 6, "staleness": {"max_lag": 6}}
    run_and_kill(tmp_path / "run", monkeypatch, at=4, **{**settings, "engine": {**SLOW["engine"], "count": 2}})
    kept = {rollout.id for group in saved(tmp_path / "run", 3) for rollout in group["rollouts"]}
    begun = note_generated(monkeypatch)
    result = small_run(tmp_path / "run", **settings)
    assert result.summary["status"] == "finished" and books_close(result.summary)
    assert kept and not kept & {*begun}


def test_the_table_in_the_docs_is_this_one() -> None:
    page = (ROOT / "docs" / "orchestration.md").read_text()
    table = page.partition("| what changed |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    elsewhere = ["`engine.count`", "`[train.parallel]`"]  # tests/launch
    assert rows == [*RESUMES, *elsewhere, *REFUSED, "anything that could change a bit, with `exact = true`", "`--fresh`"]
