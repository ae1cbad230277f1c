"""What goes wrong in a run: a clear error or a typed outcome, and nothing already trained is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import TASKS, books_close, failing_loss, run_on_a_full_disk, small_run, weights

import headrace
from headrace.launch.inputs import UserInputs, check_inputs
from headrace.model.load import ModelError
from headrace.run.policy_groups import NoProgress
from headrace.run.state import Stalled
from headrace.score import RewardError
from headrace.tasks import TaskError


def counts(result) -> dict[str, int]:
    return result.summary["accounting"]


def test_a_reward_that_always_raises_stops_the_run_and_shows_why(tmp_path):
    def broken(prompt, completion, **row):
        raise KeyError("gold")

    with pytest.raises(RewardError, match=r"in a row; the last: reward 'broken' raised KeyError: 'gold'") as caught:
        small_run(tmp_path / "run", reward=broken, held_out=None)
    assert any("run folder" in note for note in caught.value.__notes__)
    assert isinstance(caught.value.__cause__, KeyError)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert "broken" in (tmp_path / "run" / "logs" / "launcher.log").read_text()


def test_failed_rollouts_are_tried_again_then_counted(tmp_path):
    def refuses(prompt, completion, answer, **row):
        if answer == "3":
            raise OSError("disk of the judge")
        return float(len(completion))

    result = small_run(tmp_path / "run", steps=8, reward=refuses, held_out=None)
    assert counts(result)["failed"] > 0 and counts(result)["trained"] == 8 * 16
    assert any("disk of the judge" in reason for reason in result.summary["dropped_because"])


@pytest.mark.parametrize(("value", "state"), [(float("nan"), "failed"), (float("inf"), "failed"), (None, "filtered")])
def test_a_value_that_is_no_score_is_not_a_zero(tmp_path, value, state):
    def odd(prompt, completion, answer, **row):
        return value if answer in ("2", "7") else 1.0

    result = small_run(tmp_path / "run", steps=6, reward=odd, held_out=None)
    assert counts(result)[state] > 0 and counts(result)["trained"] == 6 * 16


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda prompts, completions, **columns: [1.0], r"returned 1 values for \d+ completions"),
        (lambda prompt, completion, **row: "good", "'good', which is not a number"),
        (lambda prompts, **columns: 3, "must return a list"),
        (lambda x: 1.0, r"write f\(prompt, completion"),
        (7, "not a function"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused(tmp_path, reward, message):
    with pytest.raises(RewardError, match=message):
        small_run(tmp_path / "run", reward=reward)


def test_prompts_that_do_not_fit_are_filtered_and_all_of_them_stop_the_run(tmp_path):
    long = [{"prompt": "1" * 40, "answer": "1"}]
    result = small_run(tmp_path / "some", tasks=TASKS + long, held_out=None)
    assert counts(result)["trained"] == 6 * 16
    with pytest.raises(NoProgress, match="40 tokens; the context is 32"):
        small_run(tmp_path / "all", tasks=long, held_out=None)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([], "no tasks"),
        ([{"question": "1+1"}], "no 'prompt' column; it has: question"),
        ([{"prompt": 3}], "must be text or a list of messages"),
        ("absent.jsonl", "no such file"),
        (5, "not a list of rows"),
    ],
)
def test_tasks_that_cannot_be_used_are_refused_before_a_model_loads(tmp_path, tasks, message):
    with pytest.raises(TaskError, match=message):
        small_run(tmp_path / "run", tasks=tasks)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["completion", "completions", "completion_ids", "prompts"])
@pytest.mark.parametrize("where", ["tasks", "held_out"])
def test_a_column_that_hides_what_the_policy_wrote_is_refused_before_a_model_loads(tmp_path, where, name):
    kind = "held-out " if where == "held_out" else ""
    with pytest.raises(headrace.ConfigError, match=rf"row 12 of {kind}tasks has a column '{name}', .*; rename the column"):
        small_run(tmp_path / "run", **{where: [*TASKS, {"prompt": "x", "answer": "x", name: "gold"}]})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("where", ["tasks", "held_out"])
@pytest.mark.parametrize(
    "reward", [lambda completion, answer: 1.0, lambda prompts, completions, answer, **columns: [1.0] * len(prompts)]
)
def test_a_column_that_a_reward_takes_and_some_rows_lack_is_named_before_a_model_loads(tmp_path, where, reward):
    rows = [*TASKS, {"prompt": "x", "solution": "y"}, {"prompt": "z"}]
    row = f"row 12 of {'held-out ' if where == 'held_out' else ''}tasks"
    problem = rf"reward '<lambda>' takes 'answer', which {row} does not have \(it has: prompt, solution\); add the column"
    with pytest.raises(headrace.ConfigError, match=problem):
        small_run(tmp_path / "run", reward=reward, **{where: rows})
    assert not (tmp_path / "run").exists()


def test_columns_with_a_default_and_those_an_environment_may_bring_need_not_be_there():
    recipe, rows = headrace.Recipe(), [{"prompt": "x"}]
    check_inputs(recipe, UserInputs(tasks=rows, reward=lambda completion, answer="": 1.0))
    check_inputs(recipe, UserInputs(tasks=rows, reward=lambda completion, answer: 1.0, environment=object()))


def test_groups_that_are_all_tied_are_said_once_until_that_changes(tmp_path, capsys):
    values = iter([1.0] * 32 + [1.0, 0.0] * 8 + [1.0] * 1000)
    result = small_run(
        tmp_path / "run",
        steps=4,
        quiet=False,
        held_out=None,
        staleness={"max_lag": 0},
        reward=lambda prompt, completion, **row: next(values),
    )
    said = [line for line in capsys.readouterr().out.splitlines() if "groups are tied" in line]
    assert [line.split(":")[0] for line in said] == ["version 1", "version 4"] and "is the reward a constant" in said[0]
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["tied"] for row in rows] == [1, 1, 0, 1]


def test_sys_exit_in_an_environment_fails_its_episode(tmp_path):
    class Quits:
        async def run(self, task, client):
            sys.exit(3)

    with pytest.raises(NoProgress, match="the environment raised SystemExit: 3"):
        small_run(tmp_path / "run", environment=Quits(), held_out=None)


def test_missing_tasks_rewards_and_models_are_named(tmp_path):
    with pytest.raises(headrace.ConfigError, match="tasks: none are given"):
        small_run(tmp_path / "a", tasks=None)
    with pytest.raises(headrace.ConfigError, match="reward: none is given"):
        small_run(tmp_path / "b", reward=None)
    with pytest.raises(ModelError, match=r"model.path = '\./nowhere': the folder does not exist"):
        small_run(tmp_path / "c", model={"path": "./nowhere"})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="could not be loaded as a tokenizer"):
        small_run(tmp_path / "f", model={"path": str(tmp_path / "empty")})
    with pytest.raises(headrace.ConfigError, match="the built-in model is"):
        small_run(tmp_path / "d", model={"path": "builtin:huge"})
    with pytest.raises(ValueError, match=r"train.loss = 'gpro'"):
        small_run(tmp_path / "e", train={"loss": "gpro"})


def test_an_architecture_with_other_layers_is_refused_by_name(tmp_path):
    import transformers

    config = transformers.MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, state_size=4)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mamba")
    from headrace.model.tiny import build_tokenizer

    build_tokenizer().save_pretrained(tmp_path / "mamba")
    with pytest.raises(ModelError, match="mamba"):
        small_run(tmp_path / "run", model={"path": str(tmp_path / "mamba"), "context": 0})


def test_a_failure_in_any_loop_stops_all_and_what_was_trained_is_saved(tmp_path):
    state = {"calls": 0}

    def fails_later(prompts, completions, **columns):
        state["calls"] += len(prompts)
        return [1.0] if state["calls"] > 150 else [float(len(text)) for text in completions]

    with pytest.raises(RewardError, match="returned 1 values"):
        small_run(tmp_path / "run", reward=fails_later, steps=50, checkpoint={"every": 100})
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["version"] >= 4
    saved = tmp_path / "run" / "checkpoints" / f"step-{summary['version']}"
    assert weights(saved)
    assert books_close(summary)


def test_a_full_disk_loses_nothing(tiny_disk, cache_folder):
    run_on_a_full_disk(small_run, tiny_disk, cache_folder)


HELPERS = os.path.dirname(os.path.dirname(__file__))
SCRIPT = """
import sys, time
sys.path.insert(0, {helpers!r})
from helpers import small_run
from pathlib import Path
def slow(prompts, completions, **columns):
    time.sleep(0.05)
    return [float(len(text)) for text in completions]
try:
    small_run(Path({folder!r}), reward=slow, held_out=None, steps=400, quiet=False, checkpoint={{"every": 1000}})
except KeyboardInterrupt as stopped:
    print("stopped:", stopped)
"""


def stopped(script: str, number: signal.Signals) -> str:
    """What a script said after it was sent a signal at its third step; it must end well."""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert any(line.startswith("step 3/") for line in child.stdout)
    child.send_signal(number)
    rest = child.stdout.read()
    assert child.wait(timeout=60) == 0
    return rest


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_signal_saves_and_the_same_command_resumes(tmp_path, number):
    folder = tmp_path / "run"
    script = SCRIPT.format(helpers=HELPERS, folder=str(folder))
    rest = stopped(script, number)
    assert "stopping after this version" in rest and "stopped: the run in" in rest and "give the same command again" in rest
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert (folder / "checkpoints" / f"step-{summary['version']}").is_dir()
    again = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert again.stdout is not None
    resumed = next(line for line in again.stdout if line.startswith("resumed"))
    assert f"version {summary['version']} of 400" in resumed
    again.kill()
    again.wait()


@pytest.mark.long
def test_a_killed_process_loses_no_checkpoint(tmp_path):
    folder = tmp_path / "run"
    script = SCRIPT.format(helpers=HELPERS, folder=str(folder)).replace('"every": 1000', '"every": 1')
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        rows = (line for line in child.stdout if line.startswith("step "))
        last = next(rows)
        last = next(rows)
        time.sleep(0.03 * len(last) % 0.1)
        child.kill()
        child.wait()
        steps = sorted((folder / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
        assert steps and weights(steps[-1])
        assert int(steps[-1].name[5:]) >= int(last.split()[1].partition("/")[0]) - 1


def test_a_loss_that_fails_leaves_a_checkpoint_that_resumes(tmp_path):
    """The groups being trained wait again: the checkpoint made after the failure is complete."""
    settings = {"steps": 8, "train": {"loss": failing_loss(tmp_path)}, "checkpoint": {"every": 100}}
    with pytest.raises(RuntimeError, match="out of luck") as caught:
        small_run(tmp_path / "run", **settings)
    assert "resumes from version 4" in caught.value.__notes__[0] and "launcher.log" in caught.value.__notes__[1]
    result = small_run(tmp_path / "run", **settings)
    assert result.summary["status"] == "finished" and result.summary["accounting"]["trained"] == 8 * 16


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return (tokens.ratio() * tokens.advantages).mean(), {}", r"shape \(\); one per token is wanted"),
        ("return tokens.ratio() * tokens.advantages", r"must return \(losses, metrics\)"),
    ],
)
def test_a_loss_of_the_wrong_form_is_refused(tmp_path, body, message):
    (tmp_path / "odd.py").write_text(f"def odd(tokens):\n    {body}\n")
    with pytest.raises(ValueError, match=message):
        small_run(tmp_path / "run", train={"loss": f"{tmp_path / 'odd.py'}:odd"})


def test_constants_a_loss_does_not_take_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(headrace.ConfigError, match="takes no 'clip_hihg'; it takes: clip_low, clip_high"):
        small_run(tmp_path / "run", train={"constants": {"clip_hihg": 0.3}})
    assert not (tmp_path / "run").exists()


def test_another_experiment_is_never_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def broken(prompts, completions, **columns):
        return [1.0]

    for reward in (broken, lambda prompt, completion, **row: float(len(completion))):
        with contextlib.suppress(RewardError):
            small_run(None, reward=reward, held_out=None, steps=2)
    first, second = sorted((tmp_path / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    assert json.loads((first / "summary.json").read_text())["status"] == "failed"
    assert json.loads((second / "summary.json").read_text())["status"] == "finished"
    with pytest.raises(headrace.ConfigError, match=r"another run \(reward\[0\] was 'broken', is '<lambda>'\)"):
        small_run(first, reward=lambda prompt, completion, **row: 0.0, held_out=None, steps=2)


def test_a_folder_in_use_is_refused(tmp_path):
    from headrace.launch.folder import FolderLock

    lock = FolderLock(tmp_path / "run")
    assert lock.acquire()
    with pytest.raises(headrace.ConfigError, match="in use by another process"):
        small_run(tmp_path / "run")
    lock.release()
    assert small_run(tmp_path / "run", steps=1).summary["status"] == "finished"


def test_the_lock_of_a_dead_process_hinders_nobody(tmp_path):
    """Killed while it holds the folder, it leaves the file, and the system lets go of the lock."""
    script = (
        "import os, signal, sys; from pathlib import Path; from headrace.launch.folder import FolderLock\n"
        "assert FolderLock(Path(sys.argv[1])).acquire(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], timeout=60)
    assert killed.returncode == -signal.SIGKILL and (tmp_path / "run" / ".lock").exists()
    assert small_run(tmp_path / "run", steps=1).summary["status"] == "finished"


def test_an_async_reward_that_never_answers_is_a_failure_not_a_hang(tmp_path):
    async def sleeper(prompt, completion, answer, **row):
        if answer == "5":
            await asyncio.sleep(3600)
        return float(len(completion))

    settings = {"functions": [], "timeout": 0.05, "attempts": 1}
    result = small_run(tmp_path / "run", reward=sleeper, held_out=None, steps=8, **{"recipe": write_recipe(tmp_path, settings)})
    assert counts(result)["failed"] > 0 and counts(result)["trained"] == 8 * 16
    assert any("no answer within reward.timeout" in reason for reason in result.summary["dropped_because"])


def write_recipe(folder, reward_settings) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in reward_settings.items()]
    (folder / "recipe.toml").write_text("\n".join(["[reward]", *lines, ""]))
    return str(folder / "recipe.toml")


def test_a_run_in_which_nothing_moves_names_what_it_waits_for(tmp_path):
    async def never(prompts, completions, **columns):
        await asyncio.sleep(3600)

    with pytest.raises(Stalled, match=r"nothing has moved for .* groups in flight, .* being scored"):
        small_run(tmp_path / "run", reward=never, held_out=None, deadline=0.5)


def test_async_rewards_are_asked_together(tmp_path):
    asked, together = [], asyncio.Event()

    async def judge(prompt, completion, **row):
        asked.append(completion)
        if len(asked) > 8:
            together.set()
        await asyncio.wait_for(together.wait(), 30)  # nobody is answered before nine are asked
        return 1.0

    result = small_run(tmp_path / "run", reward=judge, held_out=None, steps=3)
    assert result.summary["accounting"]["trained"] == 48 and result.summary["accounting"]["failed"] == 0


def test_errors_are_not_zeros_in_evaluation(tmp_path):
    def judge(prompt, completion, answer, **row):
        if answer in ("0", "1"):
            raise OSError("judge is down")
        return 1.0

    result = small_run(tmp_path / "run", reward=judge, steps=2)
    assert result.summary["success_before"] == 1.0


def test_environments_that_do_not_end_hold_up_no_run_and_are_named_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("headrace.user_code.END_SECONDS", 0.05)

    class Stubborn(headrace.envs.SingleTurn):
        num_calls = 0

        async def run(self, task, client):
            self.num_calls += 1
            while self.num_calls > 16:  # all but those of the only batch
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(1000)
            return await super().run(task, client)

    more = {"held_out": None, "quiet": False, "partial": {"oversample": 2.0}}
    result = small_run(tmp_path / "run", environment=Stubborn(), steps=1, **more)
    assert result.summary["status"] == "finished" and counts(result)["trained"] == 16 and counts(result)["unused"] > 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "has not ended" in line]
    assert (
        len(lines) == 1
        and "the environment of g" in lines[0]
        and "test_failures.py:" in lines[0]
        and "Stubborn.run" in lines[0]
    )


def test_the_checkpoint_just_written_is_never_pruned(tmp_path, monkeypatch):
    from test_runs import run_and_kill

    settings = {"steps": 9, "checkpoint": {"every": 3, "keep": 1}}
    run_and_kill(tmp_path / "run", monkeypatch, at=8, **settings)
    damaged = tmp_path / "run" / "checkpoints" / "step-6"
    (damaged / "config.json").write_text("{}")
    result = small_run(tmp_path / "run", **settings)
    assert result.summary["status"] == "finished" and weights(result.checkpoint)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-9"]


def test_a_run_inside_an_event_loop_can_be_stopped(tmp_path):
    """A notebook's interrupt reaches the thread that the run was given."""
    script = SCRIPT.format(helpers=HELPERS, folder=str(tmp_path / "run"))
    body = "\n".join("    " + line for line in script.strip().splitlines())
    script = f"import asyncio\nasync def cell():\n{body}\nasyncio.new_event_loop().run_until_complete(cell())\n"
    assert "stopped: the run in" in stopped(script, signal.SIGINT)
