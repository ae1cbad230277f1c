"""What benchmarks run on: models with random weights in the shapes of real ones, requests, rollouts, batches and trainers."""

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
"""Of every step that is timed: the same arithmetic, but the weights stay as they are. All turns then do the same work, and
gradients can be compared after any of them."""


def model_shape(kind: str, *sizes: int) -> dict[str, Any]:
    """A transformers configuration with tied embeddings, of these sizes in this order."""
    layers = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
    return {"model_type": kind, **dict(zip(layers + heads, sizes, strict=True)), "tie_word_embeddings": True}


QWEN3_0_6B = model_shape("qwen3", 151_936, 1024, 3072, 28, 16, 8, 128, 40_960)
SMOLLM2_135M = model_shape("llama", 49_152, 576, 1536, 30, 9, 3, 64, 8192)
MEDIUM = model_shape("qwen3", 8192, 256, 768, 6, 4, 2, 64, 2048)
"""For training on a CPU."""
SMALL = model_shape("llama", 512, 128, 384, 4, 4, 2, 32, 2048)
"""For `--quick`: shows in seconds that everything runs."""


def write_random_model(shape: dict[str, Any], folder: Path, *, dtype: str, seed: int = 0) -> str:
    """Write a model of this shape with random weights as a Hugging Face folder, and return the folder; no token ends a turn.

    Its tokenizer has one made-up word for each token. Without an end token every completion has all the tokens it may have,
    and no `min_tokens` is needed, which would mask the distribution at every token.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {name: value for name, value in shape.items() if name != "model_type"}
    config = AutoConfig.for_model(shape["model_type"], **given, bos_token_id=None, eos_token_id=None)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU takes long over half a billion random numbers
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    build_words(int(shape["vocab_size"])).save_pretrained(folder)
    return str(folder)


def build_words(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of the words `w0` to `w{vocabulary - 1}`, separated by spaces, without an end token."""
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
    """Whether all requests are siblings on one prompt."""

    @property
    def num_tokens(self) -> int:
        """To be sampled in all."""
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
    """A kind of workload: what stays the same from turn to turn."""

    name: str
    prompt_tokens: int
    lengths: tuple[int, ...]
    goals: Mapping[str, str] = field(default_factory=dict)
    """Of its tokens a second (""), of the ratio to each peer's (its name), and of a decode step's share ("roofline")."""
    is_group: bool = False
    """Whether all requests are siblings on one prompt."""

    @classmethod
    def uniform(cls, count: int, prompt_tokens: int, length: int, **more: Any) -> Load:  # noqa: ANN401  (fields of a load)
        """`count` requests of one size."""
        name = f"{count} {'siblings' if more.get('is_group') else '×'} ({prompt_tokens} + {length})"
        return cls(name, prompt_tokens, (length,) * count, **more)

    @classmethod
    def long_tail(cls, count: int, prompt_tokens: int, *, mean: float, cap: int, goals: Mapping[str, str]) -> Load:
        """Lengths as the completions of a batch have them: most are short, a few are very long."""
        lengths = lognormal_lengths(count, mean=mean, sigma=1.0, cap=cap)
        name = f"long tail, {count} × ({prompt_tokens} + {min(lengths)}…{max(lengths)})"
        return cls(name, prompt_tokens, lengths, goals=goals)

    def shortened(self, length: int) -> Load:
        """The same prompts with at most `length` tokens each: enough to load kernels."""
        return replace(self, lengths=tuple(min(length, own) for own in self.lengths))

    def sample(self, *, vocabulary: int, seed: int) -> Workload:
        """The requests of one turn. No prompt starts like one of another turn or load, so that no prefix is cached."""
        random = np.random.default_rng([seed, *self.name.encode()])
        count = len(self.lengths)
        prompts = random.integers(1, vocabulary, size=(1 if self.is_group else count, self.prompt_tokens)).tolist()
        return Workload(tuple(map(tuple, prompts * (count if self.is_group else 1))), self.lengths, is_group=self.is_group)


def lognormal_lengths(count: int, *, mean: float, sigma: float, cap: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of this mean before the cap, the same ones on every machine."""
    center = math.log(mean) - sigma**2 / 2
    lengths = np.random.default_rng(seed).lognormal(center, sigma, size=count)
    return tuple(int(length) for length in np.clip(np.rint(lengths), 1, cap))


def finished(
    prompt: Rollout,
    token_ids: Array,
    *,
    logprobs: Array | float = -1.0,
    version: int = 0,
    lineage: str = "",
    sampling: Sampling | None = None,
) -> Rollout:
    """The prompt with a completion of these tokens."""
    count, start = len(token_ids), len(prompt)
    call = Call(
        start=start,
        stop=start + count,
        engine="bench",
        sampling=sampling or Sampling(max_tokens=count),
        finish_reason=FinishReason.LENGTH,
        started=0.0,
        finished=0.0,
    )
    return prompt.extend(
        call,
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=np.broadcast_to(np.asarray(logprobs, dtype=np.float32), count).copy(),
        versions=np.full(count, version, dtype=np.int32),
        policy="policy",
        lineage=lineage,
    )


def make_rollouts(lengths: Sequence[int], *, prompt_tokens: int, vocabulary: int, seed: int = 0) -> list[Rollout]:
    """Random tokens in rollouts of these lengths, prompts included; everything after the prompt is trained."""
    random = np.random.default_rng(seed)
    rollouts = []
    for number, length in enumerate(lengths):
        token_ids = random.integers(1, vocabulary, size=length).astype(np.int32)
        prompt = Rollout.from_prompt(token_ids[:prompt_tokens], id=f"r{number}")
        rollouts.append(finished(prompt, token_ids[prompt_tokens:], logprobs=-np.log(vocabulary)))
    return rollouts


def make_group(name: str, prompt: int, completions: Sequence[int], *, vocabulary: int, seed: int) -> list[Rollout]:
    """Siblings on one prompt of random tokens, with completions of these lengths."""
    random = np.random.default_rng(seed)
    token_ids = random.integers(1, vocabulary, size=prompt)
    return [
        finished(
            Rollout.from_prompt(token_ids, id=f"{name}/{index}", group=name, index=index),
            random.integers(1, vocabulary, size=length),
        )
        for index, length in enumerate(completions)
    ]


def make_batch(rollouts: Sequence[Rollout], *, advantages: Sequence[float] | Array, loss: str = "grpo") -> Batch:
    """A batch whose loss is the mean over trained tokens; there is one advantage for each rollout."""
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
    """GRPO on rollouts as if the trainer's own weights had sampled them: all ratios are 1 and none is clipped."""
    own = trainer.forward(make_batch(rollouts, advantages=advantages))
    pairs = zip(rollouts, own, strict=True)
    return make_batch([rollout.replace(logprobs=np.minimum(logprobs, 0)) for rollout, logprobs in pairs], advantages=advantages)


def make_trainer(folder: str, *, dtype: str, device: str, **train: Any) -> DeviceTrainer:  # noqa: ANN401  (settings)
    """As a run builds it, with these settings of `[train]`: float32 weights, products in `dtype`."""
    from headrace.launch import build_trainer  # loads torch, which a process that only makes requests need not

    recipe = make_recipe({"device": device, "model": {"path": folder, "dtype": dtype}, "train": train})
    return build_trainer(recipe, folder, device=device)


def gradient_of(trainer: DeviceTrainer) -> dict[str, torch.Tensor]:
    """What the trainer holds after `forward_backward`, by transformers' names."""
    return {name: trainer.optimizer.gradient(name).clone() for name, _ in trainer.model.named_parameters()}


def relative_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of two gradients, over all weights, as a share of the second's norm."""
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"gradients of different weights: {sorted(ours.keys() ^ theirs.keys())[:3]} …")
    apart = sum(float((ours[name].float() - theirs[name].float()).square().sum()) for name in theirs)
    whole = sum(float(gradient.float().square().sum()) for gradient in theirs.values())
    return float(np.sqrt(apart / whole))
