"""Tools: those a chat offers the model, and the calls parsed out of its text, in the form that Hermes and Qwen models write:

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

from headrace.engine.server.body import bad, check_list, check_object, check_text, read_json, shown, unsupported
from headrace.engine.server.text import could_begin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headrace.engine.server.body import Body

OPENS, CLOSES = "<tool_call>", "</tool_call>"
_BEFORE_CLOSING = re.compile(r'(?:[^"<]++|<(?!/tool_call>)|"(?:[^"\\\n]|\\[\s\S])*+["\n])*+')
"""Up to a closing marker outside JSON strings. No string goes past its line, so that a stray quote swallows little."""
_MANY = 2**31


# Tools in a request


def read_tools(body: Body) -> tuple[list[dict[str, Any]], int]:
    """(the tools for the chat template: none if none may be called, the most calls in one answer)."""
    given = body.take("tools")
    listed = [] if given is None else check_list(given, "tools", "tools")
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(listed)]
    names = [tool["function"]["name"] for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise bad(f"tools[{index}].function.name", f"{shown(name)!r} is the name of another tool already")
    max_calls = _MANY if body.flag("parallel_tool_calls", True) else 1
    choice = body.take("tool_choice")
    if choice == "required" or isinstance(choice, dict):
        raise unsupported("tool_choice", 'a call cannot be forced, since decoding is not constrained; give "auto" or "none"')
    if choice not in (None, "auto", "none"):
        raise bad("tool_choice", 'must be "auto" or "none"')
    return [] if choice == "none" else tools, max_calls


def _tool(tool: Any, name: str) -> dict[str, Any]:  # noqa: ANN401
    """A tool as templates expect it. Fields of a function beyond OpenAI's go to the template."""
    if check_object(tool, name).get("type") != "function":
        raise bad(f"{name}.type", 'must be "function"')
    unknown = sorted(tool.keys() - {"type", "function"})
    if unknown:
        raise bad(shown(f"{name}.{unknown[0]}"), "is not a field this server knows", code="unknown_parameter")
    given = check_object(tool.get("function"), f"{name}.function")
    function = {key: value for key, value in given.items() if value is not None and key != "strict"}
    _check_name(function, name)
    check_text(function.get("description", ""), f"{name}.function.description")
    check_object(function.get("parameters", {}), f"{name}.function.parameters", "a JSON schema")
    if given.get("strict") not in (None, False):
        message = "arguments cannot be held to a schema, since decoding is not constrained; leave it out"
        raise unsupported(f"{name}.function.strict", message)
    check_text(json.dumps(function, ensure_ascii=False), f"{name}.function")
    return {"type": "function", "function": function}


def _check_name(function: dict[str, Any], name: str) -> None:
    if not check_text(function.get("name"), f"{name}.function.name"):
        raise bad(f"{name}.function.name", "must not be empty")


def read_past_calls(calls: Any, name: str) -> list[dict[str, Any]]:  # noqa: ANN401
    """An assistant message's `tool_calls`, with arguments as objects, as templates expect them."""
    return [_past_call(call, f"{name}[{index}]") for index, call in enumerate(check_list(calls, name, "calls"))]


def _past_call(call: Any, name: str) -> dict[str, Any]:  # noqa: ANN401
    if check_object(call, name).get("type", "function") != "function":
        raise bad(f"{name}.type", 'must be "function"')
    function = check_object(call.get("function"), f"{name}.function")
    _check_name(function, name)
    arguments = _arguments(function.get("arguments"), f"{name}.function.arguments")
    read = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return read if call.get("id") is None else {"id": check_text(call["id"], f"{name}.id"), **read}


def _arguments(value: Any, name: str) -> dict[str, Any]:  # noqa: ANN401
    """OpenAI's clients send JSON inside JSON; a call without arguments may be an empty text."""
    if isinstance(value, str):
        try:
            value = read_json(value.encode(), name) if value.strip() else {}
        except (ValueError, RecursionError) as error:
            raise bad(name, f"is not JSON: {error}") from error
    check_object(value, name, "a JSON object")
    check_text(json.dumps(value, ensure_ascii=False), name)
    return dict(value)


# Tool calls in the model's text


@dataclass(frozen=True)
class ToolCall:
    """A tool call by the model."""

    name: str
    arguments: str
    """The text of a JSON object."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")

    def body(self) -> dict[str, Any]:
        """OpenAI's object."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallReader:
    """Splits one choice's text into content and calls. Pushes of any size add up to the same result. What is not a call is
    content, markers included; only space between calls is dropped, since a template adds it anyway."""

    def __init__(self, *, max_calls: int) -> None:
        self.num_given = 0  # calls so far
        self._max_calls = max_calls  # later calls are left out
        self._held = ""  # text that could be the start of a call; from its marker on, once that is complete
        self._space = ""  # trailing space: dropped if a call follows, content if text does
        self._is_after_call = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The content that is certain after this text, and the calls that are complete."""
        is_decided = not self._held.startswith(OPENS) or CLOSES in self._held[1 - len(CLOSES) :] + text
        self._held += text
        return self._read(is_last=False) if is_decided else ("", [])

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What was held back, once no more text will come."""
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
    """Where the call starting at `start` ends, its marker included; -1 while that is unknown. After a completion's last token
    the marker may be missing: some models stop right after the JSON."""
    found = _BEFORE_CLOSING.match(text, start + len(OPENS))
    if found is not None and text.startswith(CLOSES, found.end()):
        return found.end() + len(CLOSES)
    return len(text) if is_last else -1


def parse_call(text: str) -> ToolCall | None:
    """The call between two markers; None unless it is a JSON object with a name and an object of arguments."""
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
    """Whether a chat template teaches this form. Another form between the same markers is not parsed: it stays content."""
    return OPENS in template and CLOSES in template


def has_special_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether skipping special tokens would drop the markers."""
    return any(token.special and token.content in (OPENS, CLOSES) for token in tokenizer.added_tokens_decoder.values())
