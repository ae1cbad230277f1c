"""What an emulated cluster can do, how long the completions are that it samples, and the bound that follows from both."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.bench.loads import lognormal_lengths

if TYPE_CHECKING:
    from headrace.records import Array, Rollout


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the machines of a cluster can do, and how long completions are."""

    name: str
    sigma: float
    """Of the lognormal lengths."""
    training: float
    """The trainer's seconds per token, as a multiple of the engines'."""
    engines: int = 4
    slots: int = 32
    """Of each engine."""
    groups_per_batch: int = 32
    group_size: int = 8
    mean_tokens: float = 512.0
    """Before truncation."""
    max_tokens: int = 2048
    decode_seconds: float = 0.03
    """Of a step, which adds a token to every rollout of an engine."""
    prefill_rate: float = 10_000.0
    """Tokens a second and engine that are computed again; it decodes nothing meanwhile."""
    transfer_seconds: float = 2.0
    """From the trainer to the engines, which decode meanwhile."""
    swap_seconds: float = 0.03
    """In which an engine exchanges its weights and decodes nothing."""
    offer_seconds: float = 0.5
    """In which the trainer copies its weights, beside the next step's passes."""
    score_seconds: float = 1.0
    warm_versions: int = 12
    """Trained before the window that is measured."""
    versions: int = 40
    """Of the window."""
    last_versions: int = 8
    """Trained after it: a run's last versions submit nothing more."""
    seed: int = 0
    """Of the lengths."""

    @property
    def steps(self) -> int:
        return self.warm_versions + self.versions + self.last_versions

    @property
    def num_slots(self) -> int:
        return self.engines * self.slots

    @property
    def batch(self) -> int:
        return self.groups_per_batch * self.group_size

    @property
    def generation_rate(self) -> float:
        """Tokens a second with every slot busy."""
        return self.num_slots / self.decode_seconds

    @property
    def training_rate(self) -> float:
        """Tokens a second of a trainer that never waits."""
        return self.generation_rate / self.training

    @property
    def bound(self) -> float:
        """Tokens a second of the slower of two pools that never wait for each other."""
        return min(self.generation_rate, self.training_rate)

    @property
    def lending_bound(self) -> float:
        """The same if the trainer's device is one more engine whenever it does not train, and changing costs nothing."""
        engine = self.generation_rate / self.engines
        return min(self.training_rate, (self.generation_rate + engine) / (1 + engine / self.training_rate))

    @functools.cached_property
    def lengths(self) -> Array:
        """[groups, group_size]: the tokens of every completion, the same for every contestant."""
        count = 4 * self.steps * self.batch
        lengths = lognormal_lengths(count, mean=self.mean_tokens, sigma=self.sigma, cap=self.max_tokens, seed=self.seed)
        return np.asarray(lengths).reshape(-1, self.group_size)

    def length(self, rollout: Rollout) -> int:
        """Of the whole completion. Groups are named by their number in the order of submission."""
        return int(self.lengths[int(rollout.group.removeprefix("g")) % len(self.lengths), rollout.index])

    def least_seconds(self) -> float:
        """The least time from the first request to the window's end: the first batch cannot be trained before it is sampled,
        nor the last before all are."""
        versions = self.warm_versions + self.versions
        first, whole = self.lengths[: self.groups_per_batch], self.lengths[: versions * self.groups_per_batch]
        training = whole.sum() / self.training_rate
        return float(
            max(first.sum() / self.generation_rate + training, whole.sum() / self.generation_rate + training / versions)
        )
