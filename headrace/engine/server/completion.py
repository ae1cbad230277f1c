"""Generates the choices of one request side by side, and builds OpenAI's objects with vLLM's additions, as plain data."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from headrace.engine.protocol import Increment
from headrace.engine.request import Request, SampledTokens
from headrace.engine.server.text import TextReader, decode
from headrace.engine.server.tool_calls import ToolCallReader
from headrace.records import FinishReason, Rollout

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from headrace.engine.protocol import ServedEngine
    from headrace.engine.server.requests import CompletionRequest
    from headrace.engine.server.text import ServedModel
    from headrace.engine.shaping import TopLogprobs
    from headrace.records import Sampling

    Token = tuple[int, float, int, TopLogprobs]


class Completion:
    """The answer to one request. `prompt_logprobs` are those of each prompt, if it is echoed with logprobs."""

    def __init__(
        self, request: CompletionRequest, served: ServedModel, *, prompt_logprobs: Sequence[Sequence[float | None]] = ()
    ) -> None:
        self.request = request
        self._choices = [
            Choice(request, served, index, prompt_logprobs[index // request.num_choices] if prompt_logprobs else ())
            for index in range(len(request.prompts) * request.num_choices)
        ]
        self._ready: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()
        kind = "text_completion"
        if request.is_chat:
            kind = "chat.completion.chunk" if request.stream else "chat.completion"
        name = f"{'chatcmpl' if request.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": name, "object": kind, "created": int(time.time()), "model": request.model}
        if request.is_chat and request.return_token_ids:
            self._head["prompt_token_ids"] = list(request.prompts[0])

    def fail(self, error: Exception) -> None:
        """End the request with this error."""
        self._ready.put_nowait(error)

    async def choices(self, engine: ServedEngine) -> AsyncGenerator[dict[str, Any], None]:
        """OpenAI's choices as they end; of a stream, what is added to each. Closing the generator cancels the rest."""
        tasks = [asyncio.create_task(self._generate(engine, choice)) for choice in self._choices]
        try:
            left = len(tasks)
            while left:
                ready = await self._ready.get()
                if isinstance(ready, Exception):
                    raise ready
                yield ready
                left -= ready["finish_reason"] is not None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def answer(self, choices: Sequence[dict[str, Any]], *, is_last: bool = False) -> dict[str, Any]:
        """The whole answer or one event of a stream; the last has the usage."""
        answer = {**self._head, "choices": choices}
        self._head.pop("prompt_token_ids", None)  # only the first has it
        if is_last:
            prompt = sum(len(ids) for ids in self.request.prompts)
            completion = sum(len(choice.tokens) for choice in self._choices)
            answer["usage"] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        elif self.request.include_usage:
            answer["usage"] = None
        return answer

    async def _generate(self, engine: ServedEngine, choice: Choice) -> None:
        """One choice, resumed whenever new weights interrupt it. Waits for the engine's increments; what is put into the queue
        wakes the reader of `choices`."""
        request, asked = self.request, dict[str, Any]()  # what goes beyond `Sampling`, which only some engines know
        if request.is_shaped:
            asked["shaping"] = request.shaping
        if request.held is not None:
            asked["held"] = request.held
        is_streamed = request.stream or request.stops or asked
        try:
            if request.is_scored_only:
                choice.add(Increment((), (), (), FinishReason.LENGTH))
                self._ready.put_nowait(choice.take())
            while choice.finish_reason is None:
                rollout, sampling = choice.rest()
                parts = engine.stream(rollout, sampling, **asked) if is_streamed else _generated(engine, rollout, sampling)
                async with contextlib.aclosing(cast("AsyncGenerator[Increment, None]", parts)) as increments:
                    async for increment in increments:
                        choice.add(increment)
                        if choice.finish_reason is not None or (request.stream and choice.has_news):
                            self._ready.put_nowait(choice.take())
                        if choice.finish_reason is not None:
                            break
        except Exception as error:  # noqa: BLE001  (raised again where the request is answered)
            self.fail(error)


async def _generated(engine: ServedEngine, rollout: Rollout, sampling: Sampling) -> AsyncGenerator[Increment, None]:
    """A call as one increment: the engine sends all tokens in one message."""
    longer = await engine.generate(rollout, sampling)
    token_ids, logprobs, versions = (
        tuple(column[len(rollout) :].tolist()) for column in (longer.token_ids, longer.logprobs, longer.versions)
    )
    yield Increment(token_ids, logprobs, versions, longer.finish_reason)


class Choice:
    """One completion: `add` takes the engine's tokens, `take` returns what they add to the answer."""

    def __init__(
        self, request: CompletionRequest, served: ServedModel, index: int, prompt_logprobs: Sequence[float | None]
    ) -> None:
        which, sibling = divmod(index, request.num_choices)
        self.finish_reason: FinishReason | None = None
        self.tokens: list[Token] = []  # sampled so far, with their logprobs, versions and alternatives
        self._num_taken = 0  # of these, by `take`
        self._index, self._prompt = index, request.prompts[which]
        self._sampling = request.sampling_of(self._prompt, sibling, served.context)
        self._num_calls = 0
        self._stop_reason: str | int | None = None  # the stop string or token; None for the model's own stop tokens
        self._request, self._served, self._prompt_logprobs = request, served, prompt_logprobs
        self._reader = TextReader(
            served.tokenizer,
            self._prompt,
            stops=request.stops,
            include_stop=request.include_stop_str_in_output,
            skip_special=request.skip_special_tokens,
            min_tokens=self._sampling.min_tokens,
        )
        self._tool_calls = ToolCallReader(max_calls=request.max_tool_calls) if request.max_tool_calls else None
        self._is_first = True
        self._offset = 0  # characters of the tokens so far
        self._text = ""  # this and the calls: what came since the last `take`
        if request.echo:
            given = request.prompt_texts[which]
            self._text = self._decode(self._prompt) if given is None else given
        self._calls: list[dict[str, Any]] = []

    def rest(self) -> tuple[Rollout, Sampling]:
        """What is left to generate: the prompt, or what was interrupted, which engines resume before they start new calls."""
        num_done, sampling = len(self.tokens), self._sampling
        rollout = Rollout.from_prompt(list(self._prompt), id=uuid.uuid4().hex, index=self._index)
        if num_done:
            token_ids, logprobs, versions, _ = zip(*self.tokens, strict=True)
            done = SampledTokens(np.array(token_ids, np.int32), np.array(logprobs, np.float32), np.array(versions, np.int32))
            call, policy, lineage = Request(rollout, sampling, on_done=lambda _: None), rollout.policy, rollout.lineage
            rollout = call.extended(done, FinishReason.ABORT, engine="", policy=policy, lineage=lineage)
        num_left, min_left = sampling.max_tokens - num_done, max(0, sampling.min_tokens - num_done)
        return rollout, dataclasses.replace(sampling, max_tokens=num_left, min_tokens=min_left)

    def add(self, part: Increment) -> None:
        """The next tokens, up to where a stop string ends the completion. A stop token is one of them, but its text shows only
        if it is asked for."""
        reader, shown, num_used = self._reader, part.token_ids, len(part.token_ids)
        self.finish_reason = None if part.finish_reason is FinishReason.ABORT else part.finish_reason
        if self.finish_reason is FinishReason.STOP:
            self._stop_reason = None if shown[-1] in self._served.stop_ids else shown[-1]
            shown = shown if self._request.include_stop_str_in_output else shown[:-1]
        before = reader.num_pushed
        text = reader.push(shown)
        if self.finish_reason is not None:
            text += reader.finish()
        if reader.stopped_by is not None:
            self.finish_reason, self._stop_reason = FinishReason.STOP, reader.stopped_by
            num_used = reader.num_pushed - before
        if self._tool_calls is not None:
            text, calls = self._tool_calls.push(text)
            if self.finish_reason is not None:
                last_text, last_calls = self._tool_calls.finish()
                text, calls = text + last_text, calls + last_calls
            self._calls += calls
            self._num_calls += len(calls)
        self._text += text
        tops = part.top_logprobs or ((),) * len(part.token_ids)
        self.tokens += list(zip(part.token_ids, part.logprobs, part.versions, tops, strict=True))[:num_used]

    @property
    def has_news(self) -> bool:
        """Whether a stream has something to send."""
        shows_tokens = self._request.logprobs or self._request.return_token_ids
        return bool(self._is_first or self._text or self._calls or (shows_tokens and len(self.tokens) > self._num_taken))

    def take(self) -> dict[str, Any]:
        """What came since the last call, as OpenAI's choice."""
        request, fresh = self._request, self.tokens[self._num_taken :]
        choice: dict[str, Any] = {"index": self._index, "finish_reason": self.finish_reason, "stop_reason": self._stop_reason}
        if self._num_calls and self.finish_reason is FinishReason.STOP:  # a truncated choice says so, even if it called a tool
            choice["finish_reason"] = "tool_calls"
        if request.return_token_ids:
            if self._is_first:
                choice["prompt_token_ids"] = list(self._prompt)
            choice["token_ids"] = [token for token, _, _, _ in fresh]
            choice["versions"] = [version for _, _, version, _ in fresh]
        if request.is_chat:
            choice["delta" if request.stream else "message"] = self._message()
            entries = [
                {**self._chat_entry(token, value), "top_logprobs": [self._chat_entry(*each) for each in top]}
                for token, value, top in map(self._reported, fresh if request.logprobs else ())
            ]
            choice["logprobs"] = {"content": entries} if request.logprobs else None
        else:
            choice["text"] = self._text
            choice["logprobs"] = self._completion_logprobs(fresh) if request.logprobs else None
        self._is_first, self._text, self._calls, self._num_taken = False, "", [], len(self.tokens)
        return choice

    def _message(self) -> dict[str, Any]:
        """OpenAI's message, or what a stream adds to it; its content is null if it only calls tools."""
        message: dict[str, Any] = {"role": "assistant"} if self._is_first else {}
        message["content"] = self._text or (None if self._calls else "")
        if self._calls and self._request.stream:
            first = self._num_calls - len(self._calls)
            message["tool_calls"] = [{"index": first + offset, **call} for offset, call in enumerate(self._calls)]
        elif self._calls:
            message["tool_calls"] = self._calls
        return message

    def _completion_logprobs(self, fresh: Sequence[Token]) -> dict[str, Any]:
        """`top_logprobs` has each token that was sampled too, as OpenAI's has; it is null if none were asked for."""
        is_echo = self._request.echo and self._is_first
        prompt = zip(self._prompt, self._prompt_logprobs, strict=True) if is_echo else ()
        num_top = self._request.shaping.top_logprobs
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [] if num_top else None, "text_offset": []}
        for token, value, top in (*((*each, None) for each in prompt), *map(self._reported, fresh)):
            name = self._token_name(token)
            found["tokens"].append(name)
            found["token_logprobs"].append(value)
            if num_top:  # of tokens with the same text the likeliest counts
                likeliest = {self._token_name(other): logprob for other, logprob in reversed(top or ())}
                found["top_logprobs"].append(None if top is None else {**likeliest, name: value})
            found["text_offset"].append(self._offset)
            self._offset += len(self._decode([token]))
        return found

    def _chat_entry(self, token: int, value: float) -> dict[str, Any]:
        text = self._decode([token], skip_special=False)
        # Part of a character has no text of its own
        characters = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        return {"token": self._token_name(token, text), "logprob": value, "bytes": characters}

    def _reported(self, token: Token) -> tuple[int, float, TopLogprobs]:
        """(token id, logprob, top logprobs). Greedy tokens are certain; beside top logprobs, theirs is at temperature 1 too."""
        number, value, _, top = token
        return number, top[0][1] if top and self._sampling.temperature == 0 else value, top

    def _token_name(self, token: int, text: str | None = None) -> str:
        if self._request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._decode([token], skip_special=False) if text is None else text

    def _decode(self, token_ids: Sequence[int], *, skip_special: bool | None = None) -> str:
        skip_special = self._request.skip_special_tokens if skip_special is None else skip_special
        return decode(self._served.tokenizer, token_ids, skip_special=skip_special)
