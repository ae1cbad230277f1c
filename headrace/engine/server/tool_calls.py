"""Calls of tools, read out of what a model says, in the form Hermes and Qwen models write them.

Let me look.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.engine.server.text import could_begin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPENS, CLOSES = "<tool_call>", "</tool_call>"
_BEFORE_CLOSING = re.compile(r'(?:[^"<]++|<(?!/tool_call>)|"(?:[^"\\\n]|\\[\s\S])*+["\n])*+')
"""Up to a closing marker that is not inside a JSON string. No string goes past its line, so a stray quote swallows little."""


@dataclass(frozen=True)
class ToolCall:
    """One call, as a client is told of it."""

    name: str
    arguments: str
    """A JSON object."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")

    def body(self) -> dict[str, Any]:
        """OpenAI's object."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallReader:
    """One choice's text, parted into content and calls. Whatever the sizes of the pushes, they add up to the same.

    Nothing is lost: what is not a call is content, markers and all. Only the space between calls goes, since a template
    puts it there anyway.
    """

    def __init__(self, *, max_calls: int) -> None:
        self.num_given = 0
        """Calls so far."""
        self._max_calls = max_calls
        """Calls after so many are left out."""
        self._held = ""
        """Text that could be the beginning of a call; from its marker on, once that is complete."""
        self._space = ""
        """Space whose meaning is open: it goes if a call follows, it is content if text does."""
        self._is_after_call = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The content that is certain after this text, and the calls that are complete."""
        is_decided = not self._held.startswith(OPENS) or CLOSES in self._held[1 - len(CLOSES) :] + text
        self._held += text
        return self._read(is_last=False) if is_decided else ("", [])

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What was held back, once nothing more will come."""
        content, calls = self._read(is_last=True)
        return content + ("" if self._is_after_call else self._space), calls

    def _read(self, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        contents: list[str] = []
        calls: list[ToolCall] = []
        text, at = self._held, 0
        while at < len(text):
            if not text.startswith(OPENS, at):
                end = text.find(OPENS, at)
                if end < 0:
                    end = len(text) - (0 if is_last else could_begin(text[at:], [OPENS]))
                if end == at:
                    break
                contents.append(self._content(text[at:end]))
            else:
                end = _closing(text, at, is_last=is_last)
                if end < 0:
                    break
                call = parse_call(text[at + len(OPENS) : end].removesuffix(CLOSES))
                if call is None:
                    contents.append(self._content(text[at:end]))
                else:
                    self._space, self._is_after_call = "", True
                    if self.num_given < self._max_calls:
                        self.num_given += 1
                        calls.append(call)
            at = end
        self._held = text[at:]
        return "".join(contents), calls

    def _content(self, text: str) -> str:
        """The text with the space before it, without the space after it."""
        text = self._space + text
        content = text.rstrip()
        self._space = text[len(content) :]
        self._is_after_call = self._is_after_call and not content
        return content


def _closing(text: str, start: int, *, is_last: bool) -> int:
    """Where the call that begins at `start` ends, its marker included; -1 while that is open.

    At a completion's last token the marker may be missing: some models end right after the JSON.
    """
    found = _BEFORE_CLOSING.match(text, start + len(OPENS))
    if found is not None and text.startswith(CLOSES, found.end()):
        return found.end() + len(CLOSES)
    return len(text) if is_last else -1


def parse_call(text: str) -> ToolCall | None:
    """The call between two markers; None where it is not a JSON object with a name and an object of arguments."""
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
        name, arguments = content["name"], content.get("arguments", {})
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + written).encode()  # an escape may stand for half of a surrogate pair
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return ToolCall(name, written)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def writes_tool_calls(template: str) -> bool:
    """Whether a chat template teaches this form. One that teaches another inside these markers is no call, but content."""
    return OPENS in template and CLOSES in template


def has_special_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether text without special tokens would be text without the markers."""
    return any(token.special and token.content in (OPENS, CLOSES) for token in tokenizer.added_tokens_decoder.values())
