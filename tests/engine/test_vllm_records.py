"""What a vLLM server tells beside tokens: entropies and experts. Where it cannot, the run is refused."""

from __future__ import annotations

import asyncio
import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_vllm import Fake, serving, talking
from test_record_entropy import slow_entropies
from test_vllm_faults import PROMPT
from vllm_server import served

from headrace.config import make_recipe
from headrace.engine import engine_kind
from headrace.engine.vllm.open import server_arguments
from headrace.engine.vllm.server_checks import check_model, try_generate
from headrace.model import ModelError
from headrace.model.load import load_model
from headrace.model.weights import named_tensors
from headrace.partial import Interrupt
from headrace.records import SAMPLED_ENTROPY, FinishReason, Sampling
from headrace.settings import ConfigError
from headrace.sync import Lineage, MemoryTransport, WeightSync

LOST = -9999.0
QUARTERS = ((50, math.log(0.25)), (51, math.log(0.25)), (52, LOST))
ROUTERS = SimpleNamespace(layers=[1, 3], num_layers=2, top_k=2, dtype_name="int16")
"""Of a model whose first and third layer are dense."""
TASKS = [{"source": "builtin:sort_digits"}]


def recipe(**settings):
    return make_recipe(
        {"tasks": TASKS, "engine.kind": "vllm", **{name.replace("__", "."): each for name, each in settings.items()}}
    )


@pytest.mark.parametrize("sampling", [{}, {"top_k": 3}, {"top_p": 0.9}])
async def test_entropies_are_those_of_all_that_could_be_sampled(over, sampling):
    fake = Fake(logprob=math.log(0.5), candidates=QUARTERS)
    async with over(fake, records_entropy=True) as (engine, _):
        rollout = await engine.generate(PROMPT, Sampling(max_tokens=5, **sampling))
        entropy = 0.5 * math.log(2) + 0.5 * math.log(4)
        np.testing.assert_allclose(rollout.columns[SAMPLED_ENTROPY], [0, 0, 0, *[entropy] * 5], rtol=1e-6)
        asked = fake.asked[-1][1]["sampling_params"]["logprobs"]
        assert asked == {"": 200, "top_k": 19, "top_p": 64}["".join(sampling)]
        evaluated = await engine.generate(PROMPT, Sampling(max_tokens=5, keep_mask=False, **sampling))
        assert evaluated.columns == {} and fake.asked[-1][1]["sampling_params"]["logprobs"] == 0


@pytest.mark.long
@pytest.mark.usefixtures("vllm_server")
async def test_entropies_of_a_real_server_are_those_of_the_model(tiny_model):
    sync, model = WeightSync(Lineage("life"), MemoryTransport()), load_model(tiny_model)
    with torch.no_grad():  # as `slow_entropies` has it
        model.get_parameter("model.norm.weight").mul_(4)
    limits = {"slots": 4, "context": 96, "decode": None}
    async with served(tiny_model, sync=sync, **limits, records_entropy=True) as (engine, _):
        await engine.load(sync.offer(0, named_tensors(model)))
        for sampling in ({}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}, {"min_tokens": 9, "stop_ids": (1, 20)}):
            rollout = await engine.generate(PROMPT, Sampling(max_tokens=12, seed=3, **sampling))
            found = rollout.columns[SAMPLED_ENTROPY]
            assert found[3:].any()
            np.testing.assert_allclose(found, slow_entropies(tiny_model, rollout), atol=1e-4)


async def test_experts_come_with_the_end_of_a_call_and_those_of_an_earlier_one_stay(over):
    fake = Fake(routed=(4, 2))
    async with over(fake, routers=ROUTERS) as (engine, _):
        first = await engine.generate(PROMPT, Sampling(max_tokens=4))
        expected = np.indices((6, 4, 2)).sum(axis=0)[:, [1, 3]]
        assert first.expert_routing.dtype == np.int16 and first.expert_routing.shape == (7, 2, 2)
        np.testing.assert_array_equal(first.expert_routing[:6], expected)
        assert (first.expert_routing[6] == -1).all(), "no pass has taken the last token"
        fake.holds_at = 3
        calling = asyncio.ensure_future(engine.generate(first, Sampling(max_tokens=8)))
        while len(fake.is_sampled_by) < 2 or len(fake.is_sampled_by[1]) < 3:  # noqa: ASYNC110  (it has no event for that)
            await asyncio.sleep(0.001)
        await engine.pause(Interrupt.ABORT)
        await engine.resume()
        second = await calling
        assert second.finish_reason is FinishReason.ABORT and second.num_sampled == 4 + 3
        np.testing.assert_array_equal(second.expert_routing[:9], np.indices((9, 4, 2)).sum(axis=0)[:, [1, 3]])
        assert (second.expert_routing[9] == -1).all()


async def test_a_stream_that_is_closed_early_leaves_experts_unknown(over):
    def decode(ids):
        return "".join(chr(ord("a") + each - 10) for each in ids)

    async with over(Fake(routed=(4, 2)), routers=ROUTERS, decode=decode) as (engine, _):
        rollout = await engine.generate(PROMPT, Sampling(max_tokens=20, stop=("c",)))
        assert rollout.num_sampled == 3 and (rollout.expert_routing == -1).all()


@pytest.mark.parametrize(
    ("routed", "told"),
    [
        ((0, 0), "streams no experts; it must be started with --enable-return-routed-experts"),
        ((4, 3), r"streams experts as \[3, 4, 3\] for 3 tokens, but the model has 2 for each token in decoder layers up to 3"),
        ((3, 2), r"streams experts as \[3, 3, 2\]"),
        ((4, 2), ""),
    ],
)
async def test_a_server_whose_experts_are_not_the_models_is_refused(routed, told):
    fake = Fake(logprob=math.log(0.5), candidates=((50, math.log(0.5)),), routed=routed)
    async with serving(fake) as url, talking(url) as api:
        with pytest.raises(ConfigError, match=told) if told else contextlib.nullcontext():
            await try_generate(api, 200, routers=ROUTERS)


def test_what_no_server_can_record_is_refused_by_name(tiny_model):
    model, both = load_model(tiny_model), {"engine__record_entropy": True}
    assert check_model(recipe(**both), model, vocabulary=4096) is None
    assert check_model(recipe(**both, sampling__top_p=0.9), model, vocabulary=151_936) is None
    with pytest.raises(ConfigError, match=r"engine.record_entropy = true: .* all 151,936, and at most 4,096 .*sampling.top_k"):
        check_model(recipe(**both), model, vocabulary=151_936)
    routed = recipe(engine__record_routing=True)
    assert "--enable-return-routed-experts" in server_arguments(routed, context=64, candidates=8, is_on_cpu=False)
    with pytest.raises(ModelError, match=r"engine.record_routing = true: .* has no experts"):
        check_model(routed, model, vocabulary=200)
    with pytest.raises(ConfigError, match=r"engine.record_routing = true: vLLM's CPU build"):
        engine_kind(routed.engine).check_machine(routed, device="cpu")
    with pytest.raises(ConfigError, match=r"engine.record_routing = true: .*sampling.stop; leave that empty"):
        recipe(engine__record_routing=True, sampling__stop=["x"])
