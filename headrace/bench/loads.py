"""What benchmarks run on: random models in the shapes of real ones, requests, rollouts, batches and trainers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.config import make_recipe
from headrace.records import Batch, Call, FinishReason, Rollout, Sampling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch
    from transformers import PreTrainedTokenizerFast

    from headrace.records import Array
    from headrace.trainer import DeviceTrainer

LEARNING_RATE = 0.0
"""For timed steps: the same arithmetic, but weights do not change, so all turns do the same work and gradients compare."""


def model_shape(kind: str, *sizes: int) -> dict[str, Any]:
    """A transformers configuration with tied embeddings; `sizes` are in the order below."""
    layers = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
    return {"model_type": kind, **dict(zip(layers + heads, sizes, strict=True)), "tie_word_embeddings": True}


QWEN3_0_6B = model_shape("qwen3", 151_936, 1024, 3072, 28, 16, 8, 128, 40_960)
QWEN3_8B = {**model_shape("qwen3", 151_936, 4096, 12_288, 36, 32, 8, 128, 40_960), "tie_word_embeddings": False}
SMOLLM2_135M = model_shape("llama", 49_152, 576, 1536, 30, 9, 3, 64, 8192)
MEDIUM = model_shape("qwen3", 8192, 256, 768, 6, 4, 2, 64, 2048)
"""For training on a CPU."""
SMALL = model_shape("llama", 512, 128, 384, 4, 4, 2, 32, 2048)
"""For `--quick`: shows within seconds that everything runs."""


def write_random_model(shape: dict[str, Any], folder: Path, *, dtype: str, seed: int = 0) -> str:
    """Write a random model of this shape and a tokenizer of made-up words as a Hugging Face folder; returns the folder.

    Without an end token every completion reaches its full length; `min_tokens` would mask the distribution at every token.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {name: value for name, value in shape.items() if name != "model_type"}
    config = AutoConfig.for_model(shape["model_type"], **given, bos_token_id=None, eos_token_id=None)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU is slow to make half a billion random numbers
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    build_words(int(shape["vocab_size"])).save_pretrained(folder)
    return str(folder)


def build_words(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of the space-separated words `w0` to `w{vocabulary - 1}`, without an end token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(vocabulary)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", clean_up_tokenization_spaces=False)


@dataclass(frozen=True)
class Workload:
    """The requests of one turn, as tokens."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    """Tokens to sample for each prompt; nothing else ends a request."""
    is_group: bool = False
    """Whether all requests are siblings that share one prompt."""

    @property
    def num_tokens(self) -> int:
        """Tokens to sample in total."""
        return sum(self.lengths)

    def requests(self, *, seed: int) -> list[tuple[Rollout, Sampling]]:
        """A prompt and its sampling parameters for each request."""
        return [
            (
                Rollout.from_prompt(list(prompt), id=f"{seed}/{number}", group=f"{seed}" if self.is_group else ""),
                Sampling(temperature=1.0, max_tokens=length, seed=seed * 1_000_003 + number),
            )
            for number, (prompt, length) in enumerate(zip(self.prompts, self.lengths, strict=True))
        ]


@dataclass(frozen=True)
class Load:
    """What the workloads of all turns have in common; `sample` makes the workload of one turn."""

    name: str
    prompt_tokens: int
    lengths: tuple[int, ...]
    goals: Mapping[str, str] = field(default_factory=dict)
    """For tokens/s (key ""), for the ratio to a peer (its name) and for a decode step's share of the roofline ("roofline")."""
    is_group: bool = False

    @classmethod
    def uniform(cls, count: int, prompt_tokens: int, length: int, **more: Any) -> Load:  # noqa: ANN401  (fields of a load)
        """`count` requests of one size."""
        name = f"{count} {'siblings' if more.get('is_group') else '×'} ({prompt_tokens} + {length})"
        return cls(name, prompt_tokens, (length,) * count, **more)

    @classmethod
    def long_tail(cls, count: int, prompt_tokens: int, *, mean: float, cap: int, goals: Mapping[str, str]) -> Load:
        """Lengths like the completions of a real batch: most are short, a few are very long."""
        lengths = lognormal_lengths(count, mean=mean, sigma=1.0, cap=cap)
        name = f"long tail, {count} × ({prompt_tokens} + {min(lengths)}…{max(lengths)})"
        return cls(name, prompt_tokens, lengths, goals=goals)

    def shortened(self, length: int) -> Load:
        """The same prompts with at most `length` tokens each: enough to load kernels."""
        return replace(self, lengths=tuple(min(length, own) for own in self.lengths))

    def sample(self, *, vocabulary: int, seed: int) -> Workload:
        """The requests of one turn. Prompts share no prefix with those of other turns or loads, so none is cached."""
        random = np.random.default_rng([seed, *self.name.encode()])
        count = len(self.lengths)
        prompts = random.integers(1, vocabulary, size=(1 if self.is_group else count, self.prompt_tokens)).tolist()
        return Workload(tuple(map(tuple, prompts * (count if self.is_group else 1))), self.lengths, is_group=self.is_group)


def lognormal_lengths(count: int, *, mean: float, sigma: float, cap: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths with this mean before the cap, the same on every machine."""
    center = math.log(mean) - sigma**2 / 2
    lengths = np.random.default_rng(seed).lognormal(center, sigma, size=count)
    return tuple(int(length) for length in np.clip(np.rint(lengths), 1, cap))


def finished(
    prompt: Rollout,
    token_ids: Array,
    *,
    logprobs: Array | float = -1.0,
    version: Sequence[int] | Array | int = 0,
    policy: str = "policy",
    lineage: str = "",
    sampling: Sampling | None = None,
    engine: str = "bench",
    reason: FinishReason = FinishReason.LENGTH,
) -> Rollout:
    """The prompt extended by a completion of these tokens, all of one version or each of its own."""
    count, start = len(token_ids), len(prompt)
    call = Call(
        start=start,
        stop=start + count,
        engine=engine,
        sampling=sampling or Sampling(max_tokens=count),
        finish_reason=reason,
        started=0.0,
        finished=0.0,
    )
    return prompt.extend(
        call,
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=np.broadcast_to(np.asarray(logprobs, dtype=np.float32), count).copy(),
        versions=np.broadcast_to(np.asarray(version, dtype=np.int32), count).copy(),
        policy=policy,
        lineage=lineage,
    )


def make_rollouts(lengths: Sequence[int], *, prompt_tokens: int, vocabulary: int, seed: int = 0) -> list[Rollout]:
    """Rollouts of random tokens with these lengths, prompts included; everything after the prompt is trained."""
    random = np.random.default_rng(seed)
    rollouts = []
    for number, length in enumerate(lengths):
        token_ids = random.integers(1, vocabulary, size=length).astype(np.int32)
        prompt = Rollout.from_prompt(token_ids[:prompt_tokens], id=f"r{number}")
        rollouts.append(finished(prompt, token_ids[prompt_tokens:], logprobs=-np.log(vocabulary)))
    return rollouts


def make_group(name: str, prompt: int, completions: Sequence[int], *, vocabulary: int, seed: int) -> list[Rollout]:
    """Siblings that share a prompt of random tokens, with completions of these lengths."""
    random = np.random.default_rng(seed)
    first = Rollout.from_prompt(random.integers(1, vocabulary, size=prompt), id=name, group=name)
    siblings = [first.replace(id=f"{name}/{index}", index=index) for index in range(len(completions))]
    pairs = zip(siblings, completions, strict=True)
    return [finished(sibling, random.integers(1, vocabulary, size=length)) for sibling, length in pairs]


def make_batch(rollouts: Sequence[Rollout], *, advantages: Sequence[float] | Array, loss: str = "grpo") -> Batch:
    """A batch whose loss is the mean over trained tokens, with one advantage per rollout."""
    mask: Array = np.concatenate([rollout.loss_mask for rollout in rollouts])
    values = np.repeat(np.asarray(advantages, dtype=np.float32), [len(rollout) for rollout in rollouts])
    return Batch.from_columns(
        rollouts,
        advantages=np.where(mask, values, np.float32(0)),
        weights=mask.astype(np.float32) / np.float32(np.count_nonzero(mask)),
        loss=loss,
        version=0,
    )


def make_on_policy_batch(trainer: DeviceTrainer, rollouts: Sequence[Rollout], *, advantages: Sequence[float]) -> Batch:
    """A GRPO batch as if the trainer's own weights had sampled it: all ratios are 1 and nothing is clipped."""
    own = trainer.forward(make_batch(rollouts, advantages=advantages))
    pairs = zip(rollouts, own, strict=True)
    return make_batch([rollout.replace(logprobs=np.minimum(logprobs, 0)) for rollout, logprobs in pairs], advantages=advantages)


def make_trainer(folder: str, *, dtype: str, device: str, **train: Any) -> DeviceTrainer:  # noqa: ANN401  (settings)
    """A trainer as a run builds it, with these `[train]` settings: float32 weights, matrix products in `dtype`."""
    from headrace.launch import build_trainer  # imports torch, which making requests does not need

    recipe = make_recipe({"device": device, "model": {"path": folder, "dtype": dtype}, "train": train})
    return build_trainer(recipe, folder, device=device)


def gradient_of(trainer: DeviceTrainer) -> dict[str, torch.Tensor]:
    """The gradient that the trainer holds after `forward_backward`, by transformers' names."""
    return {name: trainer.optimizer.gradient(name).clone() for name, _ in trainer.model.named_parameters()}


def relative_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """‖ours - theirs‖ ÷ ‖theirs‖, over all weights."""
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"gradients of different weights: {sorted(ours.keys() ^ theirs.keys())[:3]} …")
    apart = sum(float((ours[name].float() - theirs[name].float()).square().sum()) for name in theirs)
    whole = sum(float(gradient.float().square().sum()) for gradient in theirs.values())
    return float(np.sqrt(apart / whole))
