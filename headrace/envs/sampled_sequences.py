"""What the engines sampled for environments that push, found again by its tokens. So a pushed sequence gets the logprobs and
versions that its engine recorded, whatever its sender says of them."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headrace.records import Array, Rollout


class SampledSequences:
    """Those of one sender. The same tokens may have been sampled several times: each is a sequence of its own."""

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
