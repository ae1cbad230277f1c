"""Keep Sampling Mask on a GPU, as `tests/contract` tests it on a CPU: engine and trainer in bfloat16, at equal weights."""

from __future__ import annotations

import pytest
import torch
import transformers
from test_graphs import SMALL, generate

from headrace.bench.loads import make_batch
from headrace.engine import EngineCore
from headrace.model import build_tokenizer
from headrace.model.load import prepare
from headrace.trainer import DeviceTrainer, TrainSettings

DEVICE = "cuda"
CUTS = (
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"min_tokens": 15},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "min_tokens": 15},
)


def make_model(dtype: torch.dtype) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**SMALL, "initializer_range": 0.1})
    return prepare(transformers.AutoModelForCausalLM.from_config(config).to(DEVICE, dtype).eval(), name="small")


def test_the_mean_ratio_is_one_only_with_the_mask() -> None:
    core = EngineCore(make_model(torch.bfloat16), name="e", slots=6, context=96, num_blocks=24)
    trainer = DeviceTrainer(
        make_model(torch.float32), tokenizer=build_tokenizer(), settings=TrainSettings(), dtype=torch.bfloat16
    )
    for changes in CUTS:
        for _ in range(2):  # eagerly, beside the thread that captures restricted steps; then replayed
            core.wait_warm()
            rollouts = list(generate(core, **changes).values())
            bare = [each.replace(sampling_mask=None) for each in rollouts]
            ratio, without = (
                trainer.forward_backward(make_batch(given, advantages=[1.0] * len(given)))["ratio"]
                for given in (rollouts, bare)
            )
            assert ratio == pytest.approx(1.0, abs=0.01), changes
            assert without < 0.99 or rollouts[0].sampling_mask is None, changes
