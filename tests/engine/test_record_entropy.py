"""`engine.record_entropy`: the entropy of what each token was sampled from, wherever the rollout goes after that."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.engine.native.core import EngineCore
from headrace.engine.request import Request
from headrace.model.load import load_model
from headrace.records import SAMPLED_ENTROPY, Rollout, Sampling, pack_rollouts, unpack_rollouts

PROMPT = Rollout.from_prompt([7, 8, 9], id="r")
WAYS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 5, "temperature": 1.4},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "early": {"min_tokens": 12, "stop_ids": (1, 20, 30)},
}


def make_core(model_path: str, *, records: bool = True) -> EngineCore:
    model = load_model(model_path)
    with torch.no_grad():  # less even than an untrained model's distributions
        model.get_parameter("model.norm.weight").mul_(4)
    return EngineCore(model, name="e", slots=4, context=64, record_entropy=records)


def generate(core: EngineCore, rollout: Rollout, sampling: Sampling, *, stir: str = "") -> Rollout:
    """`stir` is called after 5 steps: `abort_running` or `retract_running`."""
    done: list[Rollout] = []
    core.submit(Request(rollout, sampling, on_done=done.append))
    num_steps = 0
    while core.has_work:
        core.step()
        num_steps += 1
        if stir and num_steps == 5:
            getattr(core, stir)()
    return done[0]


def slow_entropies(model_path: str, rollout: Rollout) -> list[float]:
    """By transformers' own attention, token by token."""
    model = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="eager")
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(4)
        logits = model(torch.from_numpy(rollout.token_ids.astype(np.int64)).unsqueeze(0)).logits[0].double()
    entropies = []
    for index in range(len(rollout)):
        temperature = rollout.temperatures[index]
        if not rollout.is_sampled[index] or not temperature:
            entropies.append(0.0)
            continue
        row = [] if rollout.sampling_mask is None else rollout.sampling_mask.row(index).tolist()
        allowed = [each for each in range(logits.shape[1]) if not row or (each in row if row[0] >= 0 else ~each not in row)]
        shares = torch.softmax(logits[index - 1, allowed] / temperature, dim=-1).tolist()
        entropies.append(-sum(share * np.log(share) for share in shares if share))
    return entropies


@pytest.mark.parametrize("way", WAYS)
def test_it_is_that_of_the_distribution_sampled_from(tiny_model: str, way: str) -> None:
    rollout = generate(make_core(tiny_model), PROMPT, Sampling(max_tokens=20, seed=3, **WAYS[way]))
    recorded = rollout.columns[SAMPLED_ENTROPY]
    assert recorded.dtype == np.float32 and recorded.shape == rollout.token_ids.shape
    np.testing.assert_allclose(recorded, slow_entropies(tiny_model, rollout), atol=1e-4)
    assert recorded[3:].any() == (way != "greedy")


def test_a_rollout_keeps_it_through_interruptions_forks_replies_and_the_wire(tiny_model: str) -> None:
    sampling = Sampling(max_tokens=20, top_k=9, seed=3)
    whole = generate(make_core(tiny_model), PROMPT, sampling)
    expected = whole.columns[SAMPLED_ENTROPY]

    def check(rollout: Rollout) -> None:
        assert np.array_equal(rollout.token_ids, whole.token_ids)
        np.testing.assert_allclose(rollout.columns[SAMPLED_ENTROPY], expected, atol=1e-5)

    check(generate(make_core(tiny_model), PROMPT, sampling, stir="retract_running"))
    core = make_core(tiny_model)
    partial = generate(core, PROMPT, sampling, stir="abort_running")
    assert 0 < partial.num_sampled < 20
    (partial,) = unpack_rollouts(pack_rollouts([partial]))
    rest = Sampling(max_tokens=20 - partial.num_sampled, top_k=9, seed=3)
    check(generate(core, partial, rest))
    check(generate(core, whole.forked(12, id="fork"), Sampling(max_tokens=11, top_k=9, seed=3)))
    computed = whole.replace(columns={**whole.columns, "entropy": expected})
    replied = computed.append([4, 5])
    assert replied.columns.keys() == {SAMPLED_ENTROPY}, "what was computed over fewer tokens is dropped"
    np.testing.assert_array_equal(replied.columns[SAMPLED_ENTROPY], [*expected, 0, 0])
    silent = generate(make_core(tiny_model, records=False), replied, rest)
    np.testing.assert_array_equal(silent.columns[SAMPLED_ENTROPY], [*expected, *[0] * (len(silent) - len(whole))])


def test_it_is_off_unless_wanted(tiny_model: str) -> None:
    assert generate(make_core(tiny_model, records=False), PROMPT, Sampling(max_tokens=3)).columns == {}
