"""The attention hook on small random models of every family we serve, against transformers' own eager attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from families import FAMILIES, SMALL, make

from headrace.engine.native.core import EngineCore
from headrace.engine.request import Request
from headrace.model.attention import PackedContext
from headrace.model.head import Head
from headrace.model.load import ModelError, check_config, hidden_states, prepare
from headrace.model.packing import score
from headrace.records import Rollout, Sampling

LENGTHS = [23, 5, 17, 40]


def one_by_one(model: transformers.PreTrainedModel, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(sequence.unsqueeze(0), use_cache=False).logits[0] for sequence in sequences]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_forward_is_the_models_own(family: str) -> None:
    model = make(family)
    sequences = [torch.randint(3, 96, (length,)) for length in LENGTHS]
    expected = one_by_one(model, sequences)
    prepare(model, name=family)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    for exact in (False, True):
        with torch.no_grad():
            hidden = hidden_states(model, torch.cat(sequences), positions, PackedContext(LENGTHS, exact=exact))
            logits = Head(model, exact=exact).logits(hidden)
        for got, wanted in zip(logits.split(LENGTHS), expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("exact", [False, True])
def test_engine_logprobs_are_a_fresh_forwards(family: str, exact: bool) -> None:
    """Paged decoding over many steps against one packed pass: bitwise in exact mode."""
    model = prepare(make(family), name=family, exact=exact)
    core = EngineCore(model, name="engine", slots=3, context=64, exact=exact)
    done: list[Rollout] = []
    for index in range(7):
        prompt = Rollout.from_prompt(torch.randint(3, 96, (4 + 5 * index,)).tolist(), id=str(index))
        core.submit(Request(prompt, Sampling(max_tokens=9 + index, seed=index), on_done=done.append))
    while core.has_work:
        core.step()
    fresh = score(model, Head(model, exact=exact), done, budget=4096, exact=exact)
    assert len(done) == 7
    for rollout, logprobs in zip(done, fresh, strict=True):
        if exact:
            assert np.array_equal(rollout.logprobs[rollout.is_sampled], logprobs[rollout.is_sampled])
        np.testing.assert_allclose(rollout.logprobs[rollout.is_sampled], logprobs[rollout.is_sampled], atol=2e-4)


def test_layers_outside_attention_are_refused_by_name() -> None:
    config = transformers.Qwen3NextConfig(
        **{**SMALL, "num_experts": 4, "num_experts_per_tok": 2}, layer_types=["linear_attention", "full_attention"] * 2
    )
    with pytest.raises(ModelError, match="linear_attention"):
        check_config(config, "some/hybrid")


def test_a_model_that_bypasses_the_hook_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=8)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises((ModelError, TypeError), match=r"mamba|Mamba|attention"):
        prepare(model, name="some/mamba")


DECODER = {"is_decoder": True}
REFUSED = {
    "hyperclovax": ("HyperCLOVAXConfig", {"logits_scaling": 0.5}),
    "modernbert-decoder": ("ModernBertDecoderConfig", {}),
    "bert": ("BertConfig", DECODER),
    "camembert": ("CamembertConfig", DECODER),
    "data2vec-text": ("Data2VecTextConfig", DECODER),
    "electra": ("ElectraConfig", {**DECODER, "embedding_size": 32}),
    "ernie": ("ErnieConfig", DECODER),
    "roberta": ("RobertaConfig", DECODER),
    "roberta-prelayernorm": ("RobertaPreLayerNormConfig", DECODER),
    "roc_bert": ("RoCBertConfig", DECODER),
    "xlm-roberta": ("XLMRobertaConfig", DECODER),
    "xlm-roberta-xl": ("XLMRobertaXLConfig", DECODER),
}


@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_whose_logits_are_not_its_heads_is_refused_by_name(family: str, dtype: torch.dtype) -> None:
    """They transform hidden states before the head, scale its logits another way or count positions from elsewhere."""
    name, extra = REFUSED[family]
    config = getattr(transformers, name)(**{**SMALL, "num_key_value_heads": 4, "num_hidden_layers": 2, **extra})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=rf"some/model.*\({family}\).*logprobs computed from its hidden states differ"):
        prepare(model.to(dtype), name="some/model")
