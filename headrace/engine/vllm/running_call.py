"""One generate call at a vLLM server, with what it has sampled so far."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine import stop_strings
from headrace.engine.protocol import Increment, InFlight, NotFinite, UnusablePrompt
from headrace.engine.request import SampledSince, append_call
from headrace.records import Call, FinishReason, unknown_routing

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from headrace.engine.request import Request
    from headrace.engine.vllm.api import Piece
    from headrace.records import Array, Rollout

_NOTHING = np.zeros(0, np.int32)
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_MIX = 0x9E3779B97F4A7C15
_TIES = 16  # tokens as likely as the last of the k likeliest, which vLLM keeps too
TOGETHER = 16  # tokens per event, where they need not come one by one: an event costs the same for any number
_MISSING = 1e-3  # the most probability that may lie outside a sampling mask before it counts as incomplete


class RunningCall:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.task: asyncio.Task[None] | None = None
        self.is_over = False
        self.lineage = ""  # of the weights that sampled its first token
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._masks: list[Array] = []
        self._routing: Array | None = None
        self._num_reported = 0
        self._together = 1
        """Tokens requested per piece. With 1, all arrive before weights change; with more, some may be of older weights."""
        self._unsure_from: int | None = None  # first token of a piece that mixes versions, until the server tells them apart

    @property
    def num_sampled(self) -> int:
        return len(self._token_ids)

    @property
    def num_known(self) -> int:
        """Tokens whose versions are known."""
        return self.num_sampled if self._unsure_from is None else self._unsure_from

    @property
    def length(self) -> int:
        """Of the rollout with the tokens so far."""
        return len(self.request.rollout) + self.num_sampled

    @property
    def seed(self) -> int:
        """vLLM restarts its random numbers with each call, so a resumed call needs another seed than the one it continues."""
        return (self.request.sampling.seed + len(self.request.rollout) * _MIX) & ((1 << 63) - 1)

    def tokens_together(self) -> int:
        """How many tokens a piece should bring: one, if each is streamed on or could complete a stop string."""
        is_read = self.request.on_tokens is not None or self.request.is_streamed
        self._together = 1 if is_read or self.request.sampling.stop else TOGETHER
        return self._together

    def num_candidates(self, vocabulary: int, most: int) -> int:
        """Logprobs to request with each token, so that all tokens that could have been sampled are among them."""
        sampling = self.request.sampling
        if not (sampling.temperature > 0 and (sampling.top_k or sampling.top_p < 1 or sampling.min_p)):
            return 0
        return min(sampling.top_k + _TIES if sampling.top_k else vocabulary, vocabulary, most)

    def take(
        self, piece: Piece, *, version: int, lineage: str, decode: Callable[[list[int]], str] | None, vocabulary: int
    ) -> FinishReason | None:
        """Append a piece, up to the end of a stop string; returns why the call is over, if it is."""
        sampling = self.request.sampling
        reason = None if piece.finish is None else _REASONS.get(piece.finish, FinishReason.ABORT)
        start = self.num_sampled
        is_split = self._together > 1 and len(piece.token_ids) > 1 and start and self._versions[-1] != version
        if is_split and self._unsure_from is None:
            self._unsure_from = start
        for place, token in enumerate(piece.token_ids):
            logprob = piece.logprobs[place]
            if math.isnan(logprob):
                raise NotFinite(f"rollout {self.request.rollout.id!r}: the model's logits are not finite")
            self._token_ids.append(token)
            self._logprobs.append(logprob if sampling.temperature > 0 else 0.0)
            self._versions.append(version)
            if sampling.is_truncated:
                self._masks.append(self._mask(piece, place, vocabulary))
            self.lineage = self.lineage or lineage
            if sampling.stop and decode is not None and self._completes_stop(decode):
                reason = FinishReason.STOP
                break
        if piece.routing is not None:
            self._routing = piece.routing
        on_tokens, has_news = self.request.on_tokens, start < self.num_sampled or reason is not None
        if on_tokens is not None and has_news and reason is not FinishReason.ABORT:
            new = slice(start, None)
            on_tokens(Increment(tuple(self._token_ids[new]), tuple(self._logprobs[new]), tuple(self._versions[new]), reason))
        return reason

    def end(self) -> None:
        """Close its stream, which ends the call at the server."""
        self.is_over = True
        if self.task is not None:
            self.task.cancel()

    def stamp(self, spans: list[tuple[str, int, int]]) -> None:
        """Set the versions that the server reports, as `lineage:version`."""
        for name, start, stop in spans:
            version = name.rpartition(":")[2]
            if version.lstrip("-").isdigit():
                for place in range(start, min(stop, self.num_sampled)):
                    self._versions[place] = int(version)
        self._unsure_from = None

    def growth(self) -> SampledSince | None:
        """What came since the last call, up to the first token of unknown version."""
        new = slice(self._num_reported, self.num_known)
        if new.start == new.stop:
            return None
        self._num_reported = new.stop
        return SampledSince(
            self.request,
            np.asarray(self._token_ids[new], np.int32),
            np.asarray(self._logprobs[new], np.float32),
            np.asarray(self._versions[new], np.int32),
            self._masks[new],
            self.lineage,
        )

    def in_flight(self, *, engine: str, policy: str) -> InFlight:
        def partial() -> Rollout:
            return self.rollout(FinishReason.ABORT, engine=engine, policy=policy, lineage=self.lineage)

        first = self._versions[0] if self._versions else -1
        return InFlight.of(self.request.rollout, num_sampled=self.num_known, first=first, partial=partial)

    def rollout(self, reason: FinishReason, *, engine: str, policy: str, lineage: str) -> Rollout:
        """With the tokens of known version; the others are sampled again."""
        known = slice(0, self.num_known)
        start = len(self.request.rollout)
        call = Call(
            start=start,
            stop=start + self.num_known,
            engine=engine,
            sampling=self.request.sampling,
            finish_reason=reason,
            started=self.request.started,
            finished=time.time(),
        )
        return append_call(
            self.request.rollout,
            call,
            token_ids=np.asarray(self._token_ids[known], np.int32),
            logprobs=np.asarray(self._logprobs[known], np.float32),
            versions=np.asarray(self._versions[known], np.int32),
            masks=self._masks[known],
            policy=policy,
            lineage=lineage,
            expert_routing=self._whole_routing(call.stop),
        )

    def _mask(self, piece: Piece, place: int, vocabulary: int) -> Array:
        """The ids that could have been sampled at the position just filled; empty if all could."""
        sampling = self.request.sampling
        if piece.candidates is not None:
            candidates = piece.candidates[place]
            if candidates.share < 1 - _MISSING:
                raise UnusablePrompt(
                    f"rollout {self.request.rollout.id!r}: more tokens could have been sampled than the {len(candidates.ids)} "
                    f"that came with their logprobs; set sampling.top_k to fewer"
                )
            return candidates.ids
        if self.num_sampled <= sampling.min_tokens and sampling.stop_ids:
            return np.setdiff1d(np.arange(vocabulary, dtype=np.int32), np.asarray(sampling.stop_ids, np.int32))
        return _NOTHING

    def _completes_stop(self, decode: Callable[[list[int]], str]) -> bool:
        rollout, sampling = self.request.rollout, self.request.sampling
        first = stop_strings.window(rollout, sampling, self.length)
        if first is None:
            return False
        before = rollout.token_ids[first:].tolist()
        return stop_strings.completes(sampling.stop, before + self._token_ids[max(0, first - len(rollout)) :], decode)

    def _whole_routing(self, length: int) -> Array | None:
        """A row for every token, unknown where the server sent none: the last sampled token was never computed."""
        if self._routing is None:
            return None
        known = self._routing[:length]
        unknown = unknown_routing(length - len(known), num_layers=known.shape[1], top_k=known.shape[2], dtype=known.dtype)
        return np.concatenate([known, unknown])
