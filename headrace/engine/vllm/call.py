"""One generate call at a vLLM server, with what it has sampled so far.

A token's version is known in two ways. Weights change while the server is paused, and every token sampled before has arrived by
the time it resumes: so earlier tokens are of the old version, later ones of the new. Some releases report the version of every
token at the end of a call. Then that counts, and tokens may come several at a time; a call that was cancelled here gets no
report, and ends before the first token of unknown version.

If adapters are trained, neither is needed: the server samples all of a call's tokens with the adapter that the call names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine.protocol import Increment, InFlight, NotFinite
from headrace.engine.request import SampledSince, SampledTokens
from headrace.engine.stop_strings import ends_call
from headrace.engine.vllm.api import MaskIncomplete
from headrace.records import FinishReason, SamplingMask, unknown_routing

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from headrace.engine.request import Request
    from headrace.engine.vllm.api import Piece
    from headrace.engine.vllm.engine import VllmEngine
    from headrace.records import Array, Rollout

_NOTHING = np.zeros(0, np.int32)
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_MIX = 0x9E3779B97F4A7C15
TIES = 16  # tokens as likely as the last of the k likeliest, which vLLM keeps too
_FEW = 64  # candidates to request where any number of tokens may be kept: top-p and min-p of trained models mostly keep fewer
_WIDER = 16  # times as many, where that was too few
_SPELL = 8  # tokens to sample with more candidates before a call requests few again
TOGETHER = 16  # tokens per event, where they need not come one by one: an event costs the same for any number


class VllmCall:
    """A call that waits, or whose stream is read by `task`."""

    def __init__(self, request: Request, engine: VllmEngine) -> None:
        self.request, self._engine = request, engine
        self.task: asyncio.Task[None] | None = None
        self.is_over = False
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._masks: list[Array] = []
        self._entropies: list[float] | None = [] if engine.records_entropy and request.sampling.keep_mask else None
        self._routed: Array | None = None  # the experts of its first tokens, as far as the server has reported them
        self.adapter, self._sent_at, self._salt = "", -1, ""  # the adapter it names, and that one's version and salt
        self._lineage = ""  # of the weights that sampled its first token
        self._most = min(request.sampling.max_tokens, engine.context - len(request.rollout))
        self._part_start = 0  # the first of its tokens that the open stream sampled
        self._num_reported = 0
        self._unsure_from: int | None = None  # first token of a piece that mixes versions, until the server tells them apart
        is_read = request.on_tokens is not None or request.is_streamed or bool(request.sampling.stop)
        may_widen = 0 < self._num_candidates() < engine.vocabulary and not request.sampling.top_k
        # A stream that is closed early reports no versions.
        self._together = TOGETHER if engine.names_versions and not is_read and not may_widen else 1
        """Tokens requested per piece. With 1, all arrive before weights change; with more, some may be of older weights."""

    @property
    def num_known(self) -> int:
        """Tokens whose versions are known."""
        return len(self._token_ids) if self._unsure_from is None else self._unsure_from

    async def read(self) -> None:
        """Send it and read its stream to the end. Where more tokens could have been sampled than candidates came, that token is
        sampled again with more candidates: as this depends on the tokens before it alone, the distribution stays the same."""
        engine, few = self._engine, self._num_candidates()
        self.adapter, self._sent_at, self._salt = engine.lease(self.request.rollout)
        if self.adapter:
            self._lineage = engine.lineage
        reason, candidates = None, few
        while reason is None:
            left = self._most - len(self._token_ids)
            reason, is_complete = await self._read_part(candidates, left if candidates == few else min(left, _SPELL))
            if reason is None and engine.is_aborting:
                reason = FinishReason.ABORT
            candidates = few if is_complete else min(candidates * _WIDER, engine.vocabulary)
        self.finish(reason)

    async def _read_part(self, num_candidates: int, max_tokens: int) -> tuple[FinishReason | None, bool]:
        """Sample up to `max_tokens` more; returns why the call is over, if it is, and whether all masks were complete. Closing
        the stream, however that comes, ends the call at the server."""
        engine, sampling, self._part_start = self._engine, self.request.sampling, len(self._token_ids)
        token_ids = self.request.rollout.token_ids.tolist() + self._token_ids
        pieces = engine.api.generate(
            token_ids,
            # vLLM restarts its random numbers with each call, so a resumed one needs another seed than the one it continues
            dataclasses.replace(
                sampling,
                seed=(sampling.seed + len(token_ids) * _MIX) & ((1 << 63) - 1),
                min_tokens=max(0, sampling.min_tokens - len(self._token_ids)),
            ),
            max_tokens=max_tokens,
            salt=self._salt if self.adapter else engine.salt,
            num_candidates=num_candidates,
            every=self._together,
            adapter=self.adapter,
        )
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                engine.heard(len(piece.token_ids))
                known = self._complete_part(piece, num_candidates)
                reason = self._take(known)
                if piece.routing is not None:  # not of tokens that are sampled again
                    self._routed = piece.routing[: len(self.request.rollout) + len(self._token_ids)]
                if reason is not None or piece.finish is not None:
                    self._stamp(piece.spans, reason)
                if reason is not None:
                    return reason, True
                engine.after_step()
                if known is not piece:
                    break
            else:
                return None, True
        if self._unsure_from is not None:
            raise MaskIncomplete(f"vLLM at {engine.api.url}: more than {num_candidates} tokens could have been sampled")
        return None, False

    def _num_candidates(self) -> int:
        """Logprobs to request with each token, so that those that could have been sampled are most often among them."""
        sampling = self.request.sampling
        if not (sampling.needs_mask and (sampling.top_k or sampling.top_p < 1 or sampling.min_p)):
            return 0 if self._entropies is None else self._engine.vocabulary
        return min(sampling.top_k + TIES if sampling.top_k else _FEW, self._engine.vocabulary)

    def _complete_part(self, piece: Piece, num_candidates: int) -> Piece:
        """The piece up to the first token whose mask is incomplete; itself if there is none."""
        masks = piece.masks if num_candidates < self._engine.vocabulary else None
        until = next((place for place, mask in enumerate(masks or ()) if mask is None), None)
        if until is None or masks is None:
            return piece
        finish = None if piece.finish in _REASONS else piece.finish  # an aborted call is over all the same
        return dataclasses.replace(
            piece, token_ids=piece.token_ids[:until], logprobs=piece.logprobs[:until], masks=masks[:until], finish=finish
        )

    def _take(self, piece: Piece) -> FinishReason | None:
        """Append a piece, up to the end of a stop string; returns why the call is over, if it is."""
        sampling, version = self.request.sampling, self._sent_at if self.adapter else self._engine.version
        reason = None if piece.finish is None else _REASONS.get(piece.finish, FinishReason.ABORT)
        start = len(self._token_ids)
        if reason is FinishReason.LENGTH and start + len(piece.token_ids) < self._most:  # only of a part
            reason = None
        is_split = self._together > 1 and len(piece.token_ids) > 1 and start and self._versions[-1] != version
        if is_split and self._unsure_from is None:
            self._unsure_from = start
        for place, (token, logprob) in enumerate(zip(piece.token_ids, piece.logprobs, strict=True)):
            if math.isnan(logprob):
                raise NotFinite(f"rollout {self.request.rollout.id!r}: the model's logits are not finite")
            self._token_ids.append(token)
            self._logprobs.append(logprob if sampling.temperature > 0 else 0.0)
            self._versions.append(version)
            self._lineage = self._lineage or self._engine.lineage
            if sampling.needs_mask:
                self._masks.append(self._mask(piece, place))
            if self._entropies is not None and piece.entropies is not None:
                self._entropies.append(piece.entropies[place])
            decode = self._engine.decode
            if decode is not None and ends_call(self.request.rollout, sampling, self._token_ids, decode):
                reason = FinishReason.STOP
                break
        on_tokens, ended = self.request.on_tokens, None if reason is FinishReason.ABORT else reason
        if on_tokens is not None and (start < len(self._token_ids) or ended is not None):
            new = slice(start, None)
            on_tokens(Increment(tuple(self._token_ids[new]), tuple(self._logprobs[new]), tuple(self._versions[new]), ended))
        return reason

    def _mask(self, piece: Piece, place: int) -> Array:
        """The row of a `SamplingMask` for the position just filled."""
        sampling = self.request.sampling
        if piece.masks is not None:
            listed = piece.masks[place]
            if listed is None:  # of a request for the whole vocabulary
                return _NOTHING
            if 2 * len(listed) <= self._engine.vocabulary:
                return listed
            return SamplingMask.make_row(np.isin(np.arange(self._engine.vocabulary), listed))
        if len(self._token_ids) <= sampling.min_tokens and sampling.stop_ids:
            forbidden = {*sampling.stop_ids, *self._engine.end_ids}
            return ~np.asarray(sorted(stop for stop in forbidden if stop < self._engine.vocabulary), np.int32)
        return _NOTHING

    def _stamp(self, spans: Sequence[tuple[str, int, int]], reason: FinishReason | None) -> None:
        """Set the versions that the server reports at the end of a stream, as `lineage:version`."""
        if spans and self._engine.names_versions and not self.adapter:
            for name, start, stop in spans:
                version = name.rpartition(":")[2]
                if version.lstrip("-").isdigit():
                    start, stop = start + self._part_start, min(stop + self._part_start, len(self._versions))
                    self._versions[start:stop] = [int(version)] * (stop - start)
            self._unsure_from = None
        if self._unsure_from is not None and reason is not FinishReason.ABORT:
            raise self._engine.api.gone("it ended a call without naming the weights of it")

    def finish(self, reason: FinishReason) -> None:
        rollout = self._rollout(reason)
        self.is_over = True
        self.request.on_done(rollout)

    def end(self) -> None:
        """Close its stream, which ends the call at the server."""
        self.is_over = True
        if self.task is not None:
            self.task.cancel()

    # What it has sampled

    def growth(self, *, least: float) -> SampledSince | None:
        """What came since the last call, up to the first token of unknown version; None unless it is more than this share of
        what came before."""
        new = slice(self._num_reported, self.num_known)
        if new.stop - new.start <= least * new.start:
            return None
        self._num_reported = new.stop
        token_ids, logprobs, versions, masks, entropies = self._sampled(new)
        return SampledSince(self.request, token_ids, logprobs, versions, masks, self._lineage, entropies)

    def in_flight(self) -> InFlight:
        first = self._versions[0] if self._versions else -1
        partial = functools.partial(self._rollout, FinishReason.ABORT)
        return InFlight.of(self.request.rollout, num_sampled=self.num_known, first=first, partial=partial)

    def _rollout(self, reason: FinishReason) -> Rollout:
        """With the tokens of known version; the others are sampled again."""
        engine, sampled = self._engine, self._sampled(slice(self.num_known))
        lineage = self._lineage or engine.lineage
        routing = self._routing(len(self.request.rollout) + len(sampled.token_ids))
        return self.request.extended(
            sampled, reason, engine=engine.name, policy=engine.policy, lineage=lineage, routing=routing
        )

    def _routing(self, length: int) -> Array | None:
        """Of all tokens of its rollout. Those of a stream that was closed early are unknown."""
        routers = self._engine.routers
        if routers is None:
            return None
        known = unknown_routing(length, num_layers=routers.num_layers, top_k=routers.top_k, dtype=routers.dtype_name)
        if self._routed is not None:
            rows = self._routed[: length - 1, routers.layers]
            known[: len(rows)] = rows
        return known

    def _sampled(self, which: slice) -> SampledTokens:
        token_ids, versions = np.array(self._token_ids[which], np.int32), np.array(self._versions[which], np.int32)
        entropies = None if self._entropies is None else np.array(self._entropies[which], np.float32)
        return SampledTokens(token_ids, np.array(self._logprobs[which], np.float32), versions, self._masks[which], entropies)
