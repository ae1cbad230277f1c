"""Builds the answers: OpenAI's objects with vLLM's additions, as plain data."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.engine.server.calls import num_choices
from headrace.engine.server.text import decode
from headrace.engine.server.tools import ToolCallReader
from headrace.records import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.engine.server.calls import Piece
    from headrace.engine.server.requests import CompletionRequest
    from headrace.engine.server.text import ServedModel
    from headrace.engine.server.tools import ToolCall


@dataclass
class Answer:
    """The answer to one request: whole, or as a chunk for each piece."""

    ask: CompletionRequest
    served: ServedModel
    id: str
    prompt_logprobs: Sequence[Sequence[float | None]] = ()
    """Of each prompt, if it is echoed with logprobs."""
    created: int = field(default_factory=lambda: int(time.time()))
    num_completion_tokens: int = 0

    def __post_init__(self) -> None:
        self._offsets = [0] * num_choices(self.ask)  # characters of each choice so far
        self._is_started = [False] * num_choices(self.ask)
        max_calls = self.ask.max_tool_calls
        self._tool_calls = [ToolCallReader(max_calls=max_calls) for _ in self._is_started] if max_calls else None

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The answer, not streamed."""
        head = self._head(is_chunk=False)
        choices = []
        for index in range(num_choices(self.ask)):
            own = [piece for piece in pieces if piece.index == index]
            choices.append(self._choice(index, own, self._part(index, own), is_chunk=False))
        return {**head, "choices": choices, "usage": self.usage()}

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """One event of a stream; None if the piece has nothing to send yet."""
        is_first = not self._is_started[piece.index]
        said = self._part(piece.index, [piece])
        is_empty = said == ("", []) and piece.finish_reason is None
        if is_empty and not is_first and not (self.ask.logprobs or self.ask.return_token_ids):
            self.num_completion_tokens += len(piece.token_ids)
            return None
        chunk = {**self._head(is_chunk=True), "choices": [self._choice(piece.index, [piece], said, is_chunk=True)]}
        return {**chunk, "usage": None} if self.ask.include_usage else chunk

    def last_chunk(self) -> dict[str, Any]:
        """The usage, if `stream_options.include_usage` requests it."""
        return {**self._head(is_chunk=True), "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        prompt = sum(len(ids) for ids in self.ask.prompts)
        completion = self.num_completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _head(self, *, is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.ask.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.served.model_name}
        if self.ask.is_chat and self.ask.return_token_ids and not any(self._is_started):
            head["prompt_token_ids"] = list(self.ask.prompts[0])
        return head

    def _part(self, index: int, pieces: Sequence[Piece]) -> tuple[str, list[ToolCall]]:
        """(content, tool calls) of these pieces."""
        text = "".join(piece.text for piece in pieces)
        if self._tool_calls is None:
            return text, []
        content, calls = self._tool_calls[index].push(text)
        if pieces[-1].finish_reason is not None:
            last_content, last_calls = self._tool_calls[index].finish()
            content, calls = content + last_content, calls + last_calls
        return content, calls

    def _choice(
        self, index: int, pieces: Sequence[Piece], said: tuple[str, list[ToolCall]], *, is_chunk: bool
    ) -> dict[str, Any]:
        ask = self.ask
        which = index // ask.num_choices
        is_first = not self._is_started[index]
        self._is_started[index] = True
        token_ids = [token for piece in pieces for token in piece.token_ids]
        values: list[float | None] = [value for piece in pieces for value in piece.logprobs]
        self.num_completion_tokens += len(token_ids)
        text, calls = said
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": self._finish_reason(index, pieces[-1]),
            "stop_reason": pieces[-1].stop_reason,
        }
        if ask.return_token_ids:
            if is_first:
                choice["prompt_token_ids"] = list(ask.prompts[which])
            choice["token_ids"] = token_ids
            choice["versions"] = [version for piece in pieces for version in piece.versions]
        if ask.is_chat:
            role = {"role": "assistant"} if is_first else {}
            choice["delta" if is_chunk else "message"] = {**role, **self._message(index, text, calls, is_chunk=is_chunk)}
            choice["logprobs"] = {"content": self._chat_logprobs(token_ids, values)} if ask.logprobs else None
            return choice
        if ask.echo and is_first:
            text = self._prompt_text(which) + text
            token_ids = [*ask.prompts[which], *token_ids]
            values = [*(self.prompt_logprobs[which] if ask.logprobs else ()), *values]
        choice["text"] = text
        choice["logprobs"] = self._logprobs(index, token_ids, values) if ask.logprobs else None
        return choice

    def _message(self, index: int, text: str, calls: Sequence[ToolCall], *, is_chunk: bool) -> dict[str, Any]:
        """OpenAI's message without the role; its content is null if it only calls tools."""
        if not calls or self._tool_calls is None:
            return {"content": text}
        bodies = [call.body() for call in calls]
        if is_chunk:
            first = self._tool_calls[index].num_given - len(calls)
            bodies = [{"index": first + offset, **body} for offset, body in enumerate(bodies)]
        return {"content": text or None, "tool_calls": bodies}

    def _finish_reason(self, index: int, last: Piece) -> str | None:
        """A truncated choice says so, even if it called a tool before."""
        has_called = self._tool_calls is not None and self._tool_calls[index].num_given > 0
        return "tool_calls" if has_called and last.finish_reason is FinishReason.STOP else last.finish_reason

    def _prompt_text(self, which: int) -> str:
        given = self.ask.prompt_texts[which]
        if given is not None:
            return given
        return decode(self.served.tokenizer, self.ask.prompts[which], skip_special=self.ask.skip_special)

    def _logprobs(self, index: int, token_ids: Sequence[int], values: Sequence[float | None]) -> dict[str, Any]:
        """`top_logprobs` is null: only the sampled token's logprob is recorded."""
        names, offsets = [], []
        for token in token_ids:
            names.append(self._token_name(token, self._token_text(token)))
            offsets.append(self._offsets[index])
            self._offsets[index] += len(decode(self.served.tokenizer, [token], skip_special=self.ask.skip_special))
        return {"tokens": names, "token_logprobs": list(values), "top_logprobs": None, "text_offset": offsets}

    def _chat_logprobs(self, token_ids: Sequence[int], values: Sequence[float | None]) -> list[dict[str, Any]]:
        entries = []
        for token, value in zip(token_ids, values, strict=True):
            text = self._token_text(token)
            is_whole = "\N{REPLACEMENT CHARACTER}" not in text  # part of a character has no text of its own
            entries.append(
                {
                    "token": self._token_name(token, text),
                    "logprob": value,
                    "bytes": list(text.encode()) if is_whole else None,
                    "top_logprobs": [],
                }
            )
        return entries

    def _token_text(self, token: int) -> str:
        return decode(self.served.tokenizer, [token], skip_special=False)

    def _token_name(self, token: int, text: str) -> str:
        return f"token_id:{token}" if self.ask.tokens_as_ids else text
