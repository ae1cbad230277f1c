"""`headrace bench mismatch`: how far engine and trainer disagree when they compute differently, and what replay does about it.

The engine's weights are the trainer's, rounded to bfloat16, as those of an engine in bfloat16 are; both sides compute in
float32, so that the figures are the same on any machine. The models are random Qwen3 and Qwen3-MoE of 4 layers, three of each.
With the same rollouts the trainer measures the KL and |Δ logprob| of its tokens, once routing freely and once replaying the
engine's experts; tis then weighs the tokens, and its mean weight and the effective sample size say how much it has to mend.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.bench.harness import Row, run_parts
from headrace.bench.loads import make_batch
from headrace.engine import EngineCore, Request
from headrace.model import build_tokenizer, prepare
from headrace.records import Rollout, Sampling
from headrace.trainer import DeviceTrainer, TrainSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

SEEDS, ROLLOUTS, PROMPT, NEW = 3, 64, 32, 64
VOCABULARY, DEVIATION = 512, 0.15
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}


def run(*, quick: bool, json_file: Path | None) -> int:
    """`--quick` measures one model of each kind with few rollouts."""
    torch.set_num_threads(1)  # the models are too small for more
    parts = {name: partial(_measure, name, quick=quick) for name in ("moe", "dense")}
    return run_parts("mismatch", parts, quick=quick, json_file=json_file)


def _measure(kind: str, *, quick: bool) -> Iterator[list[Row]]:
    seen: dict[str, list[dict[str, float]]] = {}
    for seed in range(1 if quick else SEEDS):
        rollouts = _sample(_make_model(kind, seed, is_rounded=True), count=16 if quick else ROLLOUTS)
        ways = {"free": [rollout.replace(expert_routing=None) for rollout in rollouts], "replayed": rollouts}
        for way, given in ways.items():
            if kind == "moe" or way == "free":
                trainer = DeviceTrainer(_make_model(kind, seed), tokenizer=build_tokenizer(), settings=TrainSettings())
                batch = replace(make_batch(given, advantages=[1.0] * len(given), loss="reinforce"), correction="tis")
                seen.setdefault(way, []).append(trainer.forward_backward(batch))

    def row(name: str, metric: str, unit: str, **options: Any) -> Row:  # noqa: ANN401
        pick = max if metric == "mismatch_max" else np.mean
        found = {way: float(pick([each[metric] for each in metrics])) for way, metrics in seen.items()}
        value = found.pop("replayed", None)
        return Row(f"{kind}: {name}", found.pop("free") if value is None else value, unit, peers=found, **options)

    rows = [
        row("KL of engine and trainer", "kl", "nats"),
        row("mean |Δ logprob|", "mismatch", "nats"),
        row("largest |Δ logprob|", "mismatch_max", "nats"),
        row("mean weight of tis", "correction", ""),
        row("effective sample size", "ess", "share"),
    ]
    if kind == "moe":
        differs = np.mean([each["routing_differs"] for each in seen["replayed"]])
        rows.append(Row("moe: routers that would choose otherwise", float(differs), "share"))
        rows.append(Row("moe: KL, replayed ÷ free", rows[0].value / rows[0].peers["free"], "", goal="≤ 0.5"))
    yield rows


def _make_model(kind: str, seed: int, *, is_rounded: bool = False) -> PreTrainedModel:
    import transformers

    config = transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS) if kind == "moe" else transformers.Qwen3Config(**SHAPE)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=DEVIATION)
            if is_rounded:
                parameter.copy_(parameter.bfloat16())
    return prepare(model, name=kind)


def _sample(model: PreTrainedModel, *, count: int) -> list[Rollout]:
    core = EngineCore(model, name="engine", slots=count, context=PROMPT + NEW + 1, record_routing=True)
    done: list[Rollout] = []
    for index in range(count):
        tokens = np.random.default_rng(index).integers(3, VOCABULARY, size=PROMPT)
        prompt = Rollout.from_prompt(tokens, id=str(index), group=str(index))
        core.submit(Request(prompt, Sampling(max_tokens=NEW, seed=index), on_done=done.append))
    while core.has_work:
        core.step()
    return done
