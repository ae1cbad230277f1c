"""Tool calls parsed out of a model's text, in the form that Hermes and Qwen models write:

Let me look.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>

Newer Qwen models write elements instead of JSON between the markers (`_parse_elements`). `read_calls`, for environments, also
knows the forms of Llama 3 and of others (`MARKED`). Readers take time linear in the text, whatever the policy wrote.
"""

from __future__ import annotations

import json
import re
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.engine.server.text import could_begin

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """(content, calls) of a whole answer, in the form that the model's chat template shows (`call_form`)."""
    form = call_form(template)
    if form in MARKED:
        marked = MARKED[form]
        content, found, written = text.partition(marked.opens)
        end = written.rfind(marked.closes)
        rest = written[end + len(marked.closes) :]
        if end < 0 or marked.opens in rest:  # the last marker is missing
            end, rest = len(written), ""
        calls = _parsed(marked.read, written[:end]) if found else []
        return (content.rstrip() + rest, calls) if calls else (text, [])
    if form != "hermes":
        call = parse_call(text.strip().removeprefix("<|python_tag|>"), key="parameters") if form == "llama" else None
        return (text, []) if call is None else ("", [call])
    reader = ToolCallReader(max_calls=len(text))
    parts = [reader.push(text), reader.finish()]
    return "".join(content for content, _ in parts), [call for _, calls in parts for call in calls]


def call_form(template: str | None) -> str:
    """The form of calls that a chat template shows: hermes, one of `MARKED`, llama (an answer that is one JSON object with
    `parameters`), or "" for none that is known. Without a template, it is Hermes'."""
    if template is None:
        return "hermes"
    shown = [form for form, marked in MARKED.items() if marked.shown in template]
    return next(iter(shown), "hermes" if OPENS in template else "llama" if '"parameters"' in template else "")


def parse_call(text: str, *, key: str = "arguments") -> dict[str, Any] | None:
    """OpenAI's object for the call between two markers; None unless it is a JSON object with a name and an object of
    arguments."""

    def read(text: str) -> list[tuple[Any, Any]]:
        content = _parse_elements(text) or json.loads(text)
        return [(content["name"], content.get(key, {}))]

    return next(iter(_parsed(read, text)), None)


def _parsed(read: Callable[[str], list[tuple[Any, Any]]], text: str) -> list[dict[str, Any]]:
    """OpenAI's objects for what a reader finds: [(name, arguments)]; none if anything is wrong with one of them."""
    try:
        return [_call(name, arguments) for name, arguments in read(text)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []


def _call(name: Any, arguments: Any) -> dict[str, Any]:  # noqa: ANN401  (what a model wrote)
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + written).encode()  # an escape may stand for half of a surrogate pair
    if not name or not isinstance(arguments, dict):
        raise ValueError
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": written}}


def _parse_elements(text: str) -> dict[str, Any] | None:
    """The call in the form of Qwen 3.5 and Qwen3-Coder: `<function=NAME> <parameter=KEY> VALUE </parameter> … </function>`, on
    lines of their own. Values are texts: only the tool's schema says which are numbers."""
    found = _FUNCTION.fullmatch(text)
    if found is None:
        return None
    return {"name": found["name"], "arguments": {each["key"]: each["value"] for each in _PARAMETER.finditer(found["inside"])}}


_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>\n(?P<inside>.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>\n", re.DOTALL)


def _read_glm(text: str) -> list[tuple[Any, Any]]:
    """`NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> …`, markers between two calls. Values are texts, as above."""
    calls = [_GLM.fullmatch(call) for call in _GLM_NEXT.split(text)]
    if None in calls:
        raise ValueError
    return [(call["name"], dict(_GLM_ARGUMENT.findall(call["inside"]))) for call in calls if call is not None]


_GLM = re.compile(r"\s*+(?P<name>[^\s<]++)\s*+(?P<inside>(?:<arg_key>.*</arg_value>\s*)?)", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"<arg_key>([^<]++)</arg_key>\s*+<arg_value>(.*?)</arg_value>", re.DOTALL)
_GLM_NEXT = re.compile(rf"{CLOSES}\s*+{OPENS}")


def _read_mistral(text: str) -> list[tuple[Any, Any]]:
    """`[{"name": NAME, "arguments": {…}}, …]`, or in newer models `NAME[ARGS]{…}`, with the marker before each."""
    if text.lstrip().startswith("["):
        return [(call["name"], call.get("arguments", {})) for call in json.loads(text)]
    parts = [call.partition("[ARGS]") for call in text.split("[TOOL_CALLS]")]
    return [(name.partition("[CALL_ID]")[0].strip(), json.loads(arguments)) for name, _, arguments in parts]


def _read_lfm(text: str) -> list[tuple[Any, Any]]:
    """LFM2's `[NAME(KEY=VALUE, …), …]`, with values of Python or JSON, rewritten as JSON: `[["NAME", {"KEY": VALUE}]]`."""

    def rewritten(token: re.Match[str]) -> str:
        if token["text"] is not None:
            return json.dumps(_ESCAPE.sub(lambda each: _ESCAPES.get(each[1], each[0]), token["text"]))
        word, ending = token["word"], token["ending"]
        if word is None:
            return "}]" if token[0] == ")" else token[0]
        after = {"(": f'["{word}", {{', "=": f'"{word}": '}
        return after[ending] if ending else _CONSTANTS.get(word, word)

    return [(name, arguments) for name, arguments in json.loads(_LFM.sub(rewritten, text), strict=False)]


_LFM = re.compile(
    r"""'(?P<text>(?:[^'\\]|\\.?|'(?!\s*+[],:)}]))*+)(?:'|\Z)|"(?:[^"\\]|\\.?)*+(?:"|\Z)"""
    r"""|(?P<word>[\w.+-]++)(?P<ending>[(=]?)|\)""",
    re.DOTALL,
)
"""A text in single quotes ends where a value can end: some templates escape none inside. One in double quotes is JSON."""
_ESCAPE, _ESCAPES = re.compile(r"\\(.)", re.DOTALL), {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def _read_gemma(text: str) -> list[tuple[Any, Any]]:
    """Gemma 4's `call:NAME{KEY:VALUE, …}`, between markers, where `<|"|>` quotes texts. It is rewritten as JSON."""

    def rewritten(token: re.Match[str]) -> str:
        if token["text"] is not None:
            return json.dumps(token["text"])
        return f'"{token["word"]}":' if token["ending"] else _CONSTANTS.get(token["word"], token["word"])

    calls = [call.partition("{") for call in text.split("<tool_call|><|tool_call>")]
    if not all(name.startswith("call:") for name, _, _ in calls):
        raise ValueError
    return [(name.removeprefix("call:"), json.loads(_GEMMA.sub(rewritten, "{" + inside))) for name, _, inside in calls]


_GEMMA = re.compile(r'<\|"\|>(?P<text>.*?)(?:<\|"\|>|\Z)|(?P<word>[^][{}\s,:<>|"]++)(?P<ending>:?)', re.DOTALL)


class MarkedForm(NamedTuple):
    """Calls behind a marker."""

    shown: str
    """Chat templates of this form have it."""
    opens: str
    """Before the first call."""
    closes: str
    """Behind the last; it may be missing. "" if there is none."""
    read: Callable[[str], list[tuple[Any, Any]]]
    """[(name, arguments)] of what is between them; it raises unless all of that is calls."""


MARKED = {
    "glm": MarkedForm("<arg_key>", OPENS, CLOSES, _read_glm),
    "mistral": MarkedForm("[TOOL_CALLS]", "[TOOL_CALLS]", "", _read_mistral),
    "lfm": MarkedForm("<|tool_call_start|>", "<|tool_call_start|>", "<|tool_call_end|>", _read_lfm),
    "gemma": MarkedForm("<|tool_call>", "<|tool_call>", "<tool_call|>", _read_gemma),
}
CALL_FORMS = "Hermes and Qwen, GLM, Llama 3, Mistral, LFM2, Gemma 4"
"""For messages."""


def has_special_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether skipping special tokens would drop the markers."""
    markers = {OPENS, CLOSES, *(form.opens for form in MARKED.values())}
    return any(token.special and token.content in markers for token in tokenizer.added_tokens_decoder.values())
