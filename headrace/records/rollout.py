"""One sequence of tokens, aligned per token."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.records.expert_routing import check_routing, cut_routing, grown_routing
from headrace.records.sampling import Call, FinishReason, InfraAbort, Invalid, Outcome, SamplingMask, Scored, Source
from headrace.records.validate import Array, check_kind, equal_records, frozen, trusted, trusted_copy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One sequence of tokens, where each came from, and everything needed to train on it."""

    id: str
    """Unique; a re-issue after a fault keeps it, a fork gets its own."""
    episode: str
    """The episode it belongs to."""
    group: str
    """Siblings of one task share it."""
    index: int
    """Which sibling it is."""
    policy: str = "policy"
    """Which policy sampled it."""
    lineage: str = ""
    """In which life of the policy's trainer."""
    parent: tuple[str, int] | None = None
    """(rollout id, token index) it was forked at."""
    token_ids: Array
    """[T] int32: prompt, completions and tool replies, in order."""
    source: Array
    """[T] int8: a `Source` for each token."""
    loss_mask: Array
    """[T] bool: the token is trained; only sampled tokens are."""
    logprobs: Array
    """[T] float32: of the sampled token under the distribution it was really drawn from; 0 elsewhere."""
    versions: Array
    """[T] int32: the policy version that sampled the token, stamped by the engine; -1 elsewhere."""
    calls: tuple[Call, ...] = ()
    """One for each generate call; together they cover exactly the sampled tokens."""
    finish_reason: FinishReason | None = None
    """Of the last call; None before the first."""
    expert_routing: Array | None = None
    """[T, MoE layers, top_k] uint8 or int16: the experts of token t's forward; unknown rows hold 255 or -1."""
    sampling_mask: SamplingMask | None = None
    """What the sampler could have chosen; None where nothing was cut off."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The score of each reward function by name."""
    step_rewards: tuple[tuple[int, float], ...] = ()
    """(token index, value) for rewards given along the way."""
    columns: dict[str, Array] = field(default_factory=dict)
    """[T, …] arrays a loss asked for: teacher, reference or proximal logprobs, values, entropy."""
    outcome: Outcome | None = None
    """None until scored."""
    media: None = None
    """Reserved: images and sound are refused for now."""

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        for name, dtype in TOKEN_ARRAYS.items():
            set_field(self, name, frozen(getattr(self, name), dtype, name))
        set_field(self, "calls", tuple(self.calls))
        set_field(self, "parent", None if self.parent is None else (str(self.parent[0]), int(self.parent[1])))
        set_field(self, "step_rewards", tuple((int(i), float(value)) for i, value in self.step_rewards))
        set_field(self, "columns", {name: frozen(array, None, name) for name, array in self.columns.items()})
        set_field(self, "rewards", _checked_rewards(self.rewards))
        if self.finish_reason is not None:
            set_field(self, "finish_reason", FinishReason(self.finish_reason))
        if self.expert_routing is not None:
            set_field(self, "expert_routing", frozen(self.expert_routing, None, "expert_routing"))
        try:
            self._check()
        except ValueError as error:
            raise ValueError(f"rollout {self.id!r}: {error}") from None

    def _check(self) -> None:
        if self.media is not None:
            raise ValueError("media is reserved: images and sound are not supported yet")
        check_outcome(self.outcome)
        for name in TOKEN_ARRAYS:
            if getattr(self, name).ndim != 1:
                raise ValueError(f"{name} must be one-dimensional")
        length = len(self.token_ids)
        if self.parent is not None and not 0 <= self.parent[1] <= length:
            raise ValueError(f"parent: forked at token {self.parent[1]} of {length}")
        aligned: dict[str, Array] = {name: getattr(self, name) for name in TOKEN_ARRAYS} | self.columns
        if self.expert_routing is not None:
            check_routing(self.expert_routing, num_tokens=length)
        for name, array in aligned.items():
            if array.ndim < 1 or len(array) != length:
                raise ValueError(f"{name} has shape {array.shape} but there are {length} tokens")
        if self.sampling_mask is not None and len(self.sampling_mask.offsets) != length + 1:
            raise ValueError(f"sampling_mask covers {len(self.sampling_mask.offsets) - 1} of {length} tokens")
        if length and (self.source.min() < 0 or self.source.max() > _LAST_SOURCE):
            raise ValueError("source holds a value that is not a Source")
        if length and self.token_ids.min() < 0:
            raise ValueError("token_ids holds a negative id")
        for index, _ in self.step_rewards:
            if not 0 <= index < length:
                raise ValueError(f"step reward at token {index} of {length}")
        self._check_sampled()

    def _check_sampled(self) -> None:
        sampled = self.is_sampled
        if (self.loss_mask > sampled).any():
            raise ValueError("loss_mask is True on a token that was not sampled")
        if ((self.versions >= 0) != sampled).any() or (len(sampled) and self.versions.min() < -1):
            raise ValueError("versions must be ≥ 0 on sampled tokens and -1 elsewhere")
        logprobs = self.logprobs
        if not np.isfinite(logprobs).all() or (logprobs > MOST_LOGPROB).any() or (logprobs.astype(bool) > sampled).any():
            raise ValueError("logprobs must be finite and ≤ 0 on sampled tokens and 0 elsewhere")
        covered = np.zeros(len(sampled), dtype=bool)
        end = 0
        for call in self.calls:
            if call.start < end or call.stop > len(sampled):
                raise ValueError(f"call over tokens {call.start} to {call.stop} overlaps another or runs past the end")
            covered[call.start : call.stop] = True
            end = call.stop
        if not np.array_equal(covered, sampled):
            raise ValueError("calls do not cover exactly the sampled tokens")
        if self.finish_reason is not (self.calls[-1].finish_reason if self.calls else None):
            raise ValueError("finish_reason must be that of the last call, or None before the first")

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        return equal_records(self, other)

    def __repr__(self) -> str:
        reason = self.finish_reason.value if self.finish_reason else "not generated"
        return f"Rollout({self.id!r}, {len(self)} tokens, {self.num_sampled} sampled, {reason}, {self.outcome})"

    @classmethod
    def from_prompt(
        cls, token_ids: list[int] | Array, *, id: str, episode: str = "", group: str = "", index: int = 0
    ) -> Rollout:
        """A prompt is a rollout with nothing sampled yet. All that can be wrong with one is its tokens."""
        ids = frozen(np.asarray(token_ids, dtype=np.int32), np.int32, "token_ids")
        if ids.ndim != 1 or (len(ids) and ids.min() < 0):
            raise ValueError(f"rollout {id!r}: a prompt is one row of token ids, none of them negative")
        nothing = {
            "source": np.zeros(len(ids), dtype=np.int8),  # PROMPT is 0
            "loss_mask": np.zeros(len(ids), dtype=bool),
            "logprobs": np.zeros(len(ids), dtype=np.float32),
            "versions": np.full(len(ids), -1, dtype=np.int32),
        }
        for array in nothing.values():
            array.flags.writeable = False
        names = {"id": id, "episode": episode or id, "group": group or id, "index": index}
        return trusted(Rollout, {**_rollout_defaults(), **names, "token_ids": ids, **nothing})

    def renamed(self, *, id: str, episode: str, group: str, index: int, policy: str = "policy") -> Rollout:
        """The same tokens as another's, in dictionaries of its own: siblings begin with one prompt."""
        names = {"id": id, "episode": episode or id, "group": group or id, "index": index, "policy": policy}
        return trusted_copy(self, {**names, "rewards": dict(self.rewards), "columns": dict(self.columns)})

    def lengthened(
        self,
        call: Call,
        *,
        token_ids: Array,
        logprobs: Array,
        versions: Array,
        policy: str,
        lineage: str,
        sampling_mask: SamplingMask | None = None,
        expert_routing: Array | None = None,
    ) -> Rollout:
        """With the tokens one call drew appended, all of them trained; for engines.

        `sampling_mask` and `expert_routing` cover all tokens, the old ones too. What was known of the routing stays
        where the new one knows nothing, and all of it where none is given.
        Only what is new is checked. Columns are left behind: they were computed over the old tokens.
        """
        new = {"token_ids": token_ids, "logprobs": logprobs, "versions": versions}
        try:
            _check_drawn(call, new, start=len(self))
            routing = grown_routing(self.expert_routing, expert_routing, num_tokens=call.stop)
            if sampling_mask is not None and len(sampling_mask.offsets) != call.stop + 1:
                raise ValueError(f"sampling_mask covers {len(sampling_mask.offsets) - 1} of {call.stop} tokens")
        except ValueError as error:
            raise ValueError(f"rollout {self.id!r}: {error}") from None
        added = call.stop - call.start
        new |= {"source": np.full(added, _SAMPLED, dtype=np.int8), "loss_mask": np.ones(added, dtype=bool)}
        changes: dict[str, Any] = {name: np.concatenate([getattr(self, name), array]) for name, array in new.items()}
        for array in changes.values():
            array.flags.writeable = False
        changes |= {"policy": policy, "lineage": lineage, "sampling_mask": sampling_mask, "columns": {}}
        changes |= {"calls": (*self.calls, call), "finish_reason": call.finish_reason, "expert_routing": routing}
        return trusted_copy(self, changes)

    def forked(
        self, at: int, *, id: str, episode: str | None = None, group: str | None = None, index: int | None = None
    ) -> Rollout:
        """Its first `at` tokens as a rollout of its own, to be generated on from there; names not given are this one's.

        A call that went past the fork is cut short and counts as interrupted; one that began there or later is left out.
        What was thought of the whole (rewards, outcome, columns) is left behind; step rewards before the fork stay, and
        so does `loss_mask`: who trains a rollout and its fork says which of them trains the tokens they share.
        """
        check_kind(at, int, f"rollout {self.id!r}: the token to fork at")
        if not 1 <= at <= len(self):
            raise ValueError(f"rollout {self.id!r}: cannot be forked at token {at}; it must be 1 to {len(self)}")
        if id == self.id:
            raise ValueError(f"rollout {self.id!r}: a fork needs an id of its own")
        calls = tuple(_cut_call(call, at) for call in self.calls if call.start < at)
        return trusted_copy(
            self,
            {
                **{name: getattr(self, name)[:at] for name in TOKEN_ARRAYS},
                "id": id,
                "episode": self.episode if episode is None else episode,
                "group": self.group if group is None else group,
                "index": self.index if index is None else index,
                "parent": (self.id, at),
                "calls": calls,
                "finish_reason": calls[-1].finish_reason if calls else None,
                "expert_routing": None if self.expert_routing is None else cut_routing(self.expert_routing, at=at),
                "sampling_mask": None if self.sampling_mask is None else self.sampling_mask.cut(at),
                "rewards": {},
                "step_rewards": tuple((token, value) for token, value in self.step_rewards if token < at),
                "columns": {},
                "outcome": None,
            },
        )

    def replace(self, **changes: Any) -> Rollout:  # noqa: ANN401  (one keyword per field, each checked by the new record)
        """A copy with some fields changed, checked again where a check could fail."""
        if not changes.keys() <= _FREE_FIELDS:
            return dataclasses.replace(self, **changes)
        if "rewards" in changes:
            changes["rewards"] = _checked_rewards(changes["rewards"])
        if "outcome" in changes:
            check_outcome(changes["outcome"])
        return trusted_copy(self, changes)

    @property
    def is_sampled(self) -> Array:
        """[T] bool: tokens an engine drew."""
        sampled: Array = self.source == _SAMPLED
        return sampled

    @property
    def num_sampled(self) -> int:
        return int(np.count_nonzero(self.is_sampled))

    @property
    def completion_ids(self) -> list[int]:
        """Everything after the prompt: sampled tokens and tool replies."""
        after = self.source.nonzero()[0]  # PROMPT is 0
        tokens: list[int] = self.token_ids[after[0] :].tolist() if len(after) else []
        return tokens

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled one of its tokens; -1 if none were."""
        versions = self.versions[self.is_sampled]
        return int(versions.min()) if len(versions) else -1

    @property
    def temperatures(self) -> Array:
        """[T] float32: the temperature each sampled token was drawn at; 1 elsewhere."""
        result = np.ones(len(self), dtype=np.float32)
        for call in self.calls:
            result[call.start : call.stop] = call.sampling.temperature
        return result

    @property
    def reward(self) -> float | None:
        """The score, or None where there is none."""
        return self.outcome.reward if isinstance(self.outcome, Scored) else None


TOKEN_ARRAYS: dict[str, type] = {
    "token_ids": np.int32,
    "source": np.int8,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
}
_FREE_FIELDS = frozenset({"id", "episode", "group", "index", "policy", "lineage", "rewards", "outcome"})
"""Fields whose checks need no other field."""
_SAMPLED = int(Source.SAMPLED)
_LAST_SOURCE = int(max(Source))
MOST_LOGPROB = 1e-4
"""Rounding may lift the logprob of a certain token above 0."""


def _rollout_defaults() -> dict[str, Any]:
    """Of the fields that have one, in dictionaries of their own."""
    return {**_PLAIN_DEFAULTS, "rewards": {}, "columns": {}}


_PLAIN_DEFAULTS = {f.name: f.default for f in dataclasses.fields(Rollout) if f.default is not dataclasses.MISSING}


def _check_drawn(call: Call, arrays: dict[str, Array], *, start: int) -> None:
    """Tokens that one call appends at `start`."""
    check_kind(call, Call, "call")
    if call.start != start:
        raise ValueError(f"call over tokens {call.start} to {call.stop} does not go on from token {start}")
    for name, array in arrays.items():
        if array.dtype != TOKEN_ARRAYS[name] or array.shape != (call.stop - start,):
            raise ValueError(
                f"{name} has dtype {array.dtype} and shape {array.shape} but {call.stop - start} tokens were drawn"
            )
    if call.stop == start:
        return
    if arrays["token_ids"].min() < 0:
        raise ValueError("token_ids holds a negative id")
    if arrays["versions"].min() < 0:
        raise ValueError("versions must be ≥ 0 on sampled tokens and -1 elsewhere")
    logprobs = arrays["logprobs"]
    if not (logprobs.min() > -math.inf and logprobs.max() <= MOST_LOGPROB):  # so written, NaN is refused
        raise ValueError("logprobs must be finite and ≤ 0 on sampled tokens and 0 elsewhere")


def _cut_call(call: Call, at: int) -> Call:
    return call if call.stop <= at else trusted_copy(call, {"stop": at, "finish_reason": FinishReason.ABORT})


def _checked_rewards(rewards: dict[str, float]) -> dict[str, float]:
    checked = {str(name): float(value) for name, value in rewards.items()}
    if not all(map(math.isfinite, checked.values())):
        raise ValueError(f"rewards must be finite, not {checked}")
    return checked


def check_outcome(outcome: object) -> None:
    check_kind(outcome, (Scored, Invalid, InfraAbort, type(None)), "outcome")
