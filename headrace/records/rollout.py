"""One sequence of tokens, aligned per token."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.records.check import (
    SAMPLED,
    TOKEN_ARRAYS,
    check_calls,
    check_optional_fields,
    check_sampled,
    check_tokens,
)
from headrace.records.expert_routing import cut_routing, merge_routing
from headrace.records.sampling import Call, FinishReason, Outcome, SamplingMask, Scored
from headrace.records.validate import Array, check_kind, equal_records, frozen, unchecked, unchecked_copy

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """A sequence of tokens, the source of each, and everything needed to train on it."""

    id: str
    """Unique. A retry keeps it; a fork gets its own."""
    episode: str
    group: str
    """Shared by the siblings of one task."""
    index: int
    policy: str = "policy"
    lineage: str = ""
    """Lineage of the weights that sampled it; a new one starts when the trainer restarts from a checkpoint."""
    parent: tuple[str, int] | None = None
    """(rollout id, token index) it was forked at."""
    token_ids: Array
    """[T] int32: prompt, completions and tool replies, in order."""
    source: Array
    """[T] int8: the `Source` of each token."""
    loss_mask: Array
    """[T] bool: True where the token is trained; only sampled tokens are."""
    logprobs: Array
    """[T] float32: of sampled tokens, under the distribution they were really sampled from; 0 elsewhere."""
    versions: Array
    """[T] int32: the policy version that sampled each token, stamped by the engine; -1 elsewhere."""
    calls: tuple[Call, ...] = ()
    """One per generate call; together they cover exactly the sampled tokens."""
    finish_reason: FinishReason | None = None
    """That of the last call; None before the first."""
    expert_routing: Array | None = None
    """[T, MoE layers, top_k] uint8 or int16: experts in token t's forward pass; unknown rows hold 255 or -1."""
    sampling_mask: SamplingMask | None = None
    """Tokens the sampler could choose from; None if never restricted."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Score by reward function."""
    step_rewards: tuple[tuple[int, float], ...] = ()
    """(token index, value) of intermediate rewards."""
    columns: dict[str, Array] = field(default_factory=dict)
    """[T, …] arrays that a loss needs: teacher, reference or proximal logprobs, values, entropy."""
    outcome: Outcome | None = None
    """None until scored."""
    media: None = None
    """Reserved: images and sound are rejected for now."""

    def __post_init__(self) -> None:
        for name, convert in _CONVERT.items():
            object.__setattr__(self, name, convert(getattr(self, name)))
        self._check()

    def _check(self) -> None:
        tokens: dict[str, Array] = {name: getattr(self, name) for name in TOKEN_ARRAYS}
        length = self.token_ids.size
        for name, array in tokens.items():
            if array.shape != (length,):
                problem = f"{name} has shape {array.shape} but there are {length} tokens; it must be one-dimensional"
                raise ValueError(f"rollout {self.id!r}: {problem}")
        where: dict[str, Any] = {"ids": [self.id], "offsets": np.array([0, length])}
        check_tokens(tokens, **where)
        starts, stops = (np.array([getattr(call, name) for call in self.calls], dtype=np.int64) for name in ("start", "stop"))
        check_calls(np.zeros(len(self.calls), dtype=np.int64), starts, stops, source=self.source, **where)
        if self.finish_reason is not (self.calls[-1].finish_reason if self.calls else None):
            raise ValueError(f"rollout {self.id!r}: finish_reason must be that of the last call, or None before the first")
        check_optional_fields(self)

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
        """A rollout with nothing sampled yet. Only its token ids can be wrong, so only they are checked."""
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
        return unchecked(Rollout, {**_DEFAULTS, **names, "token_ids": ids, **nothing, "rewards": {}, "columns": {}})

    def extend(
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
        """Append the tokens that one call sampled, all of them trained. Called by engines. `sampling_mask` and `expert_routing`
        cover all tokens, old and new; where the new routing is unknown, the old stays. Only what is new is checked. Columns are
        dropped, because they were computed over the old tokens."""
        new = {"token_ids": token_ids, "logprobs": logprobs, "versions": versions}
        added = call.stop - len(self)
        try:
            if call.start != len(self):
                raise ValueError(f"call over tokens {call.start} to {call.stop} does not continue from token {len(self)}")
            for name, array in new.items():
                if array.dtype != TOKEN_ARRAYS[name] or array.shape != (added,):
                    problem = f"has dtype {array.dtype} and shape {array.shape} but {added} tokens were sampled"
                    raise ValueError(f"{name} {problem}")
            routing = merge_routing(self.expert_routing, expert_routing, num_tokens=call.stop)
            if sampling_mask is not None:
                sampling_mask.check_covers(call.stop)
        except ValueError as error:
            raise ValueError(f"rollout {self.id!r}: {error}") from None
        check_sampled(new, id=self.id)
        new |= {"source": np.full(added, SAMPLED, dtype=np.int8), "loss_mask": np.ones(added, dtype=bool)}
        changes: dict[str, Any] = {name: np.concatenate([getattr(self, name), array]) for name, array in new.items()}
        for array in changes.values():
            array.flags.writeable = False
        changes |= {"policy": policy, "lineage": lineage, "sampling_mask": sampling_mask, "columns": {}}
        changes |= {"calls": (*self.calls, call), "finish_reason": call.finish_reason, "expert_routing": routing}
        return unchecked_copy(self, changes)

    def forked(self, at: int, *, id: str) -> Rollout:
        """The first `at` tokens as a new rollout, to generate on from there. A call that spans the fork is cut and counts as
        interrupted; later calls, rewards, outcome and columns are dropped. Step rewards before the fork and `loss_mask` stay:
        the caller decides which of the two trains the tokens they share."""
        check_kind(at, int, f"rollout {self.id!r}: the token to fork at")
        if not 1 <= at <= len(self):
            raise ValueError(f"rollout {self.id!r}: cannot be forked at token {at}; it must be 1 to {len(self)}")
        if id == self.id:
            raise ValueError(f"rollout {self.id!r}: a fork needs an id of its own")
        calls = tuple(call.cut(at) for call in self.calls if call.start < at)
        return unchecked_copy(
            self,
            {
                **{name: getattr(self, name)[:at] for name in TOKEN_ARRAYS},
                "id": id,
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

    def replace(self, **changes: Any) -> Rollout:  # noqa: ANN401  (one keyword per field)
        """A copy with some fields changed; checks only what the changes could break."""
        if not changes.keys() <= _FREE_FIELDS:
            return dataclasses.replace(self, **changes)
        for name in changes.keys() & _CONVERT.keys():
            changes[name] = _CONVERT[name](changes[name])
        copy = unchecked_copy(self, changes)
        if not changes.keys() <= _NAMES:
            check_optional_fields(copy)
        return copy

    @property
    def is_sampled(self) -> Array:
        """[T] bool"""
        sampled: Array = self.source == SAMPLED
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
        """The oldest policy version among its tokens; -1 if none were sampled."""
        versions = self.versions[self.is_sampled]
        return int(versions.min()) if len(versions) else -1

    @property
    def temperatures(self) -> Array:
        """[T] float32: the temperature each token was sampled at; 1 elsewhere."""
        result = np.ones(len(self), dtype=np.float32)
        for call in self.calls:
            result[call.start : call.stop] = call.sampling.temperature
        return result

    @property
    def reward(self) -> float | None:
        return self.outcome.reward if isinstance(self.outcome, Scored) else None


_FREE_FIELDS = {f.name for f in dataclasses.fields(Rollout)} - {*TOKEN_ARRAYS, "calls", "finish_reason"}
"""Fields that can change without checking all tokens."""
_NAMES = {"id", "episode", "group", "index", "policy", "lineage"}
"""Fields that need no check at all."""
_DEFAULTS = {f.name: f.default for f in dataclasses.fields(Rollout) if f.default is not dataclasses.MISSING}
_CONVERT: dict[str, Callable[[Any], Any]] = {
    **{name: partial(frozen, dtype=dtype, name=name) for name, dtype in TOKEN_ARRAYS.items()},
    "calls": tuple,
    "parent": lambda parent: None if parent is None else (str(parent[0]), int(parent[1])),
    "rewards": lambda rewards: {str(name): float(value) for name, value in rewards.items()},
    "step_rewards": lambda rewards: tuple((int(at), float(value)) for at, value in rewards),
    "columns": lambda columns: {name: frozen(array, None, name) for name, array in columns.items()},
    "finish_reason": lambda reason: None if reason is None else FinishReason(reason),
    "expert_routing": lambda routing: None if routing is None else frozen(routing, None, "expert_routing"),
}
"""Converts a given value to its field's type."""
