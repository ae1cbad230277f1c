"""The small records in a rollout: where its tokens came from, how they were sampled and scored."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from headrace.records.validate import Array, check_kind, check_plain, equal_records, frozen, grown, unchecked_copy


class Source(enum.IntEnum):
    """Where a token came from."""

    PROMPT = 0
    SAMPLED = 1
    TOOL = 2
    TEMPLATE = 3


class FinishReason(enum.StrEnum):
    """Why the last generate call ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Scored:
    """The rollout has a score; advantages are computed from `reward`."""

    reward: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"Scored.reward must be finite, not {self.reward}; a reward that failed is InfraAbort")


@dataclass(frozen=True, slots=True)
class Invalid:
    """No reward applies: not trained, counted as filtered."""

    reason: str


@dataclass(frozen=True, slots=True)
class InfraAbort:
    """A failure the policy cannot cause: retried while attempts remain, then dropped and counted as failed."""

    reason: str


Outcome: TypeAlias = Scored | Invalid | InfraAbort


def check_outcome(outcome: object) -> None:
    check_kind(outcome, (Scored, Invalid, InfraAbort, type(None)), "outcome")


MAX_STOPS = 16
"""Stop strings per call; the engine searches for each after every token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The distribution to sample from, and when to stop. Needed to recompute a logprob."""

    temperature: float = 1.0
    """0 is greedy; the recorded logprob is then 0 (certain)."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this probability."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one."""
    max_tokens: int = 256
    """New tokens per call, at most."""
    min_tokens: int = 0
    """No stop token is sampled before this many new tokens."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the call; the stop token is part of the rollout."""
    stop: tuple[str, ...] = ()
    """Stop strings; the tokens that complete one are part of the rollout, and the engine trims any later ones."""
    keep_mask: bool = True
    """Record which tokens could be sampled, where not all could. Training needs it; evaluation and serving do not."""
    seed: int = 0
    """Seed and token position key the random numbers, so the same seed samples the same tokens in any batch."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p", "max_tokens", "min_tokens", "seed"):
            self._require(isinstance(getattr(self, name), int | float), name, "a number")
        object.__setattr__(self, "stop_ids", tuple(int(i) for i in self.stop_ids))
        self._require(isinstance(self.stop, tuple | list), "stop", "a list of texts")  # a bare string is a sequence too
        object.__setattr__(self, "stop", tuple(self.stop))
        self._require(len(self.stop) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} texts")
        self._require(all(isinstance(text, str) and text for text in self.stop), "stop", "texts that are not empty")
        for text in self.stop:
            check_plain(text, where="sampling.stop")
        self._require(0 <= self.temperature < math.inf, "temperature", "≥ 0")
        self._require(self.top_k >= 0 and self.top_k == int(self.top_k), "top_k", "a whole number ≥ 0 (0 keeps all)")
        self._require(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        self._require(0 <= self.min_p < 1, "min_p", "in [0, 1)")
        self._require(self.max_tokens >= 1, "max_tokens", "≥ 1")
        self._require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens")
        self._require(isinstance(self.keep_mask, bool), "keep_mask", "true or false")
        self._require(-(1 << 63) <= self.seed < 1 << 63, "seed", "a 64-bit number")

    def _require(self, holds: bool, name: str, wanted: str) -> None:
        if not holds:
            raise ValueError(f"sampling.{name} = {getattr(self, name)!r}: must be {wanted}")

    def with_seed(self, seed: int) -> Sampling:
        """A copy with another seed; nothing is checked again."""
        return unchecked_copy(self, {"seed": seed})

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens cannot be sampled; recomputing a logprob then needs a sampling mask."""
        return self.temperature > 0 and (
            self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or (self.min_tokens > 0 and bool(self.stop_ids))
        )

    @property
    def needs_mask(self) -> bool:
        """Whether the engine records a sampling mask."""
        return self.keep_mask and self.is_truncated


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One generate call: the half-open span of tokens it added, and how they were sampled."""

    start: int
    stop: int
    engine: str
    sampling: Sampling
    finish_reason: FinishReason
    started: float
    """Seconds since the epoch when the engine admitted it."""
    finished: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "finish_reason", FinishReason(self.finish_reason))
        check_kind(self.sampling, Sampling, "Call.sampling")
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"Call spans tokens {self.start} to {self.stop}")

    def cut(self, at: int) -> Call:
        """The call as if interrupted before token `at`, unless it ended earlier."""
        return self if self.stop <= at else unchecked_copy(self, {"stop": at, "finish_reason": FinishReason.ABORT})

    def moved(self, by: int) -> Call:
        """The call as it stands in a rollout that begins so many tokens earlier."""
        return unchecked_copy(self, {"start": self.start + by, "stop": self.stop + by})


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """The ids the sampler could choose for each token: row t is ids[offsets[t]:offsets[t+1]]. Where it could choose most of the
    vocabulary, as under `min_tokens`, the row has those it could not, each as ~id, which is negative. An empty row means no
    restriction (a prompt token, or one sampled from the whole vocabulary)."""

    offsets: Array
    ids: Array

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", frozen(self.offsets, np.int64, "sampling_mask.offsets"))
        object.__setattr__(self, "ids", frozen(self.ids, np.int32, "sampling_mask.ids"))
        offsets = self.offsets
        if offsets.ndim != 1 or self.ids.ndim != 1 or len(offsets) < 1:
            raise ValueError("sampling_mask: offsets and ids must be one-dimensional, offsets not empty")
        if offsets[0] != 0 or offsets[-1] != len(self.ids) or bool((np.diff(offsets) < 0).any()):
            raise ValueError(f"sampling_mask: offsets must rise from 0 to {len(self.ids)}, the number of ids")
        changes = np.flatnonzero(np.diff(self.ids < 0)) + 1
        if bool((offsets[np.searchsorted(offsets, changes)] != changes).any()):
            raise ValueError("sampling_mask: a row lists either what could be chosen or, as ~id, what could not")

    def row(self, index: int) -> Array:
        """The ids that token `index` was chosen from, or ~id of those it could not be."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @staticmethod
    def make_row(is_allowed: Array) -> Array:
        """The row of a token, given which of the vocabulary it could be; the shorter of the two forms."""
        ids = np.flatnonzero(is_allowed)
        return (ids if 2 * len(ids) <= len(is_allowed) else ~np.flatnonzero(~is_allowed)).astype(np.int32)

    @classmethod
    def from_rows(cls, rows: list[Array]) -> SamplingMask:
        """From one array of ids per token."""
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(offsets=offsets, ids=np.concatenate(rows).astype(np.int32) if rows else np.zeros(0, np.int32))

    @classmethod
    def unrestricted(cls, num_tokens: int) -> SamplingMask:
        return cls(offsets=np.zeros(num_tokens + 1, np.int64), ids=np.zeros(0, np.int32))

    def extended(self, later: SamplingMask) -> SamplingMask:
        """This mask followed by that of later tokens, which alone are looked at."""
        offsets = grown(self.offsets, later.offsets[1:] + len(self.ids))
        return unchecked_copy(self, {"offsets": offsets, "ids": grown(self.ids, later.ids)})

    def cut(self, num_tokens: int) -> SamplingMask | None:
        """The mask of the first `num_tokens`; None if none of them is restricted."""
        offsets = self.offsets[: num_tokens + 1]
        return unchecked_copy(self, {"offsets": offsets, "ids": self.ids[: offsets[-1]]}) if offsets[-1] else None

    def rest(self, start: int) -> SamplingMask:
        """The mask of the tokens from `start` on."""
        offsets = self.offsets[start:]
        return unchecked_copy(self, {"offsets": offsets - offsets[0], "ids": self.ids[offsets[0] :]})

    def __eq__(self, other: object) -> bool:
        return equal_records(self, other)


def join_masks(old: SamplingMask | None, new: SamplingMask | None, *, num_old: int, num_new: int) -> SamplingMask | None:
    """The mask of `num_old` tokens followed by `num_new`; None if none of them is restricted."""
    if old is None and new is None:
        return None
    old = SamplingMask.unrestricted(num_old) if old is None else old
    return old.extended(SamplingMask.unrestricted(num_new) if new is None else new)
