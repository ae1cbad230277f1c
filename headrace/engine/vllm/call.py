"""One generate call at a vLLM server, as far as it has come."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine import stop_strings
from headrace.engine.append_tokens import lengthen
from headrace.engine.protocol import Increment, InFlight, NotFinite, UnusablePrompt
from headrace.engine.request import Growth
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
_TIES = 16
"""Tokens as likely as the last of the k likeliest, which vLLM keeps too."""
TOGETHER = 16
"""Most of what a server and who reads it compute beside the model is for events, however many tokens one brings."""
_MISSING = 1e-3
"""Of the probability, at most, that may lie outside a sampling mask before it counts as incomplete."""


class RunningCall:
    """What came of one request so far."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.task: asyncio.Task[None] | None = None
        self.is_over = False
        self.lineage = ""
        """The life of the trainer its first token was drawn in."""
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._masks: list[Array] = []
        self._routing: Array | None = None
        self._told = 0
        self._together = 1
        """Tokens that one piece may bring by intention: of those, some may be of weights that have been replaced since. Where
        they come one by one, all that was drawn is here before weights are replaced, however many one piece brings."""
        self._unsure_from: int | None = None
        """The first token of a piece that holds some of older weights and some of newer, until the server says which."""

    @property
    def num_drawn(self) -> int:
        return len(self._token_ids)

    @property
    def num_sure(self) -> int:
        """Tokens whose versions are known."""
        return self.num_drawn if self._unsure_from is None else self._unsure_from

    def tokens_together(self) -> int:
        """To ask for of a server that names versions at the end: one, where somebody waits for each or looks for the end in
        them."""
        is_read = self.request.on_tokens is not None or self.request.is_streamed
        self._together = 1 if is_read or self.request.sampling.stop else TOGETHER
        return self._together

    @property
    def length(self) -> int:
        """Of the rollout as it would be now."""
        return len(self.request.rollout) + self.num_drawn

    @property
    def seed(self) -> int:
        """vLLM begins its random numbers anew with each call: one that goes on where another was interrupted must not draw
        with the same ones again."""
        return (self.request.sampling.seed + len(self.request.rollout) * _MIX) & ((1 << 63) - 1)

    def num_candidates(self, vocabulary: int, most: int) -> int:
        """Logprobs to ask for with each token, so that those which could have been drawn are among them."""
        sampling = self.request.sampling
        if not (sampling.temperature > 0 and (sampling.top_k or sampling.top_p < 1 or sampling.min_p)):
            return 0
        return min(sampling.top_k + _TIES if sampling.top_k else vocabulary, vocabulary, most)

    def take(
        self, piece: Piece, *, version: int, lineage: str, decode: Callable[[list[int]], str] | None, vocabulary: int
    ) -> FinishReason | None:
        """Append what came, up to the end of a stop string; why the call is over, if it is."""
        sampling = self.request.sampling
        reason = None if piece.finish is None else _REASONS.get(piece.finish, FinishReason.ABORT)
        start = self.num_drawn
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
        self._tell(start, reason)
        return reason

    def end(self) -> None:
        """Close its stream, by which the server ends it."""
        self.is_over = True
        if self.task is not None:
            self.task.cancel()

    def stamp(self, spans: list[tuple[str, int, int]]) -> None:
        """The versions as the server gives them; a name is a life and a version."""
        for name, start, stop in spans:
            version = name.rpartition(":")[2]
            if version.lstrip("-").isdigit():
                for place in range(start, min(stop, self.num_drawn)):
                    self._versions[place] = int(version)
        self._unsure_from = None

    def growth(self) -> Growth | None:
        """What came since this was last asked, as far as its versions are known."""
        start, self._told = self._told, self.num_sure
        if self.num_sure == start:
            return None
        new = slice(start, self.num_sure)
        return Growth(
            self.request,
            np.asarray(self._token_ids[new], np.int32),
            np.asarray(self._logprobs[new], np.float32),
            np.asarray(self._versions[new], np.int32),
            self._masks[new],
            self.lineage,
        )

    def in_flight(self, *, engine: str, policy: str) -> InFlight:
        """`partial` is of what has come when it is called, which may be more by then."""

        def partial() -> Rollout:
            return self.lengthened(FinishReason.ABORT, engine=engine, policy=policy, lineage=self.lineage)

        first = self._versions[0] if self._versions else -1
        return InFlight.of(self.request.rollout, num_drawn=self.num_sure, first=first, partial=partial)

    def lengthened(self, reason: FinishReason, *, engine: str, policy: str, lineage: str) -> Rollout:
        """What is not known for sure is left out, to be drawn again."""
        rollout, kept = self.request.rollout, self.num_sure
        start = len(rollout)
        call = Call(
            start=start,
            stop=start + kept,
            engine=engine,
            sampling=self.request.sampling,
            finish_reason=reason,
            started=self.request.started,
            finished=time.time(),
        )
        return lengthen(
            rollout,
            call,
            token_ids=np.asarray(self._token_ids[:kept], np.int32),
            logprobs=np.asarray(self._logprobs[:kept], np.float32),
            versions=np.asarray(self._versions[:kept], np.int32),
            masks=self._masks[:kept],
            policy=policy,
            lineage=lineage,
            expert_routing=self._whole_routing(call.stop),
        )

    def _mask(self, piece: Piece, place: int, vocabulary: int) -> Array:
        """The ids that could have been drawn at the place just filled; empty where all could."""
        sampling = self.request.sampling
        if piece.kept is not None:
            kept = piece.kept[place]
            if kept.share < 1 - _MISSING:
                raise UnusablePrompt(
                    f"rollout {self.request.rollout.id!r}: more tokens could have been drawn than the {len(kept.ids)} that "
                    f"came with their logprobs; set sampling.top_k to fewer"
                )
            return kept.ids
        if self.num_drawn <= sampling.min_tokens and sampling.stop_ids:
            return np.setdiff1d(np.arange(vocabulary, dtype=np.int32), np.asarray(sampling.stop_ids, np.int32))
        return _NOTHING

    def _completes_stop(self, decode: Callable[[list[int]], str]) -> bool:
        rollout, sampling = self.request.rollout, self.request.sampling
        first = stop_strings.window(rollout, sampling, len(rollout) + self.num_drawn)
        if first is None:
            return False
        before = rollout.token_ids[first:].tolist()
        return stop_strings.completes(sampling.stop, before + self._token_ids[max(0, first - len(rollout)) :], decode)

    def _tell(self, start: int, reason: FinishReason | None) -> None:
        request = self.request
        if request.on_tokens is None or reason is FinishReason.ABORT or (start == self.num_drawn and reason is None):
            return
        new = slice(start, None)
        request.on_tokens(
            Increment(tuple(self._token_ids[new]), tuple(self._logprobs[new]), tuple(self._versions[new]), reason)
        )

    def _whole_routing(self, length: int) -> Array | None:
        """A row for every token; the last one drawn was never computed, nor what was cut off."""
        if self._routing is None:
            return None
        known = self._routing[:length]
        unknown = unknown_routing(length - len(known), num_layers=known.shape[1], top_k=known.shape[2], dtype=known.dtype)
        return np.concatenate([known, unknown])
