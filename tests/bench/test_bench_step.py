"""The benchmark of whole steps: its arithmetic, its peers, and one small run for real."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import threading
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from headrace.bench import measure as measuring, step, step_trl
from headrace.bench.child import PeerFailed
from headrace.bench.harness import run_parts
from headrace.bench.loads import write_random_model
from headrace.bench.measure import GpuMemory
from headrace.bench.step import (
    Peers,
    budget_of,
    first_word_is_even,
    measure,
    role_rows,
    settings_of,
    step_rows,
)
from headrace.bench.step_plan import LONG, Variant, make_plan, variants
from headrace.bench.step_trl import TrlSteps, measure_steps
from headrace.bench.stubs import PlannedLengths
from headrace.config import make_recipe
from headrace.records import Rollout, Sampling

PLAN = dataclasses.replace(make_plan("cpu", quick=True), steps=1, orchestrate="inline")


def row(seconds: float, *, tokens: int, lag: float = 0.0, **states: float) -> dict:
    times = {f"seconds/{name.replace('__', '/').replace('_', '-')}": value for name, value in states.items()}
    return {"seconds": seconds, "tokens_per_second": tokens / seconds, "lag_mean": lag, **times}


def test_figures_are_medians_and_shares_of_all_steps(capsys):
    seen = [
        row(1.0, tokens=100, lag=1.0, engine__decode=0.5, engine__wait_gate=0.5, trainer__compute=1.0, scorer__wait=1.0),
        row(2.0, tokens=100, lag=0.5, engine__decode=2.0, engine__wait_gate=0.0, trainer__compute=2.0, scorer__wait=2.0),
        row(4.0, tokens=100, lag=0.0, engine__decode=1.0, engine__wait_gate=3.0, trainer__compute=4.0, scorer__wait=4.0),
    ]
    assert budget_of(seen) == {"engine, decode": 0.5, "engine, wait-gate": 0.5, "trainer, compute": 1.0}
    plan = make_plan("cuda", quick=False)
    peers = Peers(rates={"TRL": 10.0})
    rows = {r.name.removeprefix("x: "): r for r in step_rows(plan, Variant("x", {}), seen, peers=peers)}
    assert rows["step"].value == 2.0 and rows["completions"].value == 50 and rows["mean lag"].value == 0.5
    assert rows["completions"].peers == peers.rates and rows["completions ÷ TRL"].value == 5
    assert {name: r.goal for name, r in rows.items() if r.goal} == {"completions ÷ TRL": "≥ 6"}
    assert rows["engine, decode"].value == 0.5 and not any("scorer" in name for name in rows)
    on_tail = {r.name: r.value for r in step_rows(plan, Variant("x", {}, has_tail=True), seen, peers=peers)}
    assert on_tail["x: completions"] == pytest.approx(300 / 7) and on_tail["x: rejected as too old"] == 0
    for variant, others in ((Variant("x", {}, has_tail=True), peers), (Variant("x", {}), Peers())):
        assert not any(r.goal or r.peers for r in step_rows(plan, variant, seen, peers=others))


def test_every_variant_is_a_valid_recipe():
    found = variants()
    assert {"in-turn", "in-turn-asleep", "lag-1", "lag-2", "in-turn-long-tail", "lag-2-long-tail"} <= found.keys()
    for variant in found.values():
        recipe = make_recipe(settings_of(PLAN, variant, "builtin:tiny"))
        assert recipe.staleness.max_lag == variant.max_lag and recipe.sampling.min_tokens == 0
        assert recipe.steps == PLAN.warmups + PLAN.steps + variant.max_lag


def test_a_long_tail_gives_every_sibling_its_length_and_every_step_the_same_work():
    plan = dataclasses.replace(PLAN, completions=8, siblings=4, tokens=40, cap=128, warmups=1, warmup_cap=16)
    lengths = plan.lengths(has_tail=True)
    assert len(lengths) == 8 and max(lengths) <= 128 and 25 < np.mean(lengths) < 50 and len(set(lengths[:4])) > 1
    asked = []

    class FakeClient:
        def __init__(self, number):
            self.group, self.index, self.sampling = f"g{number // 4}", number % 4, Sampling()
            self.episode = f"{self.group}/{self.index}"

        def prompt(self, prompt, template_kwargs=None):
            return Rollout.from_prompt([1, 2], id=self.episode, group=self.group, index=self.index)

        async def generate(self, rollout):
            asked.append(self.sampling.max_tokens)
            return rollout

    environment = PlannedLengths(plan.length_of)
    episodes = [asyncio.run(environment.run({"prompt": "w1"}, FakeClient(number))) for number in range(24)]
    assert asked == [min(length, 16) for length in lengths] + lengths + lengths
    assert episodes[5].group == "g1" and len(episodes[5].rollouts) == 1


def test_long_completions_fit_a_pass_and_have_a_mean_of_a_quarter_of_the_longest():
    for name, longest in LONG.items():
        plan = make_plan("cuda", quick=False, longest=longest)
        lengths = plan.lengths(has_tail=True)
        assert 0.9 * longest < max(lengths) <= longest and 0.2 < np.mean(lengths) / longest < 0.3
        assert plan.micro_batch_tokens >= plan.prompt_tokens + longest and plan.completions % plan.siblings == 0
        assert f"{sum(lengths):,} a step" in plan.describe() and "groups of 8" in plan.describe()
        found = variants(name)
        assert found["in-turn"].name == f"in turn, {name}" and {"lag-1", "lag-2"} <= found.keys()
        assert all(variant.has_tail for variant in found.values())
        assert make_recipe(settings_of(plan, found["lag-2"], "builtin:tiny")).model.context == 64 + longest


def test_roles_are_measured_while_they_are_at_work(monkeypatch):
    plan = dataclasses.replace(PLAN, device="cuda", completions=2, tokens=100, prompt_tokens=20)
    monkeypatch.setattr(step, "flops_of", lambda model, lengths, is_frozen: step.PEAK_FLOPS * sum(lengths) / 240)
    times = {"engine__decode": 1.0, "engine__prefill": 1.0, "trainer__wait_batch": 5.0}
    seen = [{**row(9.0, tokens=0, trainer__compute=4.0, **times), "completions/mean_length": each} for each in (50.0, 100.0)]
    rows = {r.name.removeprefix("x: "): r.value for r in role_rows(plan, Variant("x", {}), seen, "model")}
    of_trainer = {"trainer at work, prompts included": 47.5, "trainer at work, MFU": 47.5 / 240}
    assert rows == pytest.approx({"engine at work": 75, **of_trainer})


def test_the_reward_tells_siblings_apart():
    assert first_word_is_even(["w12 w3", "w7", "", "w0"], prompts=[], other=1) == [1.0, 0.0, 0.0, 1.0]


def test_a_run_with_a_long_tail_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)  # other tests go on in this process
    model = write_random_model(PLAN.shape, tmp_path / "model", dtype="float32")
    variant = variants()["lag-1-long-tail"]
    rows = {r.name.removeprefix(f"{variant.name}: "): r.value for r in measure(PLAN, variant, model, tmp_path, peers=Peers())}
    assert rows["completions"] > 0 and rows["step"] > 0 and 0 <= rows["mean lag"] <= 1
    assert sum(value for name, value in rows.items() if name.startswith("trainer, ")) > 0.9
    assert rows["engine at work"] > 0 and rows["trainer at work, prompts included"] > 0 and 0 <= rows["rejected as too old"] < 1
    assert rows["memory of the trainer, predicted"] > 0 and rows["memory of the trainer, peak"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_part_that_fails_shows_its_logs_and_is_in_nobodys_way(tmp_path, monkeypatch, capsys):
    begun = []

    def train(*_, run_dir, **__):
        assert not run_dir.exists()
        begun.append(run_dir)
        (run_dir / "logs").mkdir(parents=True)
        (run_dir / "logs" / "engine-0.log").write_text("first\nwaits for a kernel\n")
        if len(begun) == 1:
            raise RuntimeError("nothing has moved")
        row = {"seconds": 1.0, "tokens_per_second": 2.0, "lag_mean": 0.0, "completions/mean_length": float(PLAN.tokens)}
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps({"version": n, **row}) + "\n" for n in range(3)))
        (run_dir / "summary.json").write_text(json.dumps({"memory": {}}))

    monkeypatch.setattr("headrace.train", train)
    monkeypatch.setattr(step, "write_random_model", lambda shape, folder, dtype: str(folder))
    folder = tmp_path / "bench"
    folder.mkdir()
    parts = {name: step.make_parts(PLAN, folder)[name] for name in ("in-turn", "lag-1")}
    assert run_parts("step", parts, only=None, quick=True, json_file=tmp_path / "out.json") == 1
    said = capsys.readouterr().out
    assert "run/logs/engine-0.log, its last lines:\n  first\n  waits for a kernel\n" in said and "in-turn: failed" in said
    names = {row["name"] for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert "lag 1: completions" in names and len(set(begun)) == 2 and not list(folder.iterdir())


def test_completions_that_end_early_are_no_figure():
    seen = [{"completions/mean_length": float(PLAN.tokens)}, {"completions/mean_length": 11.5}]
    with pytest.raises(RuntimeError, match=rf"11\.5 tokens a completion where {PLAN.tokens} were asked for"):
        step.check_lengths(PLAN, Variant("x", {}), seen)
    step.check_lengths(PLAN, Variant("x", {}, has_tail=True), seen)


def test_memory_is_what_was_taken_since_it_began(monkeypatch):
    gib, used, is_seen = 1 << 30, [3, 5, 9, 4], threading.Event()

    def used_bytes():
        if len(used) == 1:
            is_seen.set()
        return (used.pop(0) if len(used) > 1 else used[0]) * gib

    monkeypatch.setattr(measuring, "_used_bytes", used_bytes)
    monkeypatch.setattr(measuring, "_EVERY", 0.001)
    with GpuMemory() as memory:
        assert is_seen.wait(10)
    assert memory.peak == 6.0
    monkeypatch.setattr(measuring, "_used_bytes", lambda: None)
    with GpuMemory() as nothing:
        pass
    assert nothing.peak is None and step.memory_rows(Variant("x", {}), nothing, {}, peers=Peers()) == []
    by_role = {"trainer": {"predicted": 3 * gib, "peak": 2 * gib}}
    row, *of_trainer = step.memory_rows(Variant("x", {}), memory, by_role, peers=Peers(peaks={"TRL": 99.2}))
    assert (row.goal, row.peers) == ("≤ 99.2", {"TRL": 99.2})
    assert [(row.name, row.value) for row in of_trainer] == [
        ("x: memory of the trainer, predicted", 3.0),
        ("x: memory of the trainer, peak", 2.0),
    ]


@pytest.mark.parametrize(
    ("device", "name"), [("cuda", "TRL 1.16.0 + vLLM 0.26.0"), ("cpu", "TRL 1.16.0 + transformers' generate")]
)
def test_trl_is_asked_for_the_same_steps_at_its_best_settings(tmp_path, monkeypatch, device, name):
    asked = {}

    class FakeTrainer:
        def __init__(self, *, model, args, reward_funcs, train_dataset, processing_class, callbacks):
            asked.update(vars(args), rows=train_dataset, end=processing_class.eos_token, reward=reward_funcs)
            self.clock, self.steps = callbacks[0], args.max_steps

        def train(self):
            self.clock.on_train_begin(None, None, None)
            for _ in range(self.steps):
                self.clock.on_step_end(None, None, None)

    trl, datasets = ModuleType("trl"), ModuleType("datasets")
    trl.GRPOConfig, trl.GRPOTrainer = lambda **given: SimpleNamespace(**given), FakeTrainer
    datasets.Dataset = SimpleNamespace(from_list=list)
    monkeypatch.setitem(sys.modules, "trl", trl)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    model = write_random_model(PLAN.shape, tmp_path / "model", dtype="float32")
    monkeypatch.setattr(step_trl, "Child", in_this_process(lambda order: next(step_trl.train(order, iter(())))))
    monkeypatch.setattr(step_trl, "_version", {"trl": "1.16.0", "vllm": "0.26.0"}.get)
    work = {"model": model, "tasks": PLAN.make_tasks()[:4], "siblings": 8, "tokens": 12}
    found = measure_steps(tmp_path, device=device, completions=64, steps=3, **work)
    assert (found.name, len(found.seconds)) == (name, 3)
    assert found.settings == "micro-batches of 64, gradient checkpointing off, importance sampling correction off"
    assert asked["per_device_train_batch_size"] * asked["gradient_accumulation_steps"] == 64
    assert (asked["num_generations"], asked["max_completion_length"], asked["beta"], asked["end"]) == (8, 12, 0.0, "w0")
    assert asked["gradient_checkpointing"] is asked["vllm_importance_sampling_correction"] is False and len(asked["rows"]) == 4
    assert (asked.get("use_vllm", False), asked["use_cpu"]) == ((True, False) if device == "cuda" else (False, True))


def in_this_process(answer):
    """A child whose answer is `answer(settings)`; what it raises is in its log, and it has then ended."""

    class InThisProcess(contextlib.nullcontext):
        def __init__(self, name, function, settings, *, log):
            super().__init__(self)
            self.name, self.settings, self.log = name, settings, log

        def hear(self, *, seconds):
            try:
                return answer(self.settings)
            except RuntimeError as error:
                self.log.write_text(f"{type(error).__name__}: {error}\nlast line\n")
                raise PeerFailed(f"{self.name}: it has ended: last line") from None

    return InThisProcess


class OutOfMemoryError(RuntimeError):
    """Its name is all that counts."""


@pytest.mark.long
def test_what_goes_wrong_with_trl_is_one_line(tmp_path, capsys):
    plan = dataclasses.replace(PLAN, warmups=0, steps=2)
    assert list(step.measure_trl(plan, str(tmp_path / "absent"), tmp_path, Peers())) == []
    said = capsys.readouterr().out
    assert said.startswith("TRL: it has ended: ") and "absent" in said
    assert said.count("\n") == 1 and not list(tmp_path.iterdir())


def test_trl_is_given_less_at_a_time_and_then_checkpointing_where_it_does_not_fit(tmp_path, monkeypatch):
    orders = []

    def answer(order):
        orders.append((order["micro_batch"], order["checkpointing"]))
        if len(orders) < fits_at:
            raise OutOfMemoryError("99 GiB")
        return [1.5]

    monkeypatch.setattr(step_trl, "Child", in_this_process(answer))
    monkeypatch.setattr(step_trl, "_version", lambda package: "1")
    fits_at = 3
    found = measure_steps(tmp_path, device="cuda", completions=512, steps=1)
    assert orders == [(64, False), (32, False), (32, True)]
    assert found.settings.startswith("micro-batches of 32, gradient checkpointing on")
    orders.clear()
    fits_at = 5
    with pytest.raises(PeerFailed, match="TRL: it has ended: last line"):
        measure_steps(tmp_path, device="cuda", completions=512, steps=1)
    assert len(orders) == 4


def test_trl_is_set_against_ours_where_it_ran(tmp_path, monkeypatch, capsys):
    found = TrlSteps("TRL 1", "micro-batches of 16, gradient checkpointing off", [99.0, 99.0, 2.0, 4.0])
    monkeypatch.setattr(step, "measure_steps", lambda *_, **__: found)
    peers = Peers()
    ((seconds, rate),) = step.measure_trl(dataclasses.replace(PLAN, steps=2), "model", tmp_path, peers)
    assert seconds.value == 3.0 and rate.value == peers.rates["TRL 1"] == PLAN.completions * PLAN.tokens / 3
    assert seconds.name.startswith("TRL 1 (micro-batches of 16, gradient checkpointing off")
    monkeypatch.setattr(step, "missing_modules", lambda device: ["trl"])
    assert "trl" not in step.make_parts(PLAN, tmp_path) and "TRL: trl not installed here" in capsys.readouterr().out


def test_the_command(tmp_path, monkeypatch, capsys):
    asked = []

    def measured(plan, variant, model, folder, *, peers):
        asked.append(variant.name)
        return [step.Row("a", 1.0, "s")]

    monkeypatch.setattr(step, "measure", measured)
    monkeypatch.setattr(step, "measure_trl", lambda *_: [[step.Row("TRL", 1.0, "s")]])
    monkeypatch.setattr(step, "missing_modules", lambda device: [])
    monkeypatch.setattr(step, "write_random_model", lambda shape, folder, dtype: str(folder))
    monkeypatch.setattr(step, "release", lambda: None)
    assert step.run(quick=False, json_file=tmp_path / "out.json", only="lag-2,in-turn") == 0
    assert asked == ["in turn", "lag 2"] and len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 2
    asked.clear()
    assert step.run(quick=True, json_file=tmp_path / "out.json") == 0
    assert asked == ["in turn", "lag 1, long tail"] and len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 3
    asked.clear()
    assert step.run(quick=True, json_file=None, only="lag-2") == 0 and asked == ["lag 2"]
    asked.clear()
    assert step.run(quick=True, json_file=None, lengths="8k") == 0 and asked == ["in turn, 8k", "lag 1, 8k"]
    assert f"8k: {make_plan('cpu', quick=True, longest=8192).describe()}\n" in capsys.readouterr().out
