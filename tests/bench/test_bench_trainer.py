"""The benchmark of the trainer: that the peer does the same work, and that figures are what they are called."""

from __future__ import annotations

import dataclasses
import json
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headrace.bench import trainer, trainer_head, trainer_speed
from headrace.bench.loads import (
    MEDIUM,
    build_words,
    gradient_of,
    make_on_policy_batch,
    make_rollouts,
    make_trainer,
    relative_difference,
    write_random_model,
)
from headrace.bench.measure import MIB, peak_bytes
from headrace.bench.trainer_head import HeadLoad, Paths, head_rows, make_mask
from headrace.bench.trainer_peers import PaddedLoop
from headrace.bench.trainer_speed import Speed, compare, flops_of, packing_fill, speed_rows
from headrace.cli import main
from headrace.model.head import Head
from headrace.model.load import load_tokenizer
from headrace.model.pass_planning import Unit

SHAPE = {
    **MEDIUM,
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
MIX = Speed.long_tail(9, 4, median=12, cap=60, budget=64, mini_batch=8, turns=1, goal="≥ 2.5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return write_random_model(SHAPE, tmp_path_factory.mktemp("model"), dtype="float32")


@pytest.fixture(autouse=True)
def quick_to_release(monkeypatch) -> None:
    monkeypatch.setattr("gc.collect", lambda: 0)  # pytest holds very many objects


def test_every_token_is_a_word_and_none_ends_a_turn(folder):
    words = load_tokenizer(folder)
    assert len(words) == 97 and words.eos_token_id is None
    assert words("w5 w96 w0")["input_ids"] == [5, 96, 0] and words.decode([5, 96, 0]) == "w5 w96 w0"
    assert build_words(7)("w9")["input_ids"] == [0]


def test_the_padded_loop_gives_our_gradient_however_it_is_cut(folder):
    ours = make_trainer(folder, dtype="float32", device="cpu", micro_batch_tokens=64)
    rollouts = make_rollouts(MIX.lengths, prompt_tokens=4, vocabulary=97)
    batch = make_on_policy_batch(ours, rollouts, advantages=np.linspace(-1, 1, len(rollouts)).tolist())
    ours.forward_backward(batch)
    gradient = gradient_of(ours)
    for mini_batch, by_length in ((4, False), (4, True), (1, False)):
        loop = PaddedLoop(folder, dtype="float32", device="cpu", mini_batch=mini_batch)
        loop.forward_backward(batch, by_length=by_length)
        assert relative_difference(gradient, loop.gradient()) < 1e-5
    ours.optim_step(0.0)
    assert compare(ours, loop, batch) > 0.4  # a second gradient lay on top of the first
    assert compare(ours, loop, batch) < 1e-5
    other = dataclasses.replace(batch, advantages=tuple(-advantage for advantage in batch.advantages))
    assert compare(ours, loop, other) < 1e-5


def test_a_gradient_is_read_where_it_is_held():
    linear = torch.nn.Linear(2, 1, bias=False)
    held = {"weight": torch.tensor([[3.0, 4.0]])}
    linear.weight.grad = torch.ones(1, 2)  # of a pass; what counts is what the optimizer has added up
    gathers = SimpleNamespace(model=linear, optimizer=SimpleNamespace(gradient=held.get))
    assert gradient_of(gathers)["weight"].tolist() == [[3.0, 4.0]]
    assert relative_difference({"a": torch.tensor([3.0, 5.0])}, {"a": torch.tensor([3.0, 4.0])}) == pytest.approx(0.2)
    with pytest.raises(RuntimeError, match="gradients of different weights"):
        relative_difference({}, {"a": torch.ones(1)})


def test_arithmetic_is_counted_once_for_a_tied_embedding(folder):
    attention = 32 * 2 * 16 + 2 * 32 * 1 * 16 + 2 * 16 * 32
    weights = 97 * 32 + 2 * (attention + 3 * 32 * 64 + 2 * 32 + 2 * 16) + 32
    assert flops_of(folder, [10, 20]) == 6 * weights * 30 + 6 * 2 * 2 * 16 * (100 + 400)
    assert flops_of(folder, [10, 20], is_frozen=True) == 4 * weights * 30 + 6 * 2 * 2 * 16 * (100 + 400)


def test_speed_is_of_medians(capsys):
    speed = Speed.documents(1000, 100, turns=3, warmups=1, has_peer=True, goal="≥ 0.45")
    turns = {
        "ours": [(1.0, 1.0), (2.0, 0.5), (9.0, 0.1)],
        "transformers": [(4.0, 1.0)] * 3,
    }
    rows = {row.name.removeprefix(f"{speed.name}: "): row for row in speed_rows(speed, turns, flops=989e12)}
    assert rows["forward and backward"].value == 500 and rows["forward and backward"].peers == {"transformers": 250}
    assert rows["whole step"].value == 400 and rows["whole step ÷ transformers"].value == 2
    assert rows["MFU, forward and backward"].value == pytest.approx(0.5) and rows["MFU, whole step"].goal == "≥ 0.45"
    assert rows["optimizer step"].value == 500
    alone = speed_rows(speed, {"ours": turns["ours"]}, flops=None)
    assert [row.name.split(": ")[1] for row in alone] == ["optimizer step", "forward and backward", "whole step"]


def test_documents_of_one_length_are_measured(folder):
    speed = Speed.documents(96, 24, turns=2, warmups=1, has_peer=True)
    parts = list(trainer_speed.measure(speed, folder, dtype="float32", device="cpu"))
    rows = {row.name.removeprefix(f"{speed.name}: "): row for part in parts for row in part}
    assert rows["passes"].value == 1 and rows["transformers: gradient, relative difference"].value < 1e-5
    assert rows["whole step"].value > 0 and rows["whole step"].peers["transformers"] > 0
    assert rows["whole step"].value < rows["forward and backward"].value


def test_a_peer_that_does_other_work_is_not_timed(folder, monkeypatch):
    monkeypatch.setattr("headrace.bench.trainer_peers.CLIP_HIGH", -0.5)
    rows = {row.name: row for part in trainer_speed.measure(MIX, folder, dtype="float32", device="cpu") for row in part}
    assert rows[f"{MIX.name}: transformers: gradient, relative difference"].value > 0.01
    assert rows[f"{MIX.name}: whole step"].peers == {}


def test_a_long_tail_is_measured_against_both_orders(folder):
    parts = list(trainer_speed.measure(MIX, folder, dtype="float32", device="cpu"))
    rows = {row.name.removeprefix(f"{MIX.name}: "): row for part in parts for row in part}
    assert rows["whole step"].peers.keys() == MIX.peers.keys() and rows["whole step"].value > 0
    assert rows["whole step ÷ padded, as they come"].goal == "≥ 2.5" and rows["whole step ÷ padded, by length"].goal == ""
    lengths = Speed.long_tail(2001, 4, median=300, cap=100_000, budget=64, mini_batch=8, turns=1).lengths
    assert statistics.median(lengths) - MIX.prompt_tokens == pytest.approx(300, rel=0.1)


def test_fill_leaves_out_the_emptiest_pass():
    units = [[Unit((0,))], [Unit((1,))], [Unit((2,))]]
    assert packing_fill(units, [64, 10, 62], 64) == 63 / 64 and packing_fill(units[:1], [32], 64) == 0.5


def test_a_sampling_mask_holds_the_target_and_no_token_twice():
    targets = np.array([0, 96, 40, 96])
    mask = make_mask(targets, vocabulary=97, device="cpu")
    for row, target in enumerate(targets):
        ids = mask.ids[mask.offsets[row] : mask.offsets[row + 1]].tolist()
        assert ids == sorted(set(ids)) and target in ids and len(ids) == 50 and max(ids) < 97


@pytest.mark.parametrize("case", trainer_head.CASES)
def test_the_head_agrees_with_full_logits(case):
    load = HeadLoad(40, 97, 16, "float32", "cpu", turns=1, sequence=8)
    paths = Paths(load, **trainer_head.CASES[case])
    ours = paths.logprobs()
    assert torch.allclose(ours, paths.full_logprobs(), atol=1e-5) and bool((ours < 0).all())


def test_the_head_is_measured_and_one_that_is_wrong_has_no_figure(monkeypatch):
    load = HeadLoad(64, 500, 16, "float32", "cpu", turns=2, sequence=8)
    rows = [row for part in trainer_head.measure(load) for row in part]
    assert len(rows) == 4 * 5 and all(row.value > 0 for row in rows if "time" in row.name)
    real = Head.logprobs
    monkeypatch.setattr(Head, "logprobs", lambda self, *given, **more: (real(self, *given, **more)[0] * 1.01, None))
    with pytest.raises(RuntimeError, match=r"the gradient differs from that of full logits by 1\.0e-02"):
        list(trainer_head.measure(load))


def test_the_heads_rows_are_ratios_of_medians():
    seconds, memory = {"": [1.0, 3.0, 2.0], "full logits": [4.0]}, {"": int(MIB), "full logits": 40 * int(MIB)}
    rows = head_rows("x", seconds, memory, memory_goal="≤ 0.05")
    assert [row.value for row in rows] == [2000, 0.5, 1, 0.025] and rows[1].goal == "≤ 1" and rows[3].goal == "≤ 0.05"


def test_peaks_are_of_the_action_alone():
    def take() -> None:
        first = torch.ones(64 << 18)
        second = first * 2
        del first, second

    assert 120 * MIB < peak_bytes(take, "cpu") < 140 * MIB


def test_the_command(tmp_path, monkeypatch):
    plan = dataclasses.replace(
        trainer.make_plan("cpu", quick=True),
        shape=SHAPE,
        speed=Speed.documents(48, 24, turns=1, warmups=1, has_peer=False),
        head=HeadLoad(32, 97, 16, "float32", "cpu", turns=1, sequence=8),
    )
    monkeypatch.setattr(trainer, "make_plan", lambda device, quick: plan)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "trainer", "--quick", "--only=sharing,head,speed", "--json", str(tmp_path / "out.json")])
    assert ended.value.code == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert any(row["name"] == "48 tokens of 24: whole step" for row in rows) and len(rows) > 12


def test_the_gpus_plan_has_the_goals_that_were_set():
    plan = trainer.make_plan("cuda", quick=False)
    assert (sum(plan.speed.lengths), plan.speed.lengths[0], plan.speed.goals["MFU"]) == (16_384, 1024, "≥ 0.45")
    assert (sum(plan.long.lengths), plan.head.rows, plan.head.vocabulary, plan.head.hidden) == (32_768, 32_768, 151_936, 1024)
