"""The command line as users meet it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import small_run

from headrace.cli import main, make_parser
from headrace.config import Recipe
from headrace.score import RewardError
from headrace.settings import describe

THREE_GPUS = ("--engine.kind=vllm", "--engine.vllm.arguments.tensor_parallel_size=3")
GOLDEN = Path(__file__).parent / "golden" / "cli.txt"


def surface() -> str:
    """Every command, option and setting with its default: what a release must not change by accident."""
    lines = []
    for action in make_parser()._subparsers._group_actions[0].choices.items():
        name, parser = action
        lines += [f"{name} {' '.join(option.option_strings) or option.dest}" for option in parser._actions]
    lines += [f"{key} : {kind} = {default}" for key, kind, default, _ in describe(Recipe)]
    return "\n".join(lines) + "\n"


def test_the_surface_is_frozen() -> None:
    """After a change that is meant: HEADRACE_FREEZE=1 pytest tests/test_cli.py, and look at the diff."""
    if os.environ.get("HEADRACE_FREEZE"):
        GOLDEN.write_text(surface())
    assert surface() == GOLDEN.read_text()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def test_a_dry_run_prints_how_sizes_follow_and_starts_nothing(capsys, tmp_path, monkeypatch) -> None:
    recipe = str(Path("recipes/quickstart.toml").resolve())
    monkeypatch.chdir(tmp_path)
    assert run("train", recipe, "--dry-run", "--train.batch=64", "--staleness.max-lag=3") == 0
    said = capsys.readouterr().out
    assert "64 rollouts = 8 tasks × 8 siblings" in said and "(3 + 1) × 8 = 32 tasks" in said
    assert "dry run: the recipe is valid" in said and "max_lag = 3" in said and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "absent.toml"), "absent.toml: no such recipe"),
        (("train", "recipes/quickstart.toml", "--train.batch=65"), "not a multiple of group_size = 8; try 64"),
        (("train", "recipes/quickstart.toml", "--buffer.kind=streem"), "did you mean 'stream'?"),
        (("train", "recipes/quickstart.toml", '--reward.functions=["absent:f"]'), "No module named 'absent'"),
        (("train", "recipes/quickstart.toml", "--steps"), "--section.key=value"),
        (("train", "recipes/quickstart.toml", "--steps=many"), "steps = 'many': must be a whole number"),
        (("train", "recipes/quickstart.toml", "--tasks.3.source=x"), "must be an index below 1"),
        (("train", "recipes/quickstart.toml", "extra"), "write an override as --section.key=value"),
        (("train", "recipes/quickstart.toml", "--dry-run", "--tasks.0.source=nofile.jsonl"), "nofile.jsonl: no such file"),
        (("train", "recipes/quickstart.toml", "--dry-run", "--tasks.0.source=builtin:sort"), "no built-in task 'sort'"),
        (("train", "recipes/quickstart.toml", "--dry-run", "--tasks.0.options.max_lenght=4"), "'max_lenght'"),
        (("train", "recipes/quickstart.toml", "--dry-run", "--lora.rank=4", '--lora.targets=["qproj"]'), "nearest: q_proj"),
        (("train", "recipes/quickstart.toml", "--dry-run", "--tasks=[]"), "tasks: none are given"),
        (("train", "recipes/quickstart.toml", "--dry-run", "--train.loss=gpro"), "train.loss = 'gpro': must be one of grpo"),
        (("train", "recipes/quickstart.toml", "--dry-run", "--train.loss=ppo"), "trains values; set it to 'gae'"),
        (
            ("train", "recipes/quickstart.toml", "--dry-run", "--train.advantage=gae"),
            "no values; set train.loss = 'ppo'",
        ),
        (
            ("train", "recipes/quickstart.toml", "--dry-run", *THREE_GPUS),
            "tensor_parallel_size = 3: vLLM cannot divide a vocabulary of 128 (padded) evenly; set it to 1",
        ),
        (("train", "recipes/quickstart.toml", "--dry-run", "--train.constants.clip=1"), "takes no 'clip'; it takes: clip_low"),
        (("train", "recipes/quickstart.toml", "--dry-run", "--train.loss=absent.py:loss"), "absent.py: no such file"),
        (("train", "recipes/quickstart.toml", "--train.loss=gpro"), "train.loss = 'gpro': must be one of grpo"),
        (("train", "recipes/quickstart.toml", "--device=cuda"), "torch sees no GPU"),
        (("train", "recipes/quickstart.toml", "--seed=-1"), "seed = -1: must be ≥ 0"),
        (("evaluate", "builtin:tiny"), "no run or checkpoint of one, whose recipe could be taken; name a recipe"),
        (("evaluate", "./absent", "recipes/quickstart.toml"), "model './absent': the folder does not exist"),
        (("evaluate", "builtin:tiny", "recipes/quickstart.toml", "--evaluate.samples", "0"), "evaluate.samples = 0"),
        (("evaluate", "builtin:tiny", "recipes/quickstart.toml", "--json", "absent/x.json"), "its folder does not exist"),
        (("evaluate", "builtin:tiny", "recipes/quickstart.toml", "--against", "absent.json"), "there is no such file"),
    ],
)
def test_a_mistake_is_answered_in_one_line(capsys, arguments, message) -> None:
    assert run(*arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("headrace: ") and message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RewardError("reward 'r' is wrong"), "headrace: reward 'r' is wrong"),
        (KeyError("gold"), "headrace: KeyError: 'gold'"),
        (AssertionError(), "headrace: AssertionError"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_an_error_is_told_with_its_class_only_where_that_is_needed(error, told, options, capsys, monkeypatch) -> None:
    def fail(*_) -> None:
        raise error

    monkeypatch.setattr("headrace.cli._launch", fail)
    monkeypatch.setattr("headrace.cli._check_inputs", fail)
    assert run("train", "recipes/quickstart.toml", *options) == 1
    first, where = capsys.readouterr().err.splitlines()
    assert first == told and where.endswith("fail: raise error")


def test_an_interrupt_before_there_is_a_run_says_so(capsys, monkeypatch) -> None:
    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.config.load_recipe", interrupted)
    with pytest.raises(SystemExit) as caught:
        main(["train", "recipes/quickstart.toml"])
    assert caught.value.code == 130 and capsys.readouterr().err == "headrace: stopped\n"


def test_an_override_may_be_two_words(capsys) -> None:
    words = ("--steps", "7", "--exact", "True", "--staleness.max_lag", "1", "--seed=3")
    assert run("train", "recipes/quickstart.toml", "--dry-run", *words) == 0
    said = capsys.readouterr().out
    assert "steps = 7\n" in said and "exact = true\n" in said and "seed = 3\n" in said


def test_every_setting_is_in_the_help(capsys) -> None:
    assert run("train", "--help") == 0
    said = capsys.readouterr().out
    for key, _, _, text in describe(Recipe):
        assert f"  {key} = " in said and text in said and text


def test_inspect_shows_a_rollout_token_by_token(capsys, tmp_path) -> None:
    result = small_run(tmp_path / "run", steps=2, observe={"keep_rollouts_every": 1})
    assert run("inspect", str(result.folder)) == 0
    said = capsys.readouterr().out
    assert said.startswith("step 2: 16 rollouts") and "trained" in said and "prompt" in said and "engine engine-0" in said
    identity = next(line for line in said.splitlines() if line.startswith("rollout ")).split()[1]
    assert run("inspect", str(result.folder), "--step", "2", "--rollout", identity) == 0
    assert identity in capsys.readouterr().out
    assert run("inspect", str(result.folder), "--step", "9") == 2
    assert "there are 1 to 2" in capsys.readouterr().err
    assert run("inspect", str(tmp_path)) == 2
    assert "holds no rollouts" in capsys.readouterr().err
    assert run("inspect", str(tmp_path / "none")) == 2
    assert "no such folder" in capsys.readouterr().err


def test_evaluate_prints_a_table_and_writes_every_task(capsys, tmp_path) -> None:
    small = [
        "--model.hidden_size=32",
        "--model.num_heads=1",
        "--model.num_layers=1",
        "--orchestrate=inline",
        "--evaluate.limit=3",
    ]
    file = tmp_path / "found.json"
    given = ["evaluate", "builtin:tiny", "recipes/quickstart.toml", "--evaluate.samples=2", *small]
    assert run(*given, "--json", str(file)) == 0
    said, found = capsys.readouterr().out, json.loads(file.read_text())
    assert said.startswith("builtin:tiny\n3 tasks × 2 samples at temperature 1, and greedy; 95 %") and "pass@2" in said
    assert found["metrics"].keys() == {"success", "greedy", "held_out_reward", "pass@1", "pass@2", "maj@2"}
    assert [len(task["rewards"]) for task in found["tasks"]] == [2, 2, 2]
    assert run(*given, "--against", str(file)) == 0
    assert f"minus {file}" in capsys.readouterr().out and not list(tmp_path.glob("**/logs"))


def test_bench_writes_the_shape_the_design_names(tmp_path) -> None:
    from headrace.bench.harness import Row, write

    write("learn", [Row("a", 1.5, "s", goal="≤ 2", peers={"other": 3.0})], tmp_path / "out.json", commit="abc")
    content = json.loads((tmp_path / "out.json").read_text())
    assert content.keys() == {"bench", "host", "commit", "rows"}
    assert content["rows"] == [{"name": "a", "value": 1.5, "unit": "s", "goal": "≤ 2", "bound": None, "peers": {"other": 3.0}}]


def test_a_failed_run_ends_in_one_line_with_the_folder(tmp_path) -> None:
    (tmp_path / "bad.py").write_text("def reward(prompts, completions, **columns):\n    return [0.5]\n")
    arguments = [
        "train", "recipes/quickstart.toml", "--steps=2", f"--run-dir={tmp_path / 'run'}", "--sft.steps=0",
        f'--reward.functions=["{tmp_path / "bad.py"}:reward"]', "--evaluate.tasks=[]",
    ]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "headrace", *arguments], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("headrace: reward 'reward' returned 1 values for") and "launcher.log" in done.stderr


def test_an_error_in_the_users_code_is_shown_where_it_happened(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def loss(tokens):\n    return tokens.absent, {}\n")
    arguments = [
        "train", "recipes/quickstart.toml", "--steps=2", f"--run-dir={tmp_path / 'run'}", "--sft.steps=0",
        f"--train.loss={tmp_path / 'mine.py'}:loss", "--evaluate.tasks=[]",
    ]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "headrace.cli", *arguments], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"in {tmp_path / 'mine.py'}:2, loss: return tokens.absent, {{}}" in done.stderr


@pytest.mark.long
def test_a_pipe_that_closes_early_is_no_error(tmp_path) -> None:
    result = small_run(tmp_path / "run", steps=1)
    command = f"{sys.executable} -m headrace.cli inspect {result.folder} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith("step 1") and "Error" not in done.stderr
