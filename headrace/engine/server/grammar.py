"""Answers held to a grammar: reads what a request asks for, and compiles it with llguidance."""

from __future__ import annotations

import asyncio
import copy
import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from headrace.engine.server.body import Body, bad, check, read_json, shown, unsupported

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from headrace.engine.server.text import ServedModel

_MAX_TEXT = {"json": 2**15, "choice": 2**15, "regex": 2**12, "grammar": 2**12}
"""Characters. llguidance bounds what they expand to, but long regular expressions like .*.*.* take it seconds."""
_MAX_KEPT = 64  # compiled grammars
_MAX_SHOWN = 500  # characters of the library's explanation
_ANY_OBJECT = '{"type": "object"}'


class GrammarText(NamedTuple):
    """A grammar as a client gave it."""

    param: str
    """The parameter it came from, which errors name."""
    kind: Literal["json", "regex", "choice", "grammar"]
    text: str


def read_grammar(body: Body) -> GrammarText | None:
    """Of `response_format`, which is OpenAI's, or `structured_outputs`, which is vLLM's."""
    found = [each for each in (_response_format(body), _structured_outputs(body)) if each is not None]
    if len(found) > 1:
        raise bad("structured_outputs", "and response_format exclude each other")
    for each in found:
        if len(each.text) > _MAX_TEXT[each.kind]:
            raise bad(each.param, f"has {len(each.text)} characters; at most {_MAX_TEXT[each.kind]} are compiled")
    return found[0] if found else None


def _response_format(body: Body) -> GrammarText | None:
    given = Body(body.take("response_format", dict, {"type": "text"}))
    kind = given.take("type", str, "")
    if kind not in ("text", "json_object", "json_schema"):
        raise bad("response_format", f'{shown(kind)!r} is no type of it: give "text", "json_object" or "json_schema"')
    schema: dict[str, Any] | None = given.take("json_schema", dict)
    given.end(within="response_format")
    if (kind == "json_schema") != (schema is not None):
        raise bad("response_format", 'json_schema must be given with the type "json_schema", and with no other')
    if schema is None:
        return None if kind == "text" else GrammarText("response_format", "json", _ANY_OBJECT)
    named = Body(schema)
    text = _schema(named.take("schema"), "response_format.json_schema.schema")
    named.end({"name": (...,), "description": (...,), "strict": (...,)}, within="response_format.json_schema")
    return GrammarText("response_format", "json", text)


def _structured_outputs(body: Body) -> GrammarText | None:
    given = Body(body.take("structured_outputs", dict, {}))
    found: list[GrammarText] = []
    for kind in ("json", "regex", "choice", "grammar"):
        name, value = f"structured_outputs.{kind}", given.take(kind)
        if value is None:
            continue
        if kind == "choice":
            listed = [check(entry, str, name) for entry in check(value, list, name, "a list of texts")]
            if not listed:
                raise bad(name, "must not be empty")
            value = json.dumps(listed)
        found.append(GrammarText(name, kind, _schema(value, name) if kind == "json" else check(value, str, name)))
    if given.take("json_object", bool, False):
        found.append(GrammarText("structured_outputs.json_object", "json", _ANY_OBJECT))
    given.end({"disable_fallback": (...,)}, within="structured_outputs")
    if len(found) > 1:
        raise bad("structured_outputs", "must have one of json, regex, choice, grammar and json_object")
    return found[0] if found else None


def _schema(value: Any, name: str) -> str:  # noqa: ANN401
    """A JSON schema as text; it may be given as such. Its patterns are as long as other regular expressions at most."""
    if isinstance(value, str):
        try:
            value = read_json(check(value, str, name).encode(), name)
        except (ValueError, RecursionError) as error:
            raise bad(name, f"is not JSON: {error}") from error
    left, num_characters = [check(value, dict, name, "a JSON schema")], 0
    while left:
        part = left.pop()
        if isinstance(part, dict):
            named = part.get("patternProperties")
            patterns = [part.get("pattern"), *(named if isinstance(named, dict) else ())]
            num_characters += sum(len(each) for each in patterns if isinstance(each, str))
            left += part.values()
        elif isinstance(part, list):
            left += part
    if num_characters > _MAX_TEXT["regex"]:
        raise bad(name, f"has patterns of {num_characters} characters; at most {_MAX_TEXT['regex']} are compiled")
    return json.dumps(value)


class Grammars:
    """Compiles one grammar at a time, in another thread, and keeps the last ones: building one may take a second."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._turn = asyncio.Lock()

    async def compile(self, given: GrammarText) -> LLMatcher:
        """The grammar at its start, ready to be copied; what cannot be compiled is a 400."""
        async with self._turn:
            key = given.kind, given.text
            if key not in self._compiled:
                self._compiled[key] = await asyncio.to_thread(self._compile, given)
                if len(self._compiled) > _MAX_KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
            return self._compiled[key]

    def _compile(self, given: GrammarText) -> LLMatcher:
        try:
            from llguidance import LLMatcher, grammar_from
        except ImportError as error:
            raise unsupported(given.param, "needs the package llguidance: pip install 'headrace[grammar]'") from error
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer(given.param)
        try:
            matcher = LLMatcher(self._tokenizer, grammar_from(given.kind, given.text), log_level=0)
            reason = matcher.get_error()
        except ValueError as error:
            reason = str(error)
        if reason:
            raise bad(given.param, f"cannot be compiled: {reason.strip()[:_MAX_SHOWN]}")
        return matcher

    def _make_tokenizer(self, param: str) -> LLTokenizer:
        from llguidance import LLTokenizer
        from tokenizers import decoders

        served, backend = self._served, getattr(self._served.tokenizer, "backend_tokenizer", None)
        if not served.stop_ids or backend is None:
            raise unsupported(param, "needs a model with a stop token and a fast tokenizer, which this one has not")
        backend = copy.copy(backend)
        backend.no_padding()
        backend.no_truncation()
        if isinstance(backend.decoder, decoders.Fuse):  # tokens are their own text, which llguidance knows by another name
            backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        size = max(served.vocabulary, len(served.tokenizer))
        try:
            return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=list(served.stop_ids))
        except ValueError as error:
            raise unsupported(param, f"llguidance cannot read this model's tokenizer: {shown(error)}") from error
