"""Tool calls parsed out of a model's text, in the form that Hermes and Qwen models write:

Let me look.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>

Newer Qwen models write elements instead of JSON between the markers (`_parse_elements`). `read_calls`, for environments, also
knows the forms of Llama 3 and Mistral.
"""

from __future__ import annotations

import json
import re
import uuid
from typing import TYPE_CHECKING, Any

from headrace.engine.server.text import could_begin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPENS, CLOSES = "<tool_call>", "</tool_call>"
_BEFORE_CLOSING = re.compile(r'(?:[^"<]++|<(?!/tool_call>)|"(?:[^"\\\n]|\\[\s\S])*+["\n])*+')
"""Up to a closing marker outside JSON strings. No string goes past its line, so that a stray quote swallows little."""


class ToolCallReader:
    """Splits one choice's text into content and calls. Pushes of any size add up to the same result. What is not a call is
    content, markers included; only space between calls is dropped, since a template adds it anyway."""

    def __init__(self, *, max_calls: int) -> None:
        self.num_given = 0  # calls so far
        self._max_calls = max_calls  # later calls are left out
        self._held = ""  # text that could be the start of a call; from its marker on, once that is complete
        self._space = ""  # trailing space: dropped if a call follows, content if text does
        self._is_after_call = False

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The content that is certain after this text, and the calls that are complete."""
        is_decided = not self._held.startswith(OPENS) or CLOSES in self._held[1 - len(CLOSES) :] + text
        self._held += text
        return self._read(is_last=False) if is_decided else ("", [])

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """What was held back, once no more text will come."""
        content, calls = self._read(is_last=True)
        return content + ("" if self._is_after_call else self._space), calls

    def _read(self, *, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        content, calls = "", []
        text, at = self._held, 0
        while at < len(text):
            call = None
            if text.startswith(OPENS, at):
                end = _closing(text, at, is_last=is_last)
                if end < 0:
                    break
                call = parse_call(text[at + len(OPENS) : end].removesuffix(CLOSES))
            else:
                end = text.find(OPENS, at)
                if end < 0:
                    end = len(text) - (0 if is_last else could_begin(text[at:], [OPENS]))
                if end == at:
                    break
            if call is None:
                content += self._content(text[at:end])
            else:
                self._space, self._is_after_call = "", True
                if self.num_given < self._max_calls:
                    self.num_given += 1
                    calls.append(call)
            at = end
        self._held = text[at:]
        return content, calls

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


def read_calls(text: str, *, template: str | None) -> tuple[str, list[dict[str, Any]]]:
    """(content, calls) of a whole answer, in the form that the model's chat template shows: Llama's, an answer that is one JSON
    object with `parameters`; Mistral's, a list behind a marker; else Hermes'. Without a template, Hermes' too."""
    form = call_form(template)
    if form == "mistral":
        content, marker, written = text.partition(MISTRAL)
        calls = _parse_list(written) if marker else []
        return (content.rstrip(), calls) if calls else (text, [])
    if form != "hermes":
        call = parse_call(text.strip().removeprefix("<|python_tag|>"), key="parameters") if form == "llama" else None
        return (text, []) if call is None else ("", [call])
    reader = ToolCallReader(max_calls=len(text))
    parts = [reader.push(text), reader.finish()]
    return "".join(content for content, _ in parts), [call for _, calls in parts for call in calls]


MISTRAL = "[TOOL_CALLS]"


def call_form(template: str | None) -> str:
    """The form of calls that a chat template shows: hermes, mistral, llama, or "" for none that is known."""
    if template is None or OPENS in template:
        return "hermes"
    return "mistral" if MISTRAL in template else "llama" if '"parameters"' in template else ""


def _parse_list(text: str) -> list[dict[str, Any]]:
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [parse_call(json.dumps(each)) for each in listed] if isinstance(listed, list) else []
    return [call for call in calls if call is not None]


def parse_call(text: str, *, key: str = "arguments") -> dict[str, Any] | None:
    """OpenAI's object for the call between two markers; None unless it is a JSON object with a name and an object of
    arguments."""
    try:
        content = _parse_elements(text) or json.loads(text)
        name, arguments = content["name"], content.get(key, {})
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + written).encode()  # an escape may stand for half of a surrogate pair
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not name or not isinstance(arguments, dict):
        return None
    function = {"name": name, "arguments": written}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _parse_elements(text: str) -> dict[str, Any] | None:
    """The call in the form of Qwen 3.5 and Qwen3-Coder: `<function=NAME> <parameter=KEY> VALUE </parameter> … </function>`, on
    lines of their own. Values are texts: only the tool's schema says which are numbers."""
    found = _FUNCTION.fullmatch(text)
    if found is None:
        return None
    return {"name": found["name"], "arguments": {each["key"]: each["value"] for each in _PARAMETER.finditer(found["inside"])}}


_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>\n(?P<inside>.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>\n", re.DOTALL)


def has_special_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether skipping special tokens would drop the markers."""
    return any(token.special and token.content in (OPENS, CLOSES, MISTRAL) for token in tokenizer.added_tokens_decoder.values())
