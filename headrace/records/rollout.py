"""One sequence of tokens, aligned per token."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.records.check import OPTIONAL_FIELDS, SAMPLED, TOKEN_ARRAYS, check_calls, check_tokens, read_fields
from headrace.records.expert_routing import cut_routing, merge_routing
from headrace.records.sampling import Call, FinishReason, Outcome, Sampling, SamplingMask, Scored, Source, join_masks
from headrace.records.validate import Array, check_kind, equal_records, frozen, grown, unchecked_copy

_TOKEN_BYTES = sum(dtype.itemsize for dtype in TOKEN_ARRAYS.values())

SAMPLED_ENTROPY = "sampled_entropy"
"""The column of what `engine.record_entropy` records: [T] float32, the entropy in nats of the distribution that each sampled
token was really sampled from, at the weights that sampled it; 0 elsewhere. Not the trainer's `entropy`, of its own weights."""


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
    """[T, …] arrays that a loss needs: teacher, reference or proximal logprobs, values, entropy; and `SAMPLED_ENTROPY`."""
    outcome: Outcome | None = None
    """None until scored."""
    media: None = None
    """Reserved: images and sound are rejected for now."""

    def __post_init__(self) -> None:
        tokens = {name: frozen(getattr(self, name), dtype, name) for name, dtype in TOKEN_ARRAYS.items()}
        length = tokens["token_ids"].size
        for name, array in tokens.items():
            if array.shape != (length,):
                problem = f"{name} has shape {array.shape} but there are {length} tokens; it must be one-dimensional"
                raise ValueError(f"rollout {self.id!r}: {problem}")
        where: dict[str, Any] = {"ids": [self.id], "offsets": np.array([0, length])}
        check_tokens(tokens, **where)
        if self.media is not None:
            raise ValueError(f"rollout {self.id!r}: media is reserved: images and sound are not supported yet")
        calls = tuple(self.calls)
        spans = np.array([(0, call.start, call.stop) for call in calls], dtype=np.int64).reshape(-1, 3)
        check_calls(*spans.T, source=tokens["source"], **where)
        reason = None if self.finish_reason is None else FinishReason(self.finish_reason)
        if reason is not (calls[-1].finish_reason if calls else None):
            raise ValueError(f"rollout {self.id!r}: finish_reason must be that of the last call, or None before the first")
        optional = read_fields({name: getattr(self, name) for name in OPTIONAL_FIELDS}, id=self.id, length=length)
        for name, value in {**tokens, **optional, "calls": calls, "finish_reason": reason}.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Of its arrays."""
        size = _TOKEN_BYTES * self.token_ids.size
        if self.columns:
            size += sum(array.nbytes for array in self.columns.values())
        if self.expert_routing is not None:
            size += self.expert_routing.nbytes
        mask = self.sampling_mask
        return size if mask is None else size + mask.offsets.nbytes + mask.ids.nbytes

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
        arrays = {name: np.zeros(len(token_ids), dtype=dtype) for name, dtype in TOKEN_ARRAYS.items()}  # PROMPT is 0
        arrays["token_ids"] = ids = np.array(token_ids, dtype=np.int32)
        if ids.ndim != 1 or (len(ids) and ids.min() < 0):
            raise ValueError(f"rollout {id!r}: a prompt is one row of token ids, none of them negative")
        arrays["versions"].fill(-1)
        for array in arrays.values():
            array.flags.writeable = False
        names = {"id": id, "episode": episode or id, "group": group or id, "index": index}
        return unchecked_copy(_EMPTY, {**names, **arrays, "rewards": {}, "columns": {}})

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
        entropies: Array | None = None,
    ) -> Rollout:
        """Append the tokens that one call sampled, all of them trained. Called by engines. `sampling_mask` and `expert_routing`
        cover all tokens, old and new; where the new routing is unknown, the old stays. Only what is new is checked, and from
        the second call on only what is new is written (`grown`), so that many small calls do not copy a long rollout each.
        Columns are dropped, because they were computed over the old tokens; all but `SAMPLED_ENTROPY`, which `entropies`, of
        the new tokens, continue."""
        new, added = {"token_ids": token_ids, "logprobs": logprobs, "versions": versions}, call.stop - len(self)
        try:
            if call.start != len(self):
                raise ValueError(f"call over tokens {call.start} to {call.stop} does not continue from token {len(self)}")
            for name, array in new.items():
                if array.dtype != TOKEN_ARRAYS[name] or array.shape != (added,):
                    problem = f"has dtype {array.dtype} and shape {array.shape} but {added} tokens were sampled"
                    raise ValueError(f"{name} {problem}")
            if entropies is not None and (entropies.dtype != np.float32 or entropies.shape != (added,)):
                raise ValueError(f"entropies has shape {entropies.shape} but {added} tokens were sampled")
            routing = merge_routing(self.expert_routing, expert_routing, num_tokens=call.stop)
        except ValueError as error:
            raise ValueError(f"rollout {self.id!r}: {error}") from None
        if sampling_mask is not None:
            read_fields({"sampling_mask": sampling_mask}, id=self.id, length=call.stop)
        check_tokens(new, ids=[self.id], offsets=[0, added])
        new |= {"source": np.full(added, SAMPLED, dtype=np.int8), "loss_mask": np.ones(added, dtype=bool)}
        join = grown if self.calls else _joined  # most rollouts have one call, and need no spare memory
        changes: dict[str, Any] = {name: join(getattr(self, name), array) for name, array in new.items()}
        changes |= {
            "policy": policy,
            "lineage": lineage,
            "sampling_mask": sampling_mask,
            "columns": self._lasting_columns(added, entropies),
        }
        changes |= {"calls": (*self.calls, call), "finish_reason": call.finish_reason, "expert_routing": routing}
        return unchecked_copy(self, changes)

    def demonstrate(self, token_ids: list[int] | Array, *, engine: str) -> Rollout:
        """Append tokens as if a call had sampled them, each for sure, with version 0; `engine` names who did."""
        ids, start = np.asarray(token_ids, dtype=np.int32), len(self)
        how: dict[str, Any] = {"sampling": Sampling(max_tokens=len(ids)), "finish_reason": FinishReason.STOP}
        call = Call(start=start, stop=start + len(ids), engine=engine, started=0.0, finished=0.0, **how)
        logprobs, versions = np.zeros(len(ids), dtype=np.float32), np.zeros(len(ids), dtype=np.int32)
        return self.extend(call, token_ids=ids, logprobs=logprobs, versions=versions, policy=self.policy, lineage="")

    def append(self, token_ids: list[int] | Array, *, source: Source = Source.TOOL) -> Rollout:
        """Append tokens that the policy did not sample, such as a tool's reply. Called by environments between generate calls;
        like `extend`, it writes only what is new, and drops the same columns."""
        if Source(source) is Source.SAMPLED:  # raises for what is no source: an engine could not read the rollout
            raise ValueError(f"rollout {self.id!r}: only a generate call adds sampled tokens")
        new = Rollout.from_prompt(token_ids, id=self.id)
        arrays = {name: getattr(new, name) for name in TOKEN_ARRAYS} | {"source": np.full(len(new), source, dtype=np.int8)}
        changes: dict[str, Any] = {name: grown(getattr(self, name), array) for name, array in arrays.items()}
        changes["sampling_mask"] = join_masks(self.sampling_mask, None, num_old=len(self), num_new=len(new))
        changes["expert_routing"] = merge_routing(self.expert_routing, None, num_tokens=len(self) + len(new))
        return unchecked_copy(self, {**changes, "columns": self._lasting_columns(len(new), None)})

    def _lasting_columns(self, num_new: int, entropies: Array | None) -> dict[str, Array]:
        """Those that `num_new` more tokens leave valid."""
        old = self.columns.get(SAMPLED_ENTROPY)
        if old is None and entropies is None:
            return {}
        old = np.zeros(len(self), np.float32) if old is None else old
        return {SAMPLED_ENTROPY: grown(old, np.zeros(num_new, np.float32) if entropies is None else entropies)}

    def forked(self, at: int, *, id: str) -> Rollout:
        """The first `at` tokens as a new rollout, to generate on from there. A call that spans the fork is cut and counts as
        interrupted; later calls, rewards, outcome and columns (but `SAMPLED_ENTROPY`) are dropped. Step rewards before the
        fork and `loss_mask` stay: the caller decides which of the two trains the tokens they share."""
        check_kind(at, int, f"rollout {self.id!r}: the token to fork at")
        if not 1 <= at <= len(self):
            raise ValueError(f"rollout {self.id!r}: cannot be forked at token {at}; it must be 1 to {len(self)}")
        if id == self.id:
            raise ValueError(f"rollout {self.id!r}: a fork needs an id of its own")
        calls = tuple(call.cut(at) for call in self.calls if call.start < at)
        changes: dict[str, Any] = {name: getattr(self, name)[:at] for name in TOKEN_ARRAYS}
        columns = {name: column[:at] for name, column in self.columns.items() if name == SAMPLED_ENTROPY}
        changes |= {"id": id, "parent": (self.id, at), "rewards": {}, "columns": columns, "outcome": None}
        changes |= {"calls": calls, "finish_reason": calls[-1].finish_reason if calls else None}
        changes["step_rewards"] = tuple((token, value) for token, value in self.step_rewards if token < at)
        if self.expert_routing is not None:
            changes["expert_routing"] = cut_routing(self.expert_routing, at=at)
        if self.sampling_mask is not None:
            changes["sampling_mask"] = self.sampling_mask.cut(at)
        return unchecked_copy(self, changes)

    def since(self, start: int, *, num_calls: int) -> Rollout:
        """What was added from token `start` on, for someone who has the tokens before it and the first `num_calls` calls
        (`joined`). Expert routing, which calls also fill in for older tokens, is not among it."""
        if start == 0:
            return self
        calls = tuple(call.moved(-start) for call in self.calls[num_calls:])
        changes: dict[str, Any] = {name: getattr(self, name)[start:] for name in TOKEN_ARRAYS}
        changes |= {"calls": calls, "finish_reason": calls[-1].finish_reason if calls else None, "expert_routing": None}
        changes["sampling_mask"] = None if self.sampling_mask is None else self.sampling_mask.rest(start)
        changes["columns"] = {name: column[start:] for name, column in self.columns.items() if name == SAMPLED_ENTROPY}
        return unchecked_copy(self, {**changes, "parent": None, "rewards": {}, "step_rewards": ()})

    def joined(self, part: Rollout) -> Rollout:
        """This rollout with what `since` its end was added elsewhere."""
        changes: dict[str, Any] = {name: grown(getattr(self, name), getattr(part, name)) for name in TOKEN_ARRAYS}
        sizes = {"num_old": len(self), "num_new": len(part)}
        changes["sampling_mask"] = join_masks(self.sampling_mask, part.sampling_mask, **sizes)
        changes["columns"] = self._lasting_columns(len(part), part.columns.get(SAMPLED_ENTROPY))
        changes |= {"policy": part.policy, "lineage": part.lineage}  # a resumed run names another lineage
        if part.calls:
            changes["calls"] = (*self.calls, *(call.moved(len(self)) for call in part.calls))
            changes["finish_reason"] = part.finish_reason
        return unchecked_copy(self, changes)

    def named(self, *, id: str, episode: str, group: str, index: int, policy: str) -> Rollout:
        """This rollout as one of a group; rewards and columns are its own."""
        names = {"id": id, "episode": episode, "group": group, "index": index, "policy": policy}
        return unchecked_copy(self, {**names, "rewards": {**self.rewards}, "columns": {**self.columns}})

    def replace(self, **changes: Any) -> Rollout:  # noqa: ANN401  (one keyword per field)
        """A copy with some fields changed; checks only what the changes could break."""
        optional = {name: value for name, value in changes.items() if name in OPTIONAL_FIELDS}
        if not changes.keys() <= _ALONE:
            return dataclasses.replace(self, **changes)
        return unchecked_copy(self, changes | read_fields(optional, id=self.id, length=len(self)))

    @property
    def is_sampled(self) -> Array:
        """[T] bool"""
        sampled: Array = self.source == SAMPLED
        return sampled

    @property
    def num_sampled(self) -> int:
        return sum(call.stop - call.start for call in self.calls)

    @property
    def completion_ids(self) -> list[int]:
        """Everything after the prompt: sampled tokens and tool replies."""
        after = self.source.nonzero()[0]  # PROMPT is 0
        tokens: list[int] = self.token_ids[after[0] :].tolist() if len(after) else []
        return tokens

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among its tokens; -1 if none were sampled."""
        oldest = np.minimum.reduce(self.versions.view(np.uint32), initial=_NO_VERSION)  # as uint32, -1 is the largest
        return -1 if oldest == _NO_VERSION else int(oldest)

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


def _joined(*arrays: Array) -> Array:
    result: Array = np.concatenate(arrays)
    result.flags.writeable = False
    return result


_NO_VERSION = np.uint32(0xFFFFFFFF)
_ALONE = {"id", "episode", "group", "index", "policy", "lineage", *OPTIONAL_FIELDS}
"""Fields that no other must fit; the optional ones have a check of their own."""
_NO_TOKENS: dict[str, Any] = dict.fromkeys(TOKEN_ARRAYS, ())
_EMPTY = Rollout(id="", episode="", group="", index=0, **_NO_TOKENS)
