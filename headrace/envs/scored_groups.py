"""Atropos's scored groups: read from JSON, and matched with what the engines sampled."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.engine import ApiError, Body, bad, check
from headrace.envs.steps import ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headrace.records import Array, Rollout

_UNTRAINED = -100
"""Where a mask has it, the token is not trained; elsewhere a mask repeats the token."""
_LARGEST = 1e12
"""Of scores: sums of squares stay finite in float32, so that no group can end a run."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("messages", "inference_logprobs", "generation_params"), (...,)),
    **dict.fromkeys(("advantages", "ref_logprobs", "overrides", "images"), ([],)),
    **dict.fromkeys(("distill_token_ids", "distill_logprobs"), ([],)),
    "group_overrides": ({},),
}
"""Fields that are not used. The first are for display, or the engine knows them; the others would change what is trained."""


class SampledSequences:
    """What the engines sampled for one sender, found again by its tokens. So a pushed sequence gets the logprobs and versions
    that its engine recorded, whatever its sender says of them. The same tokens may have been sampled several times: each is a
    sequence of its own."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: of all sequences together; the oldest are forgotten first."""
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._keys: dict[str, bytes] = {}
        """By rollout id, oldest first."""
        self._same: dict[bytes, dict[str, Rollout]] = {}
        """Rollouts of the same tokens by id, by the hash of the tokens."""
        self._lengths = Counter[int]()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, rollouts: Iterable[Rollout]) -> None:
        for rollout in rollouts:
            key = hashlib.blake2b(rollout.token_ids.tobytes(), digest_size=16).digest()
            self._keys[rollout.id] = key
            self._same.setdefault(key, {})[rollout.id] = rollout
            self._lengths[len(rollout)] += 1
            self._num_tokens += len(rollout)
        while self._num_tokens > self._max_tokens:
            self.remove(next(iter(self._keys)))

    def find(self, ids: Sequence[int] | Array) -> Rollout | None:
        """The longest sequence that `ids` begin with; of several with the same tokens, the oldest."""
        tokens, digest, found, at = np.asarray(ids, dtype=np.int32), hashlib.blake2b(digest_size=16), None, 0
        for length in sorted(length for length in self._lengths if length <= len(tokens)):
            digest.update(tokens[at:length].tobytes())
            at, same = length, self._same.get(digest.copy().digest())
            found = next(iter(same.values())) if same else found
        return found

    def remove(self, id: str) -> None:
        key = self._keys.pop(id)
        rollout = self._same[key].pop(id)
        if not self._same[key]:
            del self._same[key]
        self._num_tokens -= len(rollout)
        self._lengths[len(rollout)] -= 1
        if not self._lengths[len(rollout)]:
            del self._lengths[len(rollout)]


@dataclass(frozen=True)
class ScoredSequence:
    token_ids: Array
    is_trained: Array
    score: float


@dataclass(frozen=True)
class ScoredGroup:
    sequences: tuple[ScoredSequence, ...]
    environment: int | None
    """The id that its environment got when it registered."""

    digest: bytes
    """Of what it says: a group that comes again, because its sender missed the answer, has the same."""

    def take(self, sampled: SampledSequences) -> list[Rollout]:
        """The rollouts that these sequences are; `sampled` has them no longer. If one was not sampled, none is taken."""
        taken: list[Rollout] = []
        try:
            for index, sequence in enumerate(self.sequences):
                found = _match(sequence, sampled, f"tokens[{index}]")
                sampled.remove(found.id)
                taken.append(found)
        except ApiError:
            sampled.add(taken)
            raise
        return taken

    def scored(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts with what the group says of them: its scores, and which sampled tokens are trained."""
        found = []
        for rollout, sequence in zip(rollouts, self.sequences, strict=True):
            mask = sequence.is_trained[: len(rollout)]
            changes: dict[str, Any] = {} if np.array_equal(mask, rollout.loss_mask) else {"loss_mask": mask}
            found.append(rollout.replace(**changes, rewards={ENVIRONMENT: sequence.score}))
        return found


def read_groups(raw: bytes, *, is_list: bool) -> list[ScoredGroup]:
    """The groups of a body, which is one group or a list of them. Long bodies take long: call it in a thread."""
    if not is_list:
        return [_read_group(Body.parse(raw))]
    body = Body.parse(b'{"groups": %b}' % raw)
    groups = body.take("groups", list, [])
    body.end()
    return [_read_group(Body(check(group, dict, f"[{index}]"))) for index, group in enumerate(groups)]


def _read_group(body: Body) -> ScoredGroup:
    tokens, masks, scores = (body.take(name, list, []) for name in ("tokens", "masks", "scores"))
    environment = body.take("env_id", int)
    body.end(_NEUTRAL)
    if not tokens:
        raise bad("tokens", "has no sequence")
    for name, values in (("masks", masks), ("scores", scores)):
        if len(values) != len(tokens):
            raise bad(name, f"has {len(values)} entries for {len(tokens)} sequences")
    found = []
    for index, (ids, mask, score) in enumerate(zip(tokens, masks, scores, strict=True)):
        if not abs(check(score, float, f"scores[{index}]")) <= _LARGEST:  # also not a number
            raise bad(f"scores[{index}]", f"must be between -{_LARGEST:g} and {_LARGEST:g}")
        found.append(_read_sequence(ids, mask, float(score), index))
    digest = hashlib.sha256()
    for sequence in found:
        digest.update(b"%d %a " % (len(sequence.token_ids), sequence.score))
        digest.update(sequence.token_ids.tobytes() + sequence.is_trained.tobytes())
    return ScoredGroup(tuple(found), environment, digest.digest())


def _read_sequence(ids: object, mask: object, score: float, index: int) -> ScoredSequence:
    token_ids, labels = _whole_numbers(ids, f"tokens[{index}]"), _whole_numbers(mask, f"masks[{index}]")
    if len(labels) != len(token_ids):
        raise bad(f"masks[{index}]", f"has {len(labels)} entries for {len(token_ids)} tokens")
    is_trained = labels != _UNTRAINED
    if (labels != token_ids)[is_trained].any():
        raise bad(f"masks[{index}]", f"must have the token where it is trained, and {_UNTRAINED} elsewhere")
    if not is_trained.any():
        raise bad(f"masks[{index}]", "trains no token")
    return ScoredSequence(token_ids, is_trained, score)


def _whole_numbers(values: object, name: str) -> Array:
    if set(map(type, check(values, list, name))) - {int}:
        raise bad(name, "must be a list of whole numbers")
    try:
        return np.array(values, dtype=np.int32)
    except OverflowError as error:
        raise bad(name, "holds a number that is no token") from error


def _match(sequence: ScoredSequence, sampled: SampledSequences, name: str) -> Rollout:
    """The rollout that the sequence begins with; what follows it is not trained, and left out."""
    found, last = sampled.find(sequence.token_ids), int(np.flatnonzero(sequence.is_trained)[-1])
    if found is None:
        problem = "no engine of this run sampled this sequence for this token, or it was pushed already, or forgotten"
        raise bad(name, problem, code="not_sampled")
    unsampled = np.flatnonzero(sequence.is_trained[: len(found)] & ~found.is_sampled)
    if last >= len(found) or len(unsampled):
        at = int(unsampled[0]) if len(unsampled) else len(found)
        raise bad(name, f"token {at} is to be trained, and no engine sampled it there", code="not_sampled")
    return found
