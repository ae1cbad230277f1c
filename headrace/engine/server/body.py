"""A JSON body read field by field; whatever is left unread at the end is refused by name, never ignored."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from headrace.engine.server.errors import ApiError, bad

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class Body:
    """The fields of a request. null is the same as absent, as everywhere in OpenAI's interface."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in content.items() if value is not None}

    @classmethod
    def parse(cls, raw: bytes) -> Body:
        """The body of a POST; an empty one has no fields."""
        try:
            content = json.loads(raw) if raw.strip() else {}
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
            raise bad(name, "is not a parameter this server knows", code="unknown_parameter")


def check_token_ids(value: Any, name: str, *, vocabulary: int) -> tuple[int, ...]:  # noqa: ANN401
    """Token ids the model has an embedding for; any other would take the engine down."""
    if not isinstance(value, list) or not all(isinstance(token, int) and not isinstance(token, bool) for token in value):
        raise bad(name, f"must be a list of token ids, not {kind_of(value)}")
    for token in value:
        if not 0 <= token < vocabulary:
            raise bad(name, f"token id {token} is outside the vocabulary of {vocabulary}")
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


def kind_of(value: object) -> str:
    """A JSON value's kind, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")
