"""A JSON body read field by field; whatever is left unread at the end is refused by name, never ignored."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from headrace.engine.server.errors import ApiError, bad

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


_MAX_DEPTH = 100
"""Of lists and objects inside each other: what is nested much deeper overflows the stack of whoever walks it."""
_MAX_SHOWN = 100
"""Characters of a client's own value that an error repeats."""


class Body:
    """The fields of a request. null is the same as absent, as everywhere in OpenAI's interface."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in content.items() if value is not None}

    @classmethod
    def parse(cls, raw: bytes) -> Body:
        """The body of a POST; an empty one has no fields."""
        try:
            content = read_json(raw, "") if raw.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
        if not isinstance(content, dict):
            raise ApiError(400, f"the body must be a JSON object, not {kind_of(content)}", code="invalid_json")
        return cls(content)

    def take(self, name: str) -> Any:  # noqa: ANN401  (any JSON value; the caller checks)
        return self._left.pop(name, None)

    def whole(self, name: str, default: int, *, low: int, high: int) -> int:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise bad(name, f"must be a whole number, not {kind_of(value)}")
        if not low <= value <= high:
            raise bad(name, f"must be between {low} and {high}")
        return value

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise bad(name, f"must be a number, not {kind_of(value)}")
        if not (low <= value <= high and math.isfinite(value)):
            raise bad(name, f"must be between {low:g} and {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise bad(name, f"must be true or false, not {kind_of(value)}")
        return value

    def one_of(self, name: str, default: str, choices: Collection[str]) -> str:
        value = self.take(name)
        if value is None:
            return default
        if value not in choices:
            raise bad(name, f"must be one of {', '.join(choices)}")
        return str(value)

    def token_ids(self, name: str, *, vocabulary: int) -> tuple[int, ...]:
        value = self.take(name)
        return () if value is None else check_token_ids(value, name, vocabulary=vocabulary)

    def end(self, *, harmless: Collection[str] = (), neutral: Mapping[str, Collection[Any]] | None = None) -> None:
        """Refuse what is left, but for harmless names and for values that ask for nothing."""
        for name, value in self._left.items():
            if name in harmless:
                continue
            if neutral is not None and name in neutral:
                if any(value is nothing or (value == nothing and not isinstance(value, bool)) for nothing in neutral[name]):
                    continue
                raise bad(name, "is not supported by this server", code="unsupported_parameter")
            raise bad(shown(name), "is not a parameter this server knows", code="unknown_parameter")


def read_json(raw: bytes, name: str) -> Any:  # noqa: ANN401
    """An object: that of the parameter `name`, or the body, whose name is empty. Raises ValueError where it is not JSON.

    What else it may be is for the caller to refuse. Python reads NaN, Infinity and 1e999, which are no numbers of JSON's:
    they are refused here, with the place they are at.
    """
    not_finite: list[float] = []

    def read_number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            not_finite.append(value)
        return value

    content = json.loads(raw, parse_float=read_number, parse_constant=read_number)
    if isinstance(content, dict) and (not_finite or raw.count(b"[") + raw.count(b"{") > _MAX_DEPTH):
        _check_values(content, name)
    return content


def _check_values(content: Any, name: str) -> None:  # noqa: ANN401
    """Refuse what is nested too deep and what is not finite, by its place, such as `tools[0].function`."""
    left = [(content, name, 1)]
    while left:
        value, place, depth = left.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise bad(shown(place), f"{value} is not a number; JSON has only finite ones")
        if not isinstance(value, list | dict):
            continue
        if depth > _MAX_DEPTH:
            raise bad(shown(place), f"is nested more than {_MAX_DEPTH} deep")
        if isinstance(value, list):
            left += [(entry, f"{place}[{index}]", depth + 1) for index, entry in enumerate(value)]
        else:
            left += [(entry, f"{place}.{key}" if place else key, depth + 1) for key, entry in value.items()]


def check_token_ids(value: Any, name: str, *, vocabulary: int) -> tuple[int, ...]:  # noqa: ANN401
    """Token ids the model has an embedding for; any other would take the engine down."""
    if not isinstance(value, list):
        raise bad(name, f"must be a list of token ids, not {kind_of(value)}")
    for token in value:
        if not isinstance(token, int) or isinstance(token, bool):
            raise bad(name, f"must be a list of token ids, which are whole numbers; it holds {kind_of(token)}")
        if not 0 <= token < vocabulary:
            raise bad(name, f"token id {shown(token)} is outside the vocabulary of {vocabulary}")
    return tuple(value)


def check_text(value: Any, name: str) -> str:  # noqa: ANN401
    """Text that can be encoded: JSON allows half of a surrogate pair, UTF-8 does not."""
    if not isinstance(value, str):
        raise bad(name, f"must be text, not {kind_of(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise bad(name, "holds half of a surrogate pair") from error
    return value


def shown(value: object) -> str:
    """A client's own value as an error repeats it: in part, where it is long."""
    text = str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def kind_of(value: object) -> str:
    """A JSON value's kind, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")
