"""`headrace bench mismatch`: how far engine and trainer disagree when they compute differently, and what replay does about it.

The engine's weights are the trainer's, rounded to bfloat16, as those of an engine in bfloat16 are; both sides compute in
float32, so that the figures are the same on any machine. The models are random Qwen3 and Qwen3-MoE of 4 layers, three of each.
With the same rollouts the trainer measures the KL and |Δ logprob| of its tokens, with all that the engine recorded and
without: routing freely instead of replaying its experts, and, where top-p truncates the distribution, without the sampling
mask. tis then weighs the tokens, and its mean weight and the effective sample size say how much it has to mend.

The learning parts train smaller such models on a task: of 8 groups of tokens, to sample from them in turn. After every version
the engine gets the weights rounded to 8 bits (float8 e4m3), a coarser difference than bfloat16; rewards are compared with
replay and tis, with either and with none, and where top-p truncates the distribution with the sampling mask and without.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from headrace.bench.harness import Row, run_parts
from headrace.bench.loads import make_batch
from headrace.engine import EngineCore, Request
from headrace.model import build_tokenizer, prepare
from headrace.records import Rollout, Sampling
from headrace.trainer import DeviceTrainer, TrainSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from transformers import PreTrainedModel

SEEDS, ROLLOUTS, PROMPT, NEW = 3, 64, 32, 64
VOCABULARY, DEVIATION, TOP_P = 512, 0.15, 0.9
WITHOUT = {
    "all": (), "free": ("expert_routing",), "no mask": ("sampling_mask",), "neither": ("expert_routing", "sampling_mask"),
}  # fmt: skip
"""What of the record the trainer does without."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LEARNED, LEARN_NEW, GROUPS, RATE, ENGINE_DIGITS = 60, 12, 8, 4e-3, torch.float8_e4m3fn
SMALL: dict[str, Any] = {**SHAPE, "vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
WAYS: dict[str, dict[str, Any]] = {
    "top-p, no mask": {"top_p": TOP_P, "without": "neither"},
    "top-p": {"top_p": TOP_P},
    "free": {},
    "tis": {"corrects": True},
    "replayed": {"without": "all"},
    "replayed and tis": {"without": "all", "corrects": True},
}
EXPERTS: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}


def run(*, quick: bool, json_file: Path | None, only: str | None = None) -> int:
    """`--quick` measures one model of each kind with few rollouts."""
    torch.set_num_threads(1)  # the models are too small for more
    parts = {name: partial(_measure, name, quick=quick) for name in ("moe", "dense")}
    parts |= {f"{name}-learns": partial(_measure_learning, name, quick=quick) for name in ("moe", "dense")}
    return run_parts("mismatch", parts, quick=quick, json_file=json_file, only=only)


def _measure(kind: str, *, quick: bool) -> Iterator[list[Row]]:
    for top_p in (1.0, TOP_P):
        seen: dict[str, list[dict[str, float]]] = {}
        for seed in range(1 if quick else SEEDS):
            model = _make_model(kind, seed, is_rounded=True)
            rollouts = _sample(model, count=16 if quick else ROLLOUTS, top_p=top_p)
            for way, fields in WITHOUT.items():
                if all(getattr(rollouts[0], field) is not None for field in fields):
                    given = [rollout.replace(**dict.fromkeys(fields)) for rollout in rollouts]
                    trainer = DeviceTrainer(_make_model(kind, seed), tokenizer=build_tokenizer(), settings=TrainSettings())
                    batch = replace(make_batch(given, advantages=[1.0] * len(given), loss="reinforce"), corrections={"tis": {}})
                    seen.setdefault(way, []).append(trainer.forward_backward(batch))
        yield _rows(kind if top_p == 1 else f"{kind}, top-p {top_p}", seen)


def _rows(case: str, seen: Mapping[str, list[dict[str, float]]]) -> list[Row]:
    def row(name: str, metric: str, unit: str) -> Row:
        pick = max if metric == "mismatch_max" else np.mean
        found = {way: float(pick([each[metric] for each in metrics])) for way, metrics in seen.items()}
        return Row(f"{case}: {name}", found.pop("all"), unit, peers=found)

    rows = [
        row("KL of engine and trainer", "kl", "nats"),
        row("mean |Δ logprob|", "mismatch", "nats"),
        row("largest |Δ logprob|", "mismatch_max", "nats"),
        row("mean ratio", "ratio", ""),
        row("mean weight of tis", "correction", ""),
        row("effective sample size", "ess", "share"),
    ]
    if "free" in seen:
        differs = np.mean([each["routing_differs"] for each in seen["all"]])
        rows.append(Row(f"{case}: routers that would choose otherwise", float(differs), "share"))
        rows.append(Row(f"{case}: KL, replayed ÷ free", rows[0].value / rows[0].peers["free"], "", goal="≤ 0.5"))
    return rows


def _measure_learning(kind: str, *, quick: bool) -> Iterator[list[Row]]:
    ways = {name: way for name, way in WAYS.items() if kind == "moe" or not name.startswith("replayed")}
    runs = {
        name: [_learn(kind, seed, num_versions=3 if quick else LEARNED, **way) for seed in range(1 if quick else SEEDS)]
        for name, way in ways.items()
    }
    value = list(runs)[-1]

    def row(name: str, pick: Callable[[list[_Learned]], float], unit: str) -> Row:
        found = {way: pick(each) for way, each in runs.items()}
        return Row(f"{kind} learning: {name}, {value}", found.pop(value), unit, peers=found)

    yield [
        row("mean reward of all versions", lambda each: float(np.mean([run.rewards for run in each])), ""),
        row("reward of the last ten, worst seed", lambda each: float(min(np.mean(run.rewards[-10:]) for run in each)), ""),
        row("mean |Δ logprob|", lambda each: float(np.mean([run.mismatch for run in each])), "nats"),
    ]


class _Learned(NamedTuple):
    rewards: list[float]  # of each version
    mismatch: float


def _learn(
    kind: str, seed: int, *, num_versions: int, top_p: float = 1.0, without: str = "free", corrects: bool = False
) -> _Learned:
    trainer = DeviceTrainer(_make_model(kind, seed, shape=SMALL), tokenizer=build_tokenizer(), settings=TrainSettings())
    engine = _make_model(kind, seed, shape=SMALL)
    core = EngineCore(engine, name="engine", slots=ROLLOUTS, context=2 + LEARN_NEW, record_routing=True)
    rewards, mismatches = [], []
    for version in range(num_versions):
        with torch.no_grad():
            for own, trained in zip(engine.parameters(), trainer.model.parameters(), strict=True):
                own.copy_(trained.to(ENGINE_DIGITS))
        core.changed_weights(policy="policy", lineage="life", version=version)
        number = seed + (version << 8)
        rollouts = _generate(core, count=ROLLOUTS, vocabulary=32, length=1, new=LEARN_NEW, seed=number, top_p=top_p)
        groups = np.stack([rollout.token_ids for rollout in rollouts]) * GROUPS // 32
        reached = ((groups[:, 1:] - groups[:, :-1]) % GROUPS == 1).mean(axis=1)
        advantages = (reached - reached.mean()) / (reached.std() + 1e-6)
        given = [rollout.replace(**dict.fromkeys(WITHOUT[without])) for rollout in rollouts]
        batch = make_batch(given, advantages=advantages, loss="reinforce")
        batch = replace(batch, corrections={"tis": {}} if corrects else {}, version=version)
        mismatches.append(trainer.forward_backward(batch)["mismatch"])
        trainer.optim_step(RATE)
        rewards.append(float(reached.mean()))
    return _Learned(rewards, float(np.mean(mismatches)))


def _make_model(kind: str, seed: int, *, is_rounded: bool = False, shape: Mapping[str, Any] = SHAPE) -> PreTrainedModel:
    import transformers

    config = transformers.Qwen3MoeConfig(**shape, **EXPERTS) if kind == "moe" else transformers.Qwen3Config(**shape)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=DEVIATION)
            if is_rounded:
                parameter.copy_(parameter.bfloat16())
    return prepare(model, name=kind)


def _sample(model: PreTrainedModel, *, count: int, top_p: float) -> list[Rollout]:
    core = EngineCore(model, name="engine", slots=count, context=PROMPT + NEW + 1, record_routing=True)
    return _generate(core, count=count, vocabulary=VOCABULARY, length=PROMPT, new=NEW, top_p=top_p)


def _generate(
    core: EngineCore, *, count: int, vocabulary: int, length: int, new: int, seed: int = 0, top_p: float = 1.0
) -> list[Rollout]:
    done: list[Rollout] = []
    for index in range(seed * count, (seed + 1) * count):
        tokens = np.random.default_rng(index).integers(3, vocabulary, size=length)
        prompt = Rollout.from_prompt(tokens, id=str(index), group=str(index))
        core.submit(Request(prompt, Sampling(max_tokens=new, top_p=top_p, seed=index), on_done=done.append))
    while core.has_work:
        core.step()
    return done
