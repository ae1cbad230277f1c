"""`headrace doctor`: each thing it finds is provoked for real, and a sound recipe comes out clean."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import LlamaConfig

from headrace.cli import main
from headrace.errors import SyncError
from headrace.launch.folder import FolderLock, write_summary
from headrace.model import ModelShape
from headrace.plan import (
    capacity_checks as capacity,
    inputs_checks as inputs,
    machine_checks as machine,
    model_checks as model,
    reward_checks as reward,
)
from headrace.plan.doctor import Finding, Subject, check, examine
from headrace.sync import transport_class

QUICKSTART = Path("recipes/quickstart.toml")
TASKS = [{"prompt": f"{number} + 1 =", "answer": str(number + 1001)} for number in range(6)]
GOOD = "def reward(prompt, completion, answer, **row):\n    return float(completion == answer)\n"
STRIPPING = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if loop.last %}{{ message.content }}{% else %}{{ message.content.split('</think>')[-1] }}{% endif %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Recipe:
    """A recipe file in a folder of its own, with tasks and a reward that are as they should be unless said otherwise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write(tasks=TASKS, reward=GOOD)

    def write(self, *, tasks: list | None = None, reward: str | None = None) -> Recipe:
        if tasks is not None:
            (self.folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks))
        if reward is not None:
            (self.folder / "mine.py").write_text(reward)
        return self

    @property
    def path(self) -> Path:
        path = self.folder / "recipe.toml"
        path.write_text(
            f'steps = 2\nthreads = 1\n[[tasks]]\nsource = "{self.folder}/tasks.jsonl"\n'
            f'[reward]\nfunctions = ["{self.folder}/mine.py:reward"]\n[sampling]\nmax_tokens = 16\n'
        )
        return path

    def subject(self, **overrides) -> Subject:
        given = {key.replace("__", "."): value for key, value in overrides.items()}
        return Subject(recipe_path=self.path, overrides=given, runs=self.folder / "runs")

    def examine(self, **overrides) -> list[Finding]:
        return list(examine(self.subject(**overrides)))


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    return Recipe(tmp_path)


def only(findings: list[Finding], level: str) -> Finding:
    """The one finding of this level; nothing worse or unexpected is beside it."""
    loud = [finding for finding in findings if finding.level != "ok"]
    assert [finding.level for finding in loud] == [level], loud
    assert loud[0].fix and "\n" not in loud[0].what + loud[0].fix
    return loud[0]


# Sound


def test_a_sound_recipe_has_no_finding(recipe) -> None:
    findings = recipe.examine()
    assert {finding.level for finding in findings} == {"ok"}, findings
    assert findings[-1].what == "reward 'reward': gold 1, half 0, empty 0, garbage 0"
    assert any(finding.what.startswith("prompts: 7 tokens at most in the first 64; context 256") for finding in findings)


def test_the_quickstart_comes_out_without_a_problem(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", str(QUICKSTART)])
    said = capsys.readouterr().out
    assert caught.value.code == 0 and "problem  " not in said and "no problem" in said
    assert "\nok       model builtin:tiny (qwen3): 0.26 million parameters" in said
    assert "\nok       reward 'partial_credit': gold 1, half" in said


def test_the_machine_alone_needs_no_recipe(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["doctor"])
    said = capsys.readouterr().out
    assert caught.value.code == 0 and said.startswith("ok       Python 3.") and "torch 2." in said and "reward" not in said


def test_a_problem_is_one_line_its_fix_another_and_the_status_1(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", str(QUICKSTART), "--train.batch=65"])
    said = capsys.readouterr().out
    assert caught.value.code == 1 and "\n1 problem, " in said
    assert said.startswith("problem  override: train.batch = 65: not a multiple of group_size = 8\n         fix: try 64\n")
    assert "torch 2." in said  # the machine is examined all the same


def test_torch_is_not_imported_before_the_recipe_has_been_told_of() -> None:
    script = (
        "import sys; from pathlib import Path; from headrace.plan.doctor import Subject, examine\n"
        "findings = examine(Subject(recipe_path=Path('absent.toml')))\n"
        "assert 'absent.toml: no such recipe' in next(findings).what\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


# The recipe and its tasks


def test_an_unknown_key_is_named_with_the_nearest(recipe) -> None:
    finding = only(recipe.examine(train__bach=64), "problem")
    assert "train.bach is not a setting" in finding.what and finding.fix == "did you mean train.batch?"


def test_an_option_that_an_environment_does_not_take(recipe) -> None:
    (recipe.folder / "adding.py").write_text(
        'def add(a: int) -> int:\n    """Add one.\n\n    Args:\n        a: the number\n    """\n    return a + 1\n'
    )
    tools = [f"{recipe.folder / 'adding.py'}:add"]
    finding = only(recipe.examine(environment__tools=tools, environment__options={"max_turnz": 3}), "problem")
    assert "environment.options.max_turnz" in finding.what and finding.fix == "did you mean environment.options.max_turns?"
    found = recipe.examine(environment__tools=tools, environment__options={"max_turns": 3})
    assert any(finding.what.startswith("environment: ") for finding in found if finding.level == "ok")


def test_a_prompt_column_that_is_missing(recipe) -> None:
    findings = recipe.write(tasks=[{"question": "?", "answer": "x"}]).examine()
    assert "row 0 has no 'prompt' column" in only(findings, "problem").what


def test_held_out_tasks_that_are_missing(recipe) -> None:
    finding = only(recipe.examine(evaluate__tasks=[{"source": "nowhere.jsonl"}]), "problem")
    assert "held-out" in finding.what and "nowhere.jsonl: no such file" in finding.what


def test_a_column_that_the_reward_takes_and_no_task_has(recipe) -> None:
    recipe.write(reward="def reward(completion, solution, tolerance=0.1):\n    return float(completion == solution)\n")
    finding = only(recipe.examine(), "problem")
    row = f"row 0 of {recipe.folder}/tasks.jsonl"
    assert finding.what == f"reward 'reward' takes 'solution', which {row} does not have (it has: prompt, answer)"
    assert "give the parameter solution a default value" in finding.fix


@pytest.mark.parametrize("reward", [GOOD, "import math\nlimit = math.absent\n", "def other(completion):\n    return 1\n"])
def test_a_reserved_column_is_named_also_if_the_reward_cannot_be_imported(recipe, reward) -> None:
    findings = recipe.write(tasks=[{**row, "completion": "x"} for row in TASKS], reward=reward).examine()
    problems = [finding for finding in findings if finding.level == "problem"]
    assert len(problems) == (1 if reward == GOOD else 2), problems
    assert "row 0" in problems[-1].what and "has a column 'completion'" in problems[-1].what


def test_a_column_that_some_tasks_lack(recipe) -> None:
    lenient = "def reward(completion, **row):\n    return float(completion == row.get('answer'))\n"
    finding = only(recipe.write(tasks=[*TASKS, {"prompt": "?"}], reward=lenient).examine(), "warning")
    assert "column 'answer' is empty or absent in" in finding.what


def test_a_column_that_the_reward_takes_and_some_tasks_lack(recipe) -> None:
    findings = recipe.write(tasks=[*TASKS, {"prompt": "?"}]).examine()
    (finding,) = [finding for finding in findings if finding.level == "problem"]
    assert f"takes 'answer', which row 6 of {recipe.folder}/tasks.jsonl does not have" in finding.what


def test_sft_without_answers(recipe) -> None:
    recipe.write(tasks=[{"prompt": "?"}], reward="def reward(completion):\n    return len(completion) / 10\n")
    found = only(recipe.examine(sft__steps=3), "problem")
    assert "no 'completion' or 'answer' to learn from" in found.what and "leave [sft] out" in found.fix


# The reward


def test_a_reward_file_that_does_not_parse(recipe) -> None:
    finding = only(recipe.write(reward="def reward(completion)\n    return 1.0\n").examine(), "problem")
    assert "SyntaxError" in finding.what and "mine.py, line 1" in finding.what


def test_a_reward_file_that_raises_when_imported(recipe) -> None:
    finding = only(recipe.write(reward="import math\nlimit = math.absent\n").examine(), "problem")
    assert "AttributeError" in finding.what and "mine.py:2" in finding.what


def test_a_reward_that_is_not_there(recipe) -> None:
    assert "has no 'reward'" in only(recipe.write(reward="def other(completion):\n    return 1\n").examine(), "problem").what


def test_a_reward_that_raises_on_what_a_policy_may_write(recipe) -> None:
    recipe.write(reward="def reward(completion, answer):\n    return float(completion.split()[0] == answer)\n")
    finding = only(recipe.examine(), "problem")
    assert "raised IndexError" in finding.what and "on the answer empty ('')" in finding.what
    assert "what a policy may write" in finding.fix


def test_a_reward_that_raises_on_the_right_answer(recipe) -> None:
    recipe.write(reward="def reward(completion, answer, **row):\n    return row['level'] * 1.0\n")
    finding = only(recipe.examine(), "problem")
    assert "raised KeyError: 'level'" in finding.what and "columns answer, prompt" in finding.fix


@pytest.mark.parametrize(
    "body",
    [
        "time.sleep(60)",
        "while time.monotonic() < END:\n        pass",  # not for ever: it would burden the tests after this one
        "await asyncio.sleep(60)",
    ],
)
def test_a_reward_that_hangs_is_waited_for_once(recipe, body) -> None:
    word = "async def" if "await" in body else "def"
    recipe.write(
        reward=f"import asyncio, time\nEND = time.monotonic() + 6\n{word} reward(completion):\n    {body}\n    return 1.0\n"
    )
    subject = recipe.subject(reward__timeout=0.5)
    for each in (*inputs.CHECKS, *model.CHECKS):
        assert all(finding.level == "ok" for finding in each(subject))
    started = time.monotonic()
    finding = only(list(reward.check_reward(subject)), "problem")
    assert time.monotonic() - started < 3
    assert "no answer within reward.timeout = 0.5 s" in finding.what and "'reward'" in finding.what


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')"])
def test_a_reward_that_is_no_number_for_the_right_answer(recipe, value) -> None:
    recipe.write(reward=f"def reward(completion, answer):\n    return {value} if completion == answer else 0.0\n")
    finding = only(recipe.examine(), "problem")
    assert "returned" in finding.what and "on the answer gold ('100" in finding.what and "finite" in finding.fix


def test_a_reward_that_does_not_apply_to_the_right_answer(recipe) -> None:
    recipe.write(reward="def reward(completion, answer):\n    return None if answer in completion else 0.0\n")
    assert "none applies to the task's own answer" in only(recipe.examine(), "problem").what


def test_a_constant_reward(recipe) -> None:
    finding = only(recipe.write(reward="def reward(completion, answer):\n    return 0.5\n").examine(), "problem")
    assert "is 0.5 for everything that was tried" in finding.what


def test_a_constant_reward_is_no_more_than_suspicious_where_no_answer_is_known(recipe) -> None:
    findings = recipe.write(tasks=[{"prompt": "?"}], reward="def reward(completion):\n    return 0.5\n").examine()
    assert "a constant teaches nothing" in only(findings, "warning").what


def test_a_reward_that_likes_garbage_as_much(recipe) -> None:
    recipe.write(reward="def reward(completion, answer):\n    return min(1.0, len(completion) / 20)\n")
    assert "gives garbage 1 and the task's own answer" in only(recipe.examine(), "warning").what


@pytest.mark.parametrize("form", ["\\\\boxed{{{answer}}}", "<answer>{answer}</answer>", "#### {answer}"])
def test_a_right_answer_may_have_to_be_wrapped(recipe, form) -> None:
    findings = recipe.write(reward=f"def reward(completion, answer):\n    return float(f'{form}' in completion)\n").examine()
    assert {finding.level for finding in findings} == {"ok"}, findings
    assert "gold" in findings[-1].what and " 1, half 0" in findings[-1].what


def test_a_batch_reward_of_the_wrong_shape(recipe) -> None:
    finding = only(recipe.write(reward="def reward(completions, **columns):\n    return [1.0]\n").examine(), "problem")
    assert "returned 1 values for" in finding.what


def test_a_reward_that_uses_signals(recipe) -> None:
    recipe.write(
        reward="import signal\ndef reward(completion, answer):\n    signal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
        "    return float(completion == answer)\n"
    )
    subject = recipe.subject(orchestrate="inline")
    finding = only(list(examine(subject)), "warning")  # in its one thread the reward would work
    assert "signal only works in main thread" in finding.what and "timeout_seconds=None" in finding.fix
    subject.recipe = dataclasses.replace(subject.recipe, orchestrate="local")
    assert only(list(reward.check_reward(subject)), "problem").fix == finding.fix


@pytest.mark.long
def test_a_reward_that_holds_the_interpreter_ends_the_doctor_with_its_stack(recipe) -> None:
    recipe.write(reward="import re\ndef reward(completion):\n    return bool(re.match('(a+)+$', 'a' * 40 + 'b'))\n")
    arguments = ["doctor", str(recipe.path), "--reward.timeout=0.1"]
    done = subprocess.run([sys.executable, "-m", "headrace.cli", *arguments], capture_output=True, text=True)
    assert done.returncode == 1 and "mine.py" in done.stderr and "in reward" in done.stderr
    assert "ok       recipe" in done.stdout and "no problem" not in done.stdout


# The model


def test_a_model_that_is_not_there(recipe, tmp_path) -> None:
    findings = recipe.examine(model__path=str(tmp_path / "absent"))
    problems = [finding for finding in findings if finding.level == "problem"]
    assert all("the folder does not exist" in finding.what for finding in problems) and problems
    assert findings[-1].what.startswith("reward 'reward': gold 1")  # which is tried all the same


def test_an_architecture_that_is_not_served(recipe, tmp_path, tiny_model) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(tiny_model, folder)
    config = {"model_type": "qwen3_next", "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    (folder / "config.json").write_text(json.dumps(config))
    finding = only(recipe.examine(model__path=str(folder)), "problem")
    assert "(qwen3_next) has layers of kind linear_attention" in finding.what and "full or sliding attention" in finding.fix


def test_a_folder_without_a_tokenizer(recipe, tmp_path, tiny_model) -> None:
    """transformers makes one of a single token there."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    finding = only(recipe.examine(model__path=str(folder)), "problem")
    assert "there is no tokenizer" in finding.what and finding.fix == "put tokenizer.json beside the weights"


def test_the_tokens_that_end_a_turn_are_those_of_the_run(recipe, tmp_path, tiny_model) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [1, 3]}))

    def said(**overrides) -> str:
        findings = recipe.examine(model__path=str(folder), **overrides)
        return next(finding.what for finding in findings if finding.what.startswith("tokenizer"))

    assert said() == "tokenizer: 102 tokens, a turn ends with <|end|> or <|user|>"
    assert said(sampling__stop=["<|system|>", "x"]).endswith("<|end|> or <|system|> or <|user|>")
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 4}))
    assert said().endswith("<|end|> or <|assistant|>")
    finding = next(finding for finding in recipe.examine(sampling__stop=["<|end|>\n"]) if finding.level == "problem")
    assert "'<|end|>' is a special token" in finding.what and "alone" in finding.fix


def test_a_folder_of_which_no_weights_are_read(recipe, tmp_path, tiny_model) -> None:
    """The header of the file alone says how many parameters there are."""
    folder = tmp_path / "cut"
    shutil.copytree(tiny_model, folder)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: 8 + int.from_bytes(content[:8], "little")])
    os.truncate(weights, len(content))  # as long as it was, and zeros but for the header
    findings = recipe.examine(model__path=str(folder))
    assert {finding.level for finding in findings} == {"ok"}
    builtin = recipe.examine()
    counts = [f.what.split(": ")[1] for each in (findings, builtin) for f in each if f.what.startswith("model ")]
    assert len(counts) == 2 and counts[0] == counts[1]
    weights.unlink()
    assert "it has no weights in safetensors files" in only(recipe.examine(model__path=str(folder)), "problem").what


def test_a_model_that_a_server_cannot_divide_among_its_gpus(recipe) -> None:
    found = recipe.examine(engine__kind="vllm", engine__vllm__arguments={"tensor_parallel_size": 3})
    finding = next(each for each in found if each.level == "problem")
    assert "engine.vllm.arguments.tensor_parallel_size = 3" in finding.what and finding.fix == "set it to 1"


@pytest.mark.parametrize(("template", "level"), [(STRIPPING, "warning"), (None, "problem")])
def test_a_template_that_rewrites_history_or_is_not_there(recipe, tmp_path, tiny_model, template, level) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    recipe.write(tasks=[{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in TASKS])
    finding = only(recipe.examine(model__path=str(folder)), level)
    if template:
        assert "with 3 turns, '<think>" in finding.what and "multi-turn rollouts fork" in finding.what
    else:
        assert "chat template: there is none, and prompts are chat messages" in finding.what


def test_prompts_that_are_too_long(recipe) -> None:
    finding = only(recipe.write(tasks=[{"prompt": "9" * 40, "answer": "9"}]).examine(model__context=32), "problem")
    assert "40 tokens at most" in finding.what and "64 of 64 do not fit" in finding.what
    assert "raise model.context to 56" in finding.fix
    some = [*TASKS, {"prompt": "9" * 40, "answer": "1009"}]
    assert "do not fit" in only(recipe.write(tasks=some).examine(model__context=32), "warning").what
    finding = only(recipe.write(tasks=[{"prompt": "9" * 20, "answer": "9"}]).examine(model__context=32), "warning")
    assert "are cut short" in finding.what and "raise model.context to 36" in finding.fix


def test_a_gpu_that_is_asked_for_and_not_there(recipe, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "torch sees no GPU" in only(recipe.examine(device="cuda"), "problem").what


# The machine


def test_a_folder_in_use_is_named_with_the_process(tmp_path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lock = FolderLock(folder)
    assert lock.acquire()
    try:
        (asked,) = machine.check_runs(Subject(run_dir=folder))
        (other,) = machine.check_runs(Subject(runs=tmp_path))
    finally:
        lock.release()
    assert (asked.level, other.level) == ("problem", "warning")
    assert "is in use by" in asked.what and "another --run-dir" in asked.fix
    if Path("/proc/self/fd").is_dir():
        assert f"process {os.getpid()} (" in asked.what
    assert list(machine.check_runs(Subject(run_dir=folder))) == []


def test_a_run_whose_process_died_can_be_gone_on_with(tmp_path) -> None:
    folder = tmp_path / "run"
    lock = FolderLock(folder)
    assert lock.acquire()
    lock.release()
    write_summary(folder, {"status": "running", "version": 7})
    (finding,) = machine.check_runs(Subject(runs=tmp_path))
    assert finding.level == "warning" and "its process died, at version 7" in finding.what
    write_summary(folder, {"status": "finished", "version": 9})
    assert list(machine.check_runs(Subject(runs=tmp_path))) == []


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (
            {"sync.transport": "cuda_ipc", "exact": True, "staleness.max_lag": 1},
            "sync.transport = 'cuda_ipc': the run is on the CPU",
        ),
        ({"sync.folder": "/no/such"}, "sync.folder = '/no/such': there is no such folder"),
        ({"sync.transport": "files", "sync.folder": "/no/such"}, "sync.folder = '/no/such': there is no such folder"),
        ({"sync.transport": "http", "sync.host": "not a host"}, "sync.host = 'not a host': cannot be listened on"),
        ({"sync.transport": "collective", "sync.host": "192.0.2.1"}, "sync.host = '192.0.2.1': cannot be listened on"),
        ({"sync.transport": "http", "sync.host": "0.0.0.0"}, "sync.host = '0.0.0.0': engines are told this address"),
    ],
)
def test_a_transport_that_this_machine_cannot_run_is_refused_by_a_run_too(overrides, what) -> None:
    from headrace.config import make_recipe
    from headrace.launch.build import preflight
    from headrace.launch.inputs import UserInputs
    from headrace.settings import ConfigError

    recipe = make_recipe({"tasks": [{"source": "builtin:sort_digits"}], **overrides})
    assert only(list(model.check_device(Subject(recipe=recipe))), "problem").what.startswith(what)
    with pytest.raises(ConfigError) as caught:
        preflight(recipe, UserInputs())
    assert str(caught.value).startswith(what)


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        ({"train.loss": "ppo"}, "train.advantage = 'group': the loss 'ppo' trains values; set it to 'gae'"),
        ({"train.advantage": "gae"}, "train.advantage = 'gae': the loss 'grpo' trains no values; set train.loss = 'ppo'"),
        ({"train.loss": "distill"}, "train.teacher = '': there is no teacher to distil from"),
        ({"train.advantage": "distill"}, "train.teacher = '': there is no teacher to distil from"),
        (
            {"train.loss": "odd.py:hard"},
            "train.loss = 'odd.py:hard': it needs the column 'difficulty', which only an environment",
        ),
        ({"train.loss": "m2po", "train.constants": {"limit": 1}}, "train.constants.limit: the loss 'm2po' takes no 'limit'"),
    ],
)
def test_a_loss_that_cannot_have_what_it_needs_is_refused(overrides, what, tmp_path, monkeypatch) -> None:
    from headrace.config import make_recipe
    from headrace.launch.build import preflight
    from headrace.launch.inputs import UserInputs
    from headrace.settings import ConfigError

    (tmp_path / "odd.py").write_text("def hard(tokens):\n    return -tokens.logprobs, {}\nhard.needs = ('difficulty',)\n")
    monkeypatch.chdir(tmp_path)
    recipe = make_recipe({"tasks": [{"source": "builtin:sort_digits"}], **overrides})
    finding = only(list(model.check_device(Subject(recipe=recipe))), "problem")
    assert f"{finding.what}; {finding.fix}".startswith(what)
    with pytest.raises(ConfigError) as caught:
        preflight(recipe, UserInputs())
    assert str(caught.value).startswith(what)
    if "environment" in what or "teacher" in what:
        preflight(recipe, UserInputs(environment=object()))  # which may bring any column


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(SyncError, match=r"sync\.folder = .*: it cannot be written to; name another"):
        transport_class("files").check(folder=str(tmp_path), host="", on_gpu=False)


def test_more_room_than_there_is(tmp_path) -> None:
    from headrace.config import make_recipe

    recipe = make_recipe({"checkpoint.keep": 5, "orchestrate": "inline"})
    shape = ModelShape.of(LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64))
    subject = Subject(recipe=recipe, runs=tmp_path / "not" / "yet", num_parameters=10**14, shape=shape, context=256)
    (disk,) = capacity.check_disk(subject)
    (shared,) = capacity.check_shared_memory(subject)
    (memory,) = capacity.check_memory(subject)
    assert disk.level == memory.level == "problem" and shared.level == "warning"  # inline puts nothing there
    assert "5 checkpoints and the next take 7200.0 TB" in disk.what and str(tmp_path) in disk.what
    assert "two versions of the weights take 800.0 TB" in shared.what and "remount" in shared.fix
    subject.recipe = dataclasses.replace(recipe, orchestrate="local")
    assert next(capacity.check_shared_memory(subject)).level == "problem"
    subject.recipe = make_recipe({"sync.transport": "http"})
    assert next(capacity.check_shared_memory(subject)).level == "warning"
    subject.recipe = make_recipe({"sync.transport": "http", "engine.kind": "vllm", "engine.count": 3})
    finding = next(capacity.check_shared_memory(subject))
    assert finding.level == "problem" and "4 versions, 2 of them for servers, of the weights take 1600.0 TB" in finding.what
    on_ray = {"orchestrate": "ray", "cluster.listen": "127.0.0.1:0", "sync.transport": "http"}  # no server is here
    subject.recipe = make_recipe({**on_ray, "engine.kind": "vllm", "engine.count": 3})
    finding = next(capacity.check_shared_memory(subject))
    assert finding.level == "warning" and "two versions of the weights take 800.0 TB" in finding.what
    subject.recipe = make_recipe({"sync.folder": str(tmp_path)})
    finding = next(capacity.check_shared_memory(subject))
    assert finding.level == "problem" and finding.fix == "make room there, or name another folder in sync.folder"


def test_a_check_that_fails_is_told_and_the_rest_is_made() -> None:
    def broken(subject: Subject):
        yield Finding("ok", "before")
        raise PermissionError("not for you")

    assert [finding.what for finding in check()(broken)(Subject())] == ["before", "PermissionError: not for you"]


@pytest.mark.parametrize(
    ("dtype", "device", "is_said"), [("float32", "cuda", 1), ("bfloat16", "cuda", 0), ("float32", "cpu", 0)]
)
def test_float32_on_a_gpu_is_called_slow(dtype, device, is_said, tmp_path, monkeypatch) -> None:
    from headrace.config import make_recipe
    from headrace.launch import build
    from headrace.launch.inputs import UserInputs

    monkeypatch.setattr(build, "choose_device", lambda _: device)
    settings = {"path": str(tmp_path), "dtype": dtype}
    notes = build.preflight(make_recipe({"tasks": [{"source": "builtin:sort_digits"}], "model": settings}), UserInputs())
    assert sum("model.dtype = 'float32'" in note for note in notes) == is_said
