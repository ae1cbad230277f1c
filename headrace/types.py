"""The contract: the few records that cross a process line, each frozen and checked when it is made.

`Rollout` comes up from the engines, `Batch` goes to the trainer, `WeightUpdate` comes down. A rollout is one flat
record aligned per token; single-turn, tool use, multi-turn, partial and resumed rollouts are all this one shape.

A worked example, a two-token prompt answered by two sampled tokens:

    index      0       1       2        3
    token_ids  7       9       4        2
    source     PROMPT  PROMPT  SAMPLED  SAMPLED
    loss_mask  False   False   True     True
    logprobs   0       0       -0.31    -0.02
    versions   -1      -1      12       13        the weights changed between the two
    calls      Call(start=2, stop=4, ...)
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.drawn import (
    Call,
    FinishReason,
    InfraAbort,
    Invalid,
    Outcome,
    Sampling,
    SamplingMask,
    Scored,
    Source,
)
from headrace.manifest import NOTHING, Manifest, TensorInfo
from headrace.routed import check_routing, cut_routing, grown_routing, unknown_expert, unknown_routing
from headrace.validate import Array, Plain, check_kind, check_plain, equal_records, frozen, trusted, trusted_copy

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Array",
    "Batch",
    "Call",
    "Episode",
    "FinishReason",
    "InfraAbort",
    "Invalid",
    "Manifest",
    "Outcome",
    "Payload",
    "Plain",
    "Rollout",
    "Sampling",
    "SamplingMask",
    "Scored",
    "Source",
    "TensorInfo",
    "WeightUpdate",
    "check_plain",
    "unknown_expert",
    "unknown_routing",
]


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
        _check_outcome(self.outcome)
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

    def renamed(self, *, id: str, episode: str, group: str, index: int) -> Rollout:
        """The same tokens as another's, in dictionaries of its own: siblings begin with one prompt."""
        names = {"id": id, "episode": episode or id, "group": group or id, "index": index}
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
            _check_outcome(changes["outcome"])
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


def _check_outcome(outcome: object) -> None:
    check_kind(outcome, (Scored, Invalid, InfraAbort, type(None)), "outcome")


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One attempt at one task: the unit that buffers, staleness and advantages work on."""

    id: str
    group: str
    task: dict[str, Plain]
    """The row, as plain data."""
    rollouts: tuple[Rollout, ...] = ()
    """One; several when agents interact or a history forks."""
    environment: str = "single_turn"
    started: float = 0.0
    finished: float = 0.0
    attempts: int = 1
    """How often it was begun, faults of the machinery included."""
    outcome: Outcome | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollouts", tuple(self.rollouts))
        check_kind(self.task, dict, f"episode {self.id!r}: task")
        check_plain(self.task, where=f"episode {self.id!r}: task")
        self._check_members()

    def replace(self, **changes: Any) -> Episode:  # noqa: ANN401
        """A copy with some fields changed, checked again where a check could fail."""
        if not changes.keys() <= _FREE_OF_EPISODE:
            return dataclasses.replace(self, **changes)
        if "rollouts" in changes:
            changes["rollouts"] = tuple(changes["rollouts"])
        copy = trusted_copy(self, changes)
        copy._check_members()
        return copy

    def _check_members(self) -> None:
        _check_outcome(self.outcome)
        for rollout in self.rollouts:
            if rollout.group != self.group:
                raise ValueError(f"episode {self.id!r} of group {self.group!r} holds a rollout of {rollout.group!r}")

    @property
    def oldest_version(self) -> int:
        """The oldest version in any of its rollouts; -1 if nothing was sampled."""
        versions = [rollout.oldest_version for rollout in self.rollouts if rollout.num_sampled]
        return min(versions, default=-1)

    @property
    def reward(self) -> float | None:
        return self.outcome.reward if isinstance(self.outcome, Scored) else None


_FREE_OF_EPISODE = frozenset({"attempts", "outcome", "rollouts", "started", "finished"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """What one version is trained on. The trainer needs nothing else, and does not know the algorithm."""

    rollouts: tuple[Rollout, ...]
    advantages: tuple[Array, ...]
    """One [T] float32 array per rollout."""
    weights: tuple[Array, ...]
    """One [T] float32 array per rollout: normalisation and whatever else scales a token's loss. Sums, never means, are
    taken over tokens, so that the gradient cannot depend on how they are packed."""
    loss: str
    """A loss of ours by name, or a user's as `module:name`."""
    constants: dict[str, float] = field(default_factory=dict)
    """The loss's keyword arguments."""
    correction: str = "none"
    """How staleness is corrected; see `headrace.staleness`."""
    correction_constants: dict[str, float] = field(default_factory=dict)
    kl: str = "none"
    """How the KL to the reference model, which is added to the loss, is estimated: `k1`, `k2`, `k3`."""
    kl_weight: float = 0.0
    """What it is multiplied by."""
    version: int
    """The version being trained from; training makes version + 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollouts", tuple(self.rollouts))
        check_kind(self.version, int, "batch: version")
        if self.version < 0:
            raise ValueError(f"batch: version {self.version}")
        check_kind(self.kl_weight, (int, float), "batch: kl_weight")
        object.__setattr__(self, "kl_weight", float(self.kl_weight))
        if not math.isfinite(self.kl_weight) or self.kl_weight < 0:
            raise ValueError(f"batch: kl_weight = {self.kl_weight} must be finite and ≥ 0")
        for name in ("advantages", "weights"):
            arrays = tuple(frozen(array, np.float32, name) for array in getattr(self, name))
            object.__setattr__(self, name, arrays)
            if len(arrays) != len(self.rollouts):
                raise ValueError(f"batch: {len(arrays)} {name} for {len(self.rollouts)} rollouts")
            for rollout, array in zip(self.rollouts, arrays, strict=True):
                if array.shape != (len(rollout),) or not bool(np.isfinite(array).all()):
                    raise ValueError(f"batch: {name} of rollout {rollout.id!r} must be finite, shaped ({len(rollout)},)")
        for name in ("constants", "correction_constants"):
            object.__setattr__(self, name, {key: float(value) for key, value in getattr(self, name).items()})

    def __eq__(self, other: object) -> bool:
        return equal_records(self, other)

    @classmethod
    def from_columns(
        cls,
        rollouts: Sequence[Rollout],
        *,
        advantages: Array,
        weights: Array,
        **settings: Any,  # noqa: ANN401  (the other fields)
    ) -> Batch:
        """From arrays over the tokens of all rollouts, one after another; they are checked as a whole."""
        stops = np.cumsum([len(rollout) for rollout in rollouts]).tolist()
        columns = {
            "advantages": frozen(advantages, np.float32, "advantages"),
            "weights": frozen(weights, np.float32, "weights"),
        }
        for name, column in columns.items():
            if column.shape != ((stops or [0])[-1],):
                raise ValueError(f"batch: {name} have shape {column.shape} but there are {(stops or [0])[-1]} tokens")
            if not bool(np.isfinite(column).all()):
                at = bisect.bisect_right(stops, int(np.isfinite(column).argmin()))
                raise ValueError(f"batch: {name} of rollout {rollouts[at].id!r} must be finite")
        places = list(map(slice, [0, *stops[:-1]], stops))
        arrays = {name: tuple(map(column.__getitem__, places)) for name, column in columns.items()}
        checked = cls(rollouts=(), advantages=(), weights=(), **settings)
        return trusted_copy(checked, {"rollouts": tuple(rollouts), **arrays})

    @property
    def num_tokens(self) -> int:
        return sum(len(rollout) for rollout in self.rollouts)


class Payload(enum.StrEnum):
    """What a weight update carries."""

    FULL = "full"
    ADAPTER = "adapter"
    DELTA = "delta"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """New weights of a policy: which they are, how they travel, and how the receiver knows it has them."""

    policy: str
    lineage: str
    version: int
    base_version: int | None = None
    """For a delta, the version it must be applied to."""
    payload: Payload = Payload.FULL
    adapter: dict[str, Plain] | None = None
    """The adapter's configuration, for an adapter-only update."""
    transport: str = "memory"
    place: dict[str, Plain] = field(default_factory=dict)
    """Where its bytes are to be had, in the transport's own words."""
    manifest: Manifest = NOTHING
    """May be given as any sequence of `TensorInfo`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "payload", Payload(self.payload))
        if not isinstance(self.manifest, Manifest):
            object.__setattr__(self, "manifest", Manifest.of(self.manifest))
        check_kind(self.version, int, "weight update: version")
        check_plain(self.place, where="weight update: place")
        if self.version < 0 or (self.base_version is not None and not 0 <= self.base_version < self.version):
            raise ValueError(f"weight update: version {self.version} on base {self.base_version}")
        if (self.payload is Payload.DELTA) != (self.base_version is not None):
            raise ValueError(f"weight update {self.version}: a delta has a base_version, nothing else does")
        if (self.payload is Payload.ADAPTER) != (self.adapter is not None):
            raise ValueError(f"weight update {self.version}: an adapter payload has an adapter config, nothing else does")
        if self.adapter is not None:
            check_plain(self.adapter, where="weight update: adapter")
