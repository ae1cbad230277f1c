"""The native engine's own promises: blocks, order, batch invariance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stepping import run

from headrace.engine.native.blocks import BlockPool
from headrace.engine.native.core import EngineCore
from headrace.engine.native.engine_memory import blocks_for
from headrace.engine.native.kv_cache import CacheShape
from headrace.engine.native.sampling import uniform
from headrace.engine.protocol import PromptTooLong
from headrace.engine.request import Request
from headrace.model.head import Head
from headrace.model.load import load_model
from headrace.model.packing import score
from headrace.records import Rollout, Sampling, encode, pack_rollouts
from headrace.settings import ConfigError


def generate(core: EngineCore, count: int, *, max_tokens: int = 20) -> list[Rollout]:
    done: dict[str, Rollout] = {}
    for index in range(count):
        ids = np.random.default_rng(index).integers(6, 90, size=2 + index % 13)
        sampling = Sampling(max_tokens=1 + (index * 7) % max_tokens, seed=index, temperature=0.5 + index % 3)
        core.submit(Request(Rollout.from_prompt(ids, id=str(index)), sampling, on_done=lambda r: done.__setitem__(r.id, r)))
    run(core)
    return [done[str(index)] for index in range(count)]


def test_transformers_own_greedy_generation_agrees(tiny_model: str) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.randint(6, 90, (1, 9))
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    expected = plain.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
    done: list[Rollout] = []
    core = EngineCore(load_model(tiny_model), name="e", slots=2, context=64)
    core.submit(Request(Rollout.from_prompt(ids[0].tolist(), id="r"), Sampling(max_tokens=20, temperature=0), done.append))
    run(core)
    assert done[0].token_ids.tolist() == expected.tolist()


def test_exact_mode_does_not_feel_the_batch(tiny_model: str) -> None:
    """The same requests through 3 slots and through 64: the same tokens and the same bits of every logprob."""
    model = load_model(tiny_model, exact=True)
    few, many = (generate(EngineCore(model, name="e", slots=slots, context=64, exact=True), 20) for slots in (3, 64))
    for left, right in zip(few, many, strict=True):
        assert np.array_equal(left.token_ids, right.token_ids) and np.array_equal(left.logprobs, right.logprobs)


@pytest.mark.parametrize("threads", [1, 2])
def test_exact_mode_equals_the_trainers_forward_bitwise(tiny_model: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = load_model(tiny_model, exact=True)
        rollouts = generate(EngineCore(model, name="e", slots=24, context=64, exact=True), 48)
        fresh = score(model, Head(model, exact=True), rollouts, budget=700, exact=True)
    finally:
        torch.set_num_threads(before)
    assert sum(rollout.num_sampled for rollout in rollouts) > 400
    for rollout, logprobs in zip(rollouts, fresh, strict=True):
        assert np.array_equal(logprobs[rollout.is_sampled], rollout.logprobs[rollout.is_sampled])


def test_the_fast_path_is_within_a_hundred_thousandth(tiny_model: str) -> None:
    model = load_model(tiny_model)
    rollouts = generate(EngineCore(model, name="e", slots=24, context=64), 48)
    for rollout, logprobs in zip(rollouts, score(model, Head(model), rollouts, budget=700), strict=True):
        np.testing.assert_allclose(logprobs[rollout.is_sampled], rollout.logprobs[rollout.is_sampled], atol=1e-5, rtol=0)


def test_few_blocks_only_make_requests_wait(tiny_model: str) -> None:
    model = load_model(tiny_model)
    plenty = generate(EngineCore(model, name="e", slots=16, context=64), 30)
    core = EngineCore(model, name="e", slots=16, context=64, num_blocks=6)
    scarce = generate(core, 30)
    assert core.num_free_blocks == 5
    for left, right in zip(plenty, scarce, strict=True):
        assert np.array_equal(left.token_ids, right.token_ids)


def test_a_cache_for_what_can_be_in_flight_is_safe_to_outgrow(tiny_model: str) -> None:
    """Sized for two rollouts of 20 tokens where 16 run, up to 58 tokens long: those that find no block are retracted."""
    model = load_model(tiny_model)
    core = EngineCore(model, name="e", slots=16, context=64, most_blocks=blocks_for(2, tokens=20, block_size=16))
    assert core.cache.num_blocks == 6
    rollouts = generate(core, 30, max_tokens=45)
    assert len(rollouts) == 30 and core.scheduler.num_retractions > 0 and core.num_free_blocks == 5
    for rollout, logprobs in zip(rollouts, score(model, Head(model), rollouts, budget=700), strict=True):
        np.testing.assert_allclose(logprobs[rollout.is_sampled], rollout.logprobs[rollout.is_sampled], atol=1e-5, rtol=0)


def test_little_memory_is_refused_only_where_no_rollout_fits(tiny_model: str, monkeypatch) -> None:
    model = load_model(tiny_model)
    sizes = {"name": "e", "slots": 16, "context": 64, "most_blocks": 40}
    monkeypatch.setattr(CacheShape, "blocks_that_fit", lambda *_: 3)
    assert EngineCore(model, **sizes, max_tokens=20).cache.num_blocks == 3
    with pytest.raises(ConfigError, match=r"33 tokens needs 4 .* holds 3 of the 40 .* lower sampling\.max_tokens"):
        EngineCore(model, **sizes, max_tokens=32)
    with pytest.raises(ConfigError, match=r"64 tokens needs 5 .* lower model\.context"):
        EngineCore(model, name="e", slots=16, context=64)


def test_a_rollout_that_can_never_fit_into_the_cache_is_refused_by_name(tiny_model: str) -> None:
    core = EngineCore(load_model(tiny_model), name="e", slots=4, context=64, num_blocks=3)
    done: list[Rollout] = []
    prompt = Rollout.from_prompt([5] * 20, id="short")
    with pytest.raises(
        PromptTooLong, match=r"'short' has 20 tokens and may come to have 33; .* holds 32: raise engine.kv_blocks"
    ):
        core.submit(Request(prompt, Sampling(max_tokens=13), on_done=done.append))
    core.submit(Request(prompt, Sampling(max_tokens=12), on_done=done.append))
    run(core)
    assert done[0].num_sampled == 12


def test_a_draw_from_the_whole_vocabulary_has_no_mask_in_any_company(tiny_model: str) -> None:
    """Once stop tokens may be drawn nothing is cut off, and beside a neighbour with top-k it is not said otherwise."""
    model = load_model(tiny_model)
    early = Sampling(max_tokens=8, min_tokens=3, stop_ids=(1,), seed=4)
    masks = []
    for others in ([], [Sampling(max_tokens=20, top_k=5)]):
        core, done = EngineCore(model, name="e", slots=2, context=64), {}
        for index, sampling in enumerate([early, *others]):
            prompt = Rollout.from_prompt([7, 8, 9 + index], id=str(index))
            core.submit(Request(prompt, sampling, on_done=lambda r, done=done: done.__setitem__(r.id, r)))
        run(core)
        masks.append(done["0"].sampling_mask)
    assert masks[0] == masks[1]
    assert [masks[1].row(index).tolist() for index in range(3, 11)] == [[~1]] * 3 + [[]] * 5


def test_a_mask_is_recorded_only_where_it_is_kept(tiny_model: str) -> None:
    core, done = EngineCore(load_model(tiny_model), name="e", slots=2, context=64), {}
    for name, keep_mask in (("kept", True), ("dropped", False)):
        sampling = Sampling(max_tokens=8, min_tokens=8, top_k=5, stop_ids=(1,), seed=4, keep_mask=keep_mask)
        core.submit(Request(Rollout.from_prompt([7, 8], id=name), sampling, on_done=lambda r: done.__setitem__(r.id, r)))
    run(core)
    assert np.array_equal(done["kept"].token_ids, done["dropped"].token_ids)
    assert done["dropped"].sampling_mask is None and len(done["kept"].sampling_mask.ids) == 8 * 5


def test_min_tokens_costs_few_bytes_a_token(tiny_model: str) -> None:
    """It records the stop tokens it forbids, not the vocabulary it allows."""
    core, done = EngineCore(load_model(tiny_model), name="e", slots=2, context=64), []
    for given in ({}, {"min_tokens": 40}):
        sampling = Sampling(max_tokens=40, stop_ids=(1, 2), seed=4, **given)
        core.submit(Request(Rollout.from_prompt([7, 8], id="r"), sampling, on_done=done.append))
    run(core)
    plain, early = sorted(done, key=lambda rollout: rollout.calls[0].sampling.min_tokens)
    assert early.num_sampled == 40
    cost = len(encode(pack_rollouts([early]))) / 42 - len(encode(pack_rollouts([plain]))) / len(plain)
    assert cost < 24, "bytes per token"


def test_blocks_are_handed_out_once() -> None:
    pool = BlockPool(10)
    first, second = pool.take(4), pool.take(5)
    assert sorted(first + second) == list(range(1, 10)) and len(pool) == 0
    pool.give_back(first)
    assert sorted(pool.take(4)) == sorted(first)


def test_random_numbers_are_uniform_and_keyed() -> None:
    seeds = np.repeat(np.arange(200, dtype=np.int64) << 40, 50)
    positions = np.tile(np.arange(50), 200)
    numbers = uniform(seeds, positions)
    assert numbers.min() >= 0 and numbers.max() < 1 and len(np.unique(numbers)) == len(numbers)
    assert abs(numbers.mean() - 0.5) < 0.01 and abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    assert np.array_equal(uniform(seeds[::-1], positions[::-1]), numbers[::-1])
