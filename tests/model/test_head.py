"""The head in bfloat16: logits are not rounded, and gradients are those of the product."""

from __future__ import annotations

import torch
from transformers import AutoConfig, Qwen3ForCausalLM

from headrace.bench.loads import model_shape
from headrace.model.head import Head


def make(dtype: torch.dtype) -> Head:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**model_shape("qwen3", 64, 32, 32, 1, 2, 2, 16, 128) | {"tie_word_embeddings": False})
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(100).copy_(model.lm_head.weight.bfloat16())  # the same numbers in either dtype
    return Head(model.to(dtype))


def test_logits_of_bfloat16_numbers_are_float32() -> None:
    hidden = (4 * torch.randn(7, 32)).bfloat16()
    wide = make(torch.float32).logits(hidden.float())
    narrow = make(torch.bfloat16).logits(hidden)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow, wide, rtol=1e-5, atol=1e-4)
    assert (wide - wide.bfloat16().float()).abs().max() > 0.01  # rounded, they would be far off


def test_a_trainer_under_autocast_has_the_same_logits_as_an_engine() -> None:
    hidden = (4 * torch.randn(7, 32)).bfloat16().float()
    with torch.autocast("cpu", torch.bfloat16):
        trainer = make(torch.float32).logits(hidden)
    assert torch.equal(trainer, make(torch.bfloat16).logits(hidden))


def test_gradients_reach_hidden_states_and_weight() -> None:
    gradients = []
    for is_narrow in (False, True):
        head = make(torch.float32)
        hidden = (4 * torch.randn(7, 32, generator=torch.Generator().manual_seed(1))).bfloat16().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
            logprobs, _ = head.logprobs(hidden, torch.arange(7), torch.ones(7))
        logprobs.sum().backward()
        gradients.append((hidden.grad, head.weight.grad))
    for exact, narrow in zip(*gradients, strict=True):
        assert exact is not None and narrow is not None
        assert (narrow - exact).norm() < 0.01 * exact.norm()
        assert not torch.equal(narrow, exact)
