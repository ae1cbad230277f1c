"""The loads of `headrace bench step` and the ways to run them."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from headrace.bench.loads import MEDIUM, QWEN3_0_6B, SMALL
from headrace.engine import choose_python, find_vllm
from headrace.settings import ConfigError

LONG = {"8k": 8192, "32k": 32_768}
"""The longest completions that `--lengths` names."""
_LONG_ON_CPU = 64
"""By which a CPU's lengths are divided."""


@dataclass(frozen=True)
class Plan:
    """The load for a GPU or a CPU: after the warm-up, `steps` steps of `completions` completions, which have `tokens` tokens
    each, or a long tail of that mean and at most `cap`."""

    device: str
    dtype: str
    shape: dict[str, Any]
    completions: int
    prompt_tokens: int
    tokens: int
    cap: int
    micro_batch_tokens: int
    steps: int
    warmups: int = 2
    warmup_cap: int = 1 << 30
    """The longest completions of the warm-up steps on a long tail."""
    siblings: int = 8
    goal: str = ""
    """For our completion tokens/s ÷ TRL's, with completions of one length."""
    orchestrate: str = "local"

    def make_tasks(self) -> list[dict[str, Any]]:
        """Prompts of made-up words, no two alike, some more than the steps need."""
        count = self.completions // self.siblings * (self.warmups + self.steps + 4)
        prompts = np.random.default_rng(0).integers(1, int(self.shape["vocab_size"]), size=(count, self.prompt_tokens))
        return [{"prompt": " ".join(f"w{token}" for token in prompt)} for prompt in prompts]

    def lengths(self, *, has_tail: bool) -> list[int]:
        """Tokens of each completion of a step. A long tail has the quantiles of a lognormal distribution, in random order: most
        are short and a few are very long. They are the same in every step, so that all steps do the same work."""
        if not has_tail:
            return [self.tokens] * self.completions
        logs = NormalDist(math.log(self.tokens) - 0.5, 1.0)
        quantiles = [math.exp(logs.inv_cdf((number + 0.5) / self.completions)) for number in range(self.completions)]
        found: list[int] = np.random.default_rng(0).permutation(np.clip(np.rint(quantiles), 1, self.cap).astype(int)).tolist()
        return found

    def length_of(self, group: int, index: int) -> int:
        """On a long tail, of a sibling of a run's group; those of the warm-up steps may be cut."""
        number = group * self.siblings + index
        is_warmup = number < self.warmups * self.completions
        return min(self._tail[number % self.completions], self.warmup_cap if is_warmup else self.cap)

    @functools.cached_property
    def _tail(self) -> list[int]:
        return self.lengths(has_tail=True)

    def describe(self) -> str:
        """The sizes of a step on a long tail."""
        lengths, warmup = self.lengths(has_tail=True), min(self.warmup_cap, self.cap)
        return "; ".join(
            [
                f"{self.completions} completions of {min(lengths):,} to {max(lengths):,} tokens, {sum(lengths):,} a step",
                f"groups of {self.siblings}, prompts of {self.prompt_tokens}",
                f"passes of at most {self.micro_batch_tokens:,} tokens",
                f"{self.steps} steps after {self.warmups} of at most {warmup:,} tokens a completion",
            ]
        )


@dataclass(frozen=True)
class Variant:
    """A way to run the same steps."""

    name: str
    settings: dict[str, Any]
    max_lag: int = 0
    has_tail: bool = False

    @property
    def is_judged(self) -> bool:
        """Whether the goal applies: it is set for completions of one length on the native engine."""
        return not self.has_tail and "engine.kind" not in self.settings

    def on_tail(self, what: str) -> Variant:
        """The same with a long tail of completions."""
        return dataclasses.replace(self, name=f"{self.name}, {what}", has_tail=True)


VARIANTS = (
    Variant("in turn", {}),
    Variant("in turn, asleep", {"engine.sleep": "cache"}),
    Variant("lag 1", {}, max_lag=1),
    Variant("lag 2", {}, max_lag=2),
)
_VLLM = {"engine.kind": "vllm", "orchestrate": "local", "deadline": 600.0}
"""The deadline allows for a server that takes minutes to start."""
IN_ORDER = Variant("lag 1, in order", {"buffer.order": "submission"}, max_lag=1)
"""For long completions: a batch waits for the slow groups rather than leave them to be rejected as too old."""
OVER_VLLM = (Variant("in turn, vLLM", _VLLM), Variant("lag 1, vLLM", _VLLM, max_lag=1))


def make_plan(device: str, *, quick: bool, longest: int = 0) -> Plan:
    """For a GPU or a CPU; `quick` takes fewer steps, and on a CPU a smaller model. `longest`: of completions in a long tail."""
    if device == "cuda":
        on_gpu = functools.partial(Plan, device, "bfloat16", QWEN3_0_6B, prompt_tokens=64)
        if longest:  # few rollouts, since the last of a step takes a decode step per token
            few: dict[str, Any] = {"completions": 64, "steps": 4} if longest == LONG["8k"] else {"completions": 16, "steps": 2}
            few |= {"warmups": 1, "warmup_cap": 512}
            return on_gpu(tokens=longest // 4, cap=longest, micro_batch_tokens=max(16_384, 64 + longest), **few)
        return on_gpu(completions=512, tokens=256, cap=1024, micro_batch_tokens=16_384, steps=2 if quick else 5, goal="≥ 6")
    on_cpu = functools.partial(Plan, device, "float32", prompt_tokens=16, micro_batch_tokens=4096)
    small = {**SMALL, "num_hidden_layers": 2}
    if longest:
        cap = longest // _LONG_ON_CPU
        return on_cpu(small if quick else MEDIUM, tokens=cap // 4, cap=cap, completions=16, steps=2, warmups=1, warmup_cap=16)
    if quick:  # prompt and completion are no shorter than the canary, which a vLLM server must score
        return on_cpu(small, completions=16, tokens=24, cap=48, steps=2)
    return on_cpu(MEDIUM, completions=64, tokens=64, cap=256, steps=6)


def variants(lengths: str = "") -> dict[str, Variant]:
    """By the names that `--only` takes; with `lengths`, all of them on a long tail."""
    found = [*VARIANTS, *(OVER_VLLM if _has_vllm() else ())]
    found += [IN_ORDER] if lengths else [variant.on_tail("long tail") for variant in VARIANTS]
    by_name = {variant.name.replace(", ", "-").replace(" ", "-"): variant for variant in found}
    return {name: variant.on_tail(lengths) for name, variant in by_name.items()} if lengths else by_name


def _has_vllm() -> bool:
    try:
        find_vllm(choose_python(""))
    except ConfigError:
        return False
    return True
