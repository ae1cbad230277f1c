"""Whole runs, small and real: what they promise about lag, books, determinism and resuming."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from helpers import TASKS, books_close, length_reward, mismatches, same_weights, small_run, weights

import headrace
from headrace.engine.stop_strings import completes, decoder_of
from headrace.launch.build import special_stops
from headrace.model.load import load_tokenizer
from headrace.model.tiny import build_tokenizer
from headrace.observe.inspect import read_rollouts
from headrace.observe.sinks import read_metrics
from headrace.observe.timeline import STATES
from headrace.records import FinishReason
from headrace.run.metrics import trainer_metrics

SUMMARY_KEYS = {
    "status", "steps", "version", "success_before", "success_after", "greedy_before", "greedy_after", "seconds", "tokens",
    "lag", "accounting", "time_budget", "bound_by", "bound_share",
}  # fmt: skip


def timed_saves(monkeypatch) -> list[float]:
    """How long each checkpoint took to write."""
    from headrace.run.checkpoint import CheckpointStore

    taken: list[float] = []
    original = CheckpointStore.save

    async def timed(self, *arguments, **keywords):
        started = time.perf_counter()
        try:
            return await original(self, *arguments, **keywords)
        finally:
            taken.append(time.perf_counter() - started)

    monkeypatch.setattr(CheckpointStore, "save", timed)
    return taken


def test_a_run_leaves_what_the_design_says(tmp_path, monkeypatch):
    saves = timed_saves(monkeypatch)
    result = small_run(tmp_path / "run", observe={"keep_rollouts_every": 2, "sinks": ["tensorboard"]})
    folder = result.folder
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == result.summary and summary.keys() >= SUMMARY_KEYS
    assert summary["status"] == "finished" and summary["version"] == 6 and books_close(summary)
    assert summary["accounting"]["trained"] == 96 and summary["accounting"]["evaluation"] == 16
    assert summary["seconds"].keys() >= {"setup", "warmup", "first_step", "rl"}
    for shares in summary["time_budget"].values():
        assert sum(shares.values()) == pytest.approx(1.0) and min(shares.values()) >= 0
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    seconds = sum(value for row in rows for name, value in row.items() if name.startswith("seconds/trainer/"))
    assert seconds + saves[-1] == pytest.approx(summary["seconds"]["rl"], rel=0.1), "the last save comes after the last row"
    for row in rows:
        windows = [sum(row[f"seconds/{role}/{state}"] for state in states) for role, states in STATES.items()]
        assert windows == pytest.approx([windows[0]] * len(windows), abs=1e-3), "every role accounts for the same time"
    assert (folder / "recipe.toml").exists() and (folder / "resolved.toml").exists()
    assert list((folder / "tensorboard").iterdir()) and (folder / "logs" / "launcher.log").exists()
    trace = (folder / "trace.json").read_text()
    events = json.loads(trace)
    assert {event["name"] for event in events} >= {"decode", "compute", "publish", "version 6"}
    step, rollouts = read_rollouts(folder)
    assert step == 6 and len(rollouts) == 16 and all(rollout.reward is not None for rollout in rollouts)
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert checkpoints == ["step-3", "step-6"]


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path):
    first, again, other = (small_run(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert same_weights(first.checkpoint, again.checkpoint)
    assert not same_weights(first.checkpoint, other.checkpoint)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_lag_is_what_max_lag_promises(tmp_path, max_lag):
    result = small_run(tmp_path / "run", steps=8, staleness={"max_lag": max_lag})
    assert result.summary["lag"]["max"] <= max_lag and books_close(result.summary)
    if max_lag == 0:
        assert result.summary["lag"]["mean"] == 0 and result.summary["accounting"]["unused"] == 0
    else:
        assert result.summary["lag"]["mean"] > 0.3


@pytest.mark.parametrize(
    "settings",
    [
        {"buffer": {"kind": "synchronous"}},
        {"buffer": {"kind": "one_ahead"}},
        {"buffer": {"kind": "bounded", "depth": 2}, "staleness": {"max_lag": 2}},
        {"buffer": {"kind": "stream"}, "staleness": {"max_lag": 2, "gate": "none"}},
        {"buffer": {"kind": "stream"}, "staleness": {"gate": "none", "reject": "never", "correct": "tis"}},
        {"buffer": {"order": "submission"}, "staleness": {"correct": "mis"}},
        {"partial": {"interrupt": "drain"}},
        {"partial": {"interrupt": "abort"}},
        {"partial": {"interrupt": "retract"}},
        {"train": {"mini_batches": 2}, "staleness": {"correct": "tis"}},
        {"sampling": {"temperature": 0.8, "top_p": 0.9, "top_k": 20}},
        {"train": {"advantage": "leave_one_out", "loss_mean": "sequence", "schedule": "cosine"}},
    ],
    ids=lambda settings: " ".join(f"{key}:{value}" for key, value in settings.items()),
)
def test_every_setting_runs_and_the_books_close(tmp_path, settings):
    result = small_run(tmp_path / "run", steps=5, **settings)
    assert result.summary["status"] == "finished" and books_close(result.summary)
    rows = read_metrics(result.folder / "metrics.jsonl")
    assert all(np.isfinite(row["train/loss"]) for row in rows) and max(mismatches(rows)) < 1e-4
    if settings.get("buffer", {}).get("kind") == "synchronous":
        assert result.summary["lag"]["max"] == 0
    if settings.get("partial", {}).get("interrupt") == "drain":
        _, rollouts = read_rollouts(small_run(tmp_path / "kept", observe={"keep_rollouts_every": 1}, **settings).folder)
        assert all(len(set(rollout.versions[rollout.is_sampled].tolist())) == 1 for rollout in rollouts)


class Killed(BaseException):
    """Stands for a SIGKILL: nothing after it runs, nothing handles it."""


def run_and_kill(folder, monkeypatch, *, at: int, **settings) -> None:
    from headrace.run.session import Session

    original = Session._write_version

    def dying(self, *arguments):
        if self.policy.version == at:
            raise Killed
        return original(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Session, "_write_version", dying)
        small_run(folder, **settings)


@pytest.mark.parametrize("max_lag", [0, 1, pytest.param(2, marks=pytest.mark.long)])
def test_exact_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, monkeypatch, max_lag):
    settings = {"exact": True, "steps": 9, "staleness": {"max_lag": max_lag}, "evaluate": {"every": 2}}
    whole = small_run(tmp_path / "whole", **settings)
    run_and_kill(tmp_path / "killed", monkeypatch, at=5, **settings)
    assert not (tmp_path / "killed" / "checkpoints" / "step-6").exists()
    resumed = small_run(tmp_path / "killed", **settings)
    for step in (3, 6, 9):
        manifest = json.loads((tmp_path / "whole" / "checkpoints" / f"step-{step}" / "manifest.json").read_text())
        assert manifest["in_flight"] == [], "the run comes to rest before it is saved; no rollout is begun twice"
        assert same_weights(*(tmp_path / name / "checkpoints" / f"step-{step}" for name in ("whole", "killed")))
    curve = {row["version"]: row for row in read_metrics(tmp_path / "whole" / "metrics.jsonl")}
    again = {row["version"]: row for row in read_metrics(tmp_path / "killed" / "metrics.jsonl")}
    for name in ("reward", "train/loss", "train/grad_norm", "lag_mean"):
        assert [curve[v][name] for v in range(1, 10)] == [again[v][name] for v in range(1, 10)], name
    assert whole.summary["lag"] == resumed.summary["lag"]
    assert whole.summary["accounting"] == resumed.summary["accounting"]
    if max_lag:
        assert whole.summary["lag"]["mean"] > 0


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["muon", "adamw_8bit"])
def test_exact_resumes_bitwise_with_every_optimizer_and_groups_of_parameters(tmp_path, monkeypatch, optimizer):
    train = {"optimizer": optimizer, "schedule": "wsd", "decay_steps": 2, "eps": 1e-6}
    train["parameters"] = [{"match": "*.embed_tokens.*", "freeze": True}, {"match": "*.mlp.*", "learning_rate": 0.5}]
    settings = {"exact": True, "steps": 4, "checkpoint": {"every": 2}, "train": train, "staleness": {"max_lag": 1}}
    whole = small_run(tmp_path / "whole", **settings)
    run_and_kill(tmp_path / "killed", monkeypatch, at=3, **settings)
    resumed = small_run(tmp_path / "killed", **settings)
    assert whole.summary["status"] == resumed.summary["status"] == "finished"
    assert same_weights(*(tmp_path / name / "checkpoints" / "step-4" for name in ("whole", "killed")))


def test_exact_mismatch_is_zero(tmp_path):
    result = small_run(tmp_path / "run", exact=True, steps=4, staleness={"max_lag": 0})
    assert [row["train/mismatch_max"] for row in read_metrics(result.folder / "metrics.jsonl")] == [0.0] * 4


def test_a_killed_run_goes_on_from_its_checkpoint_and_no_rollout_is_lost(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    run_and_kill(folder, monkeypatch, at=5, steps=8)
    manifest = json.loads((folder / "checkpoints" / "step-3" / "manifest.json").read_text())
    resumed = small_run(folder, steps=8)
    assert resumed.summary["version"] == 8 and books_close(resumed.summary)
    assert resumed.summary["accounting"]["trained"] == 8 * 16
    last = json.loads((folder / "checkpoints" / "step-8" / "manifest.json").read_text())
    assert last["lineage"] != manifest["lineage"] and last["ancestors"] == {manifest["lineage"]: 3}
    assert resumed.summary["lag"]["max"] <= 1


def test_a_damaged_checkpoint_is_passed_over(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    run_and_kill(folder, monkeypatch, at=7, steps=9)
    model = folder / "checkpoints" / "step-6" / "model.safetensors"
    content = bytearray(model.read_bytes())
    content[-100] ^= 1
    model.write_bytes(content)
    result = small_run(folder, steps=9, quiet=False)
    said = capsys.readouterr().out
    assert "step-6 is damaged (model.safetensors has changed)" in said and "resumed    version 3 of 9" in said
    assert result.summary["status"] == "finished"


def test_training_changes_behaviour(tmp_path):
    """The reward of shorter answers rises: the whole loop pushes the policy the right way."""
    result = small_run(tmp_path / "run", steps=40, train={"learning_rate": 5e-3}, evaluate={"limit": 0})
    rewards = [row["reward"] for row in read_metrics(result.folder / "metrics.jsonl")]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.15


def test_several_sources_and_rewards(tmp_path):
    def batched(prompts, completions, completion_ids, answer, **columns):
        assert len(prompts) == len(completions) == len(completion_ids) == len(answer) == len(columns["kind"])
        return [None if kind == "b" else 1.0 for kind in columns["kind"]]

    tasks = [([{**row, "kind": "a"} for row in TASKS], 3.0), ([{**row, "kind": "b"} for row in TASKS], 1.0)]
    result = small_run(
        tmp_path / "run", tasks=tasks, reward=[batched, length_reward], held_out=None, observe={"keep_rollouts_every": 1}
    )
    seen = [set(rollout.rewards) for step in range(1, 7) for rollout in read_rollouts(result.folder, step)[1]]
    assert {"batched", "length_reward"} in seen and {"length_reward"} in seen
    both = sum(names == {"batched", "length_reward"} for names in seen) / len(seen)
    assert 0.5 < both < 0.95 and result.summary["success_before"] is None


def test_the_model_that_sft_made_is_cached(tmp_path, cache_folder, capsys):
    settings = {
        "tasks": None, "held_out": None, "reward": None, "quiet": False, "steps": 2,
        "sft": {"steps": 10, "check_every": 5, "batch": 8, "until_success": 1.0},
    }  # fmt: skip
    recipe = tmp_path / "own.toml"
    recipe.write_text('[[tasks]]\nsource = "builtin:sort_digits"\n')
    small_run(tmp_path / "a", recipe=recipe, **settings)
    assert "step 5 of 10: loss" in capsys.readouterr().out
    small_run(tmp_path / "b", recipe=recipe, **settings)
    assert "cached in" in capsys.readouterr().out
    assert not weights(tmp_path / "a" / "checkpoints" / "step-2").keys() ^ weights(tmp_path / "b/checkpoints/step-2").keys()


def test_rewards_have_the_names_they_are_given(tmp_path):
    @headrace.reward(name="short")
    def first(prompt, completion, **row):
        return 1.0 / (1 + len(completion))

    assert first("x", "ab") == pytest.approx(1 / 3)

    def second(prompt, completion, **row):
        return 0.5

    result = small_run(
        tmp_path / "run",
        reward=[first, second, second],
        **{"steps": 2, "held_out": None, "observe": {"keep_rollouts_every": 1}},
    )
    _, rollouts = read_rollouts(result.folder)
    assert set(rollouts[0].rewards) == {"short", "second_1", "second_2"}
    assert rollouts[0].reward == pytest.approx(sum(rollouts[0].rewards.values()))


@pytest.mark.parametrize("at", [3, 4, 5])
def test_exact_stopping_anywhere_does_not_change_what_follows(tmp_path, monkeypatch, at):
    from headrace.run.session import Session

    settings = {"exact": True, "steps": 9, "staleness": {"max_lag": 1}}
    whole = small_run(tmp_path / "whole", **settings)
    original = Session._write_version

    def stopping(self, *arguments):
        if self.policy.version == at:
            self.run.stop()
        return original(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Session, "_write_version", stopping)
        small_run(tmp_path / "stopped", **settings)
    saved = [path.name for path in (tmp_path / "stopped" / "checkpoints").glob("step-*")]
    assert saved == ["step-3"], "checkpoints are made every three versions, and nowhere else"
    again = small_run(tmp_path / "stopped", **settings)
    assert same_weights(whole.checkpoint, again.checkpoint) and whole.summary["lag"] == again.summary["lag"]
    versions = [row["version"] for row in read_metrics(again.folder / "metrics.jsonl")]
    assert versions == list(range(1, 10))


def test_without_a_gate_what_is_in_flight_is_still_bounded(tmp_path, monkeypatch):
    from headrace.run.policy import PolicyState

    seen = []
    original = PolicyState.submit

    def counting(self, task):
        assert self.in_flight.num_unfinished < max(self.recipe.train.batch, 2 * self.recipe.engine.slots)
        works = original(self, task)
        seen.append((self.in_flight.num_unfinished, len(self.in_flight)))
        return works

    monkeypatch.setattr(PolicyState, "submit", counting)
    staleness = {"gate": "none", "max_lag": 2}
    result = small_run(tmp_path / "run", steps=12, buffer={"kind": "stream"}, staleness=staleness)
    assert result.summary["status"] == "finished" and result.summary["lag"]["max"] <= 2 and len(seen) >= 24
    assert max(groups for _, groups in seen) <= 8  # four times what keeps the engine's slots busy


def test_rollouts_are_computed_again_inside_their_calls(tmp_path, monkeypatch):
    """Long rollouts, so that many run while the weights change: none ends for it, and the engine retracts every time."""
    from headrace.engine.native.core import EngineCore

    retracted = []
    original = EngineCore.retract_running

    def counting(self):
        retracted.append(self.num_running)
        original(self)
        assert self.num_running == 0

    monkeypatch.setattr(EngineCore, "retract_running", counting)
    settings = {"sampling": {"max_tokens": 24}, "engine": {"slots": 4}, "observe": {"keep_rollouts_every": 1}}
    result = small_run(tmp_path / "run", steps=5, partial={"interrupt": "retract"}, **settings)
    assert result.summary["status"] == "finished" and books_close(result.summary)
    assert len(retracted) >= 4 and max(retracted) > 0
    rollouts = [rollout for step in range(1, 6) for rollout in read_rollouts(result.folder, step)[1]]
    assert all(len(rollout.calls) == 1 and rollout.finish_reason is not FinishReason.ABORT for rollout in rollouts)
    assert any(len(set(rollout.versions[rollout.is_sampled].tolist())) > 1 for rollout in rollouts)
    assert max(mismatches(read_metrics(result.folder / "metrics.jsonl"))) < 1e-4


def test_special_tokens_are_no_part_of_the_text_that_stop_texts_are_looked_for_in():
    tokenizer = build_tokenizer()
    user, end = tokenizer.convert_tokens_to_ids(["<|user|>", "<|end|>"])
    ids = [*tokenizer("ab")["input_ids"], end]
    assert decoder_of(tokenizer)(ids) == "ab" and not completes(["end", "<|", "b<"], ids, decoder_of(tokenizer))
    assert special_stops(("b", "<|user|>", "<|end|>"), tokenizer) == (user, end)
    problem = r"stop = '<\|end\|>\\n': '<\|end\|>' is a special token.*write '<\|end\|>' alone"
    with pytest.raises(headrace.ConfigError, match=problem):
        special_stops(("<|end|>\n",), tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>>"]})  # one that holds another
    assert special_stops(("<|end|>>",), tokenizer) == (tokenizer.convert_tokens_to_ids("<|end|>>"),)


@pytest.mark.parametrize("interrupt", ["keep", "retract", "abort"])
def test_rollouts_end_at_the_stop_text(tmp_path, interrupt):
    stops = ("Q", "#", "7", "never drawn so", "end", "<|user|>")
    settings = {"sampling": {"max_tokens": 24, "stop": stops}, "observe": {"keep_rollouts_every": 1}}
    result = small_run(tmp_path / "run", steps=4, partial={"interrupt": interrupt}, **settings)
    assert result.summary["status"] == "finished" and books_close(result.summary)
    tokenizer = load_tokenizer(str(result.checkpoint))
    decode, ends = decoder_of(tokenizer), tokenizer.convert_tokens_to_ids(["<|end|>", "<|user|>"])
    num_stopped = 0
    for rollout in [rollout for step in range(1, 5) for rollout in read_rollouts(result.folder, step)[1]]:
        text = decode(rollout.token_ids[rollout.is_sampled].tolist())
        assert not any(stop in text[:-1] for stop in stops), text
        if text.endswith(stops):
            assert rollout.finish_reason is FinishReason.STOP
            num_stopped += 1
        else:
            assert rollout.token_ids[-1] in ends or rollout.num_sampled == 24
            assert not set(ends) & set(rollout.token_ids[rollout.is_sampled][:-1].tolist())
    assert num_stopped >= 10


def test_the_mismatch_is_that_of_the_first_optimizer_step_if_it_has_one() -> None:
    first, later = {"loss": 1.0, "mismatch": 0.1, "mismatch_max": 0.2}, {"loss": 3.0, "mismatch": 0.5, "mismatch_max": 0.6}
    seen = trainer_metrics([first, later], memory_peak=1)
    assert seen == {"train/loss": 2, "train/mismatch": 0.1, "train/mismatch_max": 0.2, "train/memory_peak": 1}
    assert trainer_metrics([{"loss": 1.0}, later], memory_peak=1) == {"train/loss": 2, "train/memory_peak": 1}
