"""Generates the choices of one request side by side, piece by piece."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from headrace.engine.protocol import Increment
from headrace.engine.request import append_call
from headrace.engine.server.text import TextReader
from headrace.records import Call, FinishReason, Rollout

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from headrace.engine.protocol import Engine
    from headrace.engine.server.requests import CompletionRequest
    from headrace.engine.server.text import ServedModel
    from headrace.records import Sampling


@dataclass(frozen=True)
class Piece:
    """What was added to one choice; the last piece has a `finish_reason`."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    """The stop string or the token of `stop_token_ids` that ended it; None for the model's own stop tokens."""


class Calls:
    """Every request in flight, so that all can be ended at once."""

    def __init__(self, engine: Engine, served: ServedModel) -> None:
        self._engine, self._served = engine, served
        self._open: set[asyncio.Queue[Piece | Exception]] = set()
        self._ended: Exception | None = None

    def end(self, error: Exception) -> None:
        """End every request in flight, and every later one, with this error."""
        self._ended = error
        for pieces in self._open:
            pieces.put_nowait(error)

    async def pieces(self, ask: CompletionRequest, *, name: str) -> AsyncGenerator[Piece, None]:
        """The pieces of all choices as they come, until every choice has ended. Closing the generator cancels the rest."""
        if self._ended is not None:
            raise self._ended
        if ask.is_scored_only:
            for index in range(num_choices(ask)):
                yield Piece(index, "", (), (), (), FinishReason.LENGTH, None)
            return
        pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._open.add(pieces)
        tasks = [asyncio.create_task(self._generate(ask, index, pieces, name)) for index in range(num_choices(ask))]
        try:
            left = len(tasks)
            while left:
                piece = await pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                left -= piece.finish_reason is not None
        finally:
            self._open.discard(pieces)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate(self, ask: CompletionRequest, index: int, pieces: asyncio.Queue[Piece | Exception], name: str) -> None:
        """One choice. Waits for the engine's increments; each piece put into `pieces` wakes the request's reader."""
        prompt, sibling = ask.prompts[index // ask.num_choices], index % ask.num_choices
        sampling = ask.sampling_of(prompt, sibling, self._served.context)
        reader = TextReader(
            self._served.tokenizer,
            prompt,
            stops=ask.stops,
            include_stop=ask.include_stop,
            skip_special=ask.skip_special,
            min_tokens=sampling.min_tokens,
        )
        is_streamed = ask.stream or bool(ask.stops)
        try:
            rollout = Rollout.from_prompt(list(prompt), id=f"{name}-{index}", episode=name, group=name, index=index)
            async with contextlib.aclosing(increments(self._engine, rollout, sampling, is_streamed=is_streamed)) as parts:
                async for part in parts:
                    for piece in self._read(part, reader, ask, index):
                        pieces.put_nowait(piece)
                    if piece.finish_reason is not None:
                        return
        except Exception as error:  # noqa: BLE001  (raised again where the request is answered)
            pieces.put_nowait(error)

    def _read(self, part: Increment, reader: TextReader, ask: CompletionRequest, index: int) -> list[Piece]:
        """An increment as pieces: token by token if a stop string could end it in the middle."""
        size = 1 if ask.stops else max(1, len(part.token_ids))
        pieces: list[Piece] = []
        for start in range(0, max(1, len(part.token_ids)), size):
            here = slice(start, start + size)
            token_ids = part.token_ids[here]
            reason = part.finish_reason if start + size >= len(part.token_ids) else None
            by_token = token_ids[-1] if reason is FinishReason.STOP and token_ids else None
            hides_last = by_token is not None and not ask.include_stop
            text = reader.push(token_ids[:-1] if hides_last else token_ids)
            if reason is not None:
                text += reader.finish()
            stop_reason: str | int | None = None if by_token in self._served.stop_ids else by_token
            if reader.stopped_by is not None:
                reason, stop_reason = FinishReason.STOP, reader.stopped_by
            pieces.append(Piece(index, text, token_ids, part.logprobs[here], part.versions[here], reason, stop_reason))
            if reason is not None:
                break
        return pieces


def num_choices(ask: CompletionRequest) -> int:
    return len(ask.prompts) * ask.num_choices


async def increments(
    engine: Engine, rollout: Rollout, sampling: Sampling, *, is_streamed: bool
) -> AsyncGenerator[Increment, None]:
    """One call's increments, resumed whenever new weights interrupt it; the last has a finish reason. Without `is_streamed` the
    engine sends all tokens in one message."""
    start, asked = len(rollout), sampling
    while True:
        if is_streamed:
            parts: list[Increment] = []
            started = time.time()
            stream = cast("AsyncGenerator[Increment, None]", engine.stream(rollout, sampling))
            async with contextlib.aclosing(stream):
                async for part in _until_abort(stream):
                    parts.append(part)
                    yield part
            if parts and parts[-1].finish_reason is not None:
                return
            rollout = _interrupted(rollout, parts, sampling, started)
        else:
            before, rollout = len(rollout), await engine.generate(rollout, sampling)
            is_aborted = rollout.finish_reason is FinishReason.ABORT
            yield Increment(
                tuple(rollout.token_ids[before:].tolist()),
                tuple(rollout.logprobs[before:].tolist()),
                tuple(rollout.versions[before:].tolist()),
                None if is_aborted else rollout.finish_reason,
            )
            if not is_aborted:
                return
        done = len(rollout) - start
        sampling = dataclasses.replace(asked, max_tokens=asked.max_tokens - done, min_tokens=max(0, asked.min_tokens - done))


async def _until_abort(stream: AsyncIterator[Increment]) -> AsyncIterator[Increment]:
    async for part in stream:
        if part.finish_reason is not FinishReason.ABORT:
            yield part
        elif part.token_ids:
            yield dataclasses.replace(part, finish_reason=None)


def _interrupted(rollout: Rollout, parts: list[Increment], sampling: Sampling, started: float) -> Rollout:
    """The partial rollout of an interrupted stream, as `generate` would have returned it."""
    token_ids = np.asarray([token for part in parts for token in part.token_ids], dtype=np.int32)
    call = Call(
        start=len(rollout),
        stop=len(rollout) + len(token_ids),
        engine="",
        sampling=sampling,
        finish_reason=FinishReason.ABORT,
        started=started,
        finished=time.time(),
    )
    return append_call(
        rollout,
        call,
        token_ids=token_ids,
        logprobs=np.asarray([value for part in parts for value in part.logprobs], dtype=np.float32),
        versions=np.asarray([version for part in parts for version in part.versions], dtype=np.int32),
        policy=rollout.policy,
        lineage=rollout.lineage,
    )
