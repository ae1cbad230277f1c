"""A JSON body, read field by field. Fields that are left at the end are refused by name, never ignored."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

N = TypeVar("N", int, float)
_MAX_DEPTH = 100  # of nested lists and objects: deeper ones could overflow the stack of code that walks them
_MAX_SHOWN = 100  # characters of a client's own value that an error repeats
_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a whole number", float: "a number"}


class ApiError(Exception):
    """Ends a request with a status and an OpenAI error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The error object OpenAI's clients read."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def bad(param: str, message: str, *, code: str | None = None) -> ApiError:
    """A 400 that names the parameter."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def unsupported(param: str, message: str = "is not supported by this server") -> ApiError:
    return bad(param, message, code="unsupported_parameter")


class Body:
    """The fields of a request. As everywhere in OpenAI's interface, null means absent."""

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

    def take(self, name: str, kind: type = object, default: Any = None, what: str = "") -> Any:  # noqa: ANN401  (any JSON value)
        """A field's value, which must be of this type; the default if it is absent."""
        value = self._left.pop(name, None)
        return default if value is None else check(value, kind, name, what)

    def number(self, name: str, default: N, *, low: int, high: int) -> N:
        """A field's value, which must be a number of the default's type."""
        kind = type(default)
        value = self.take(name, kind, default)
        if not low <= value <= high:
            raise bad(name, f"must be between {low} and {high}")
        return kind(value)

    def has(self, name: str) -> bool:
        return name in self._left

    def rest(self) -> dict[str, Any]:
        """All fields that are left, where any name will do."""
        taken, self._left = self._left, {}
        return taken

    def end(self, neutral: Mapping[str, Collection[Any]] | None = None, *, within: str = "") -> None:
        """Refuse the fields that are left, except `neutral` ones with a value that requests nothing; `...` stands for any.
        `within` is the parameter whose fields these are."""
        for field, value in self._left.items():
            name, values = f"{within}.{field}" if within else field, (neutral or {}).get(field)
            if values is None:
                raise bad(shown(name), "is not a parameter this server knows", code="unknown_parameter")
            is_neutral = any(value is each or (value == each and not isinstance(value, bool)) for each in values)
            if not is_neutral and ... not in values:
                raise unsupported(name)


def read_json(raw: bytes, name: str) -> Any:  # noqa: ANN401
    """The JSON of the parameter `name`, or of the body, whose name is empty. Raises ValueError if it is not JSON, and a 400
    that names the place of NaN, Infinity or 1e999, which Python would accept, and of values nested too deep."""
    has_odd_numbers = False

    def read_number(text: str) -> float:
        nonlocal has_odd_numbers
        value = float(text)
        has_odd_numbers |= not math.isfinite(value)
        return value

    content = json.loads(raw, parse_float=read_number, parse_constant=read_number)
    if not has_odd_numbers and raw.count(b"[") + raw.count(b"{") <= _MAX_DEPTH:
        return content  # nothing to look for: bodies may be large
    looked_at = (list, dict, float)
    left: list[tuple[Any, str, int]] = [(content, name, 1)] if isinstance(content, dict) else []
    while left:
        value, place, depth = left.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise bad(shown(place), f"{value} is not a number; JSON has only finite ones")
        if isinstance(value, list | dict) and depth > _MAX_DEPTH:
            raise bad(shown(place), f"is nested more than {_MAX_DEPTH} deep")
        if isinstance(value, list):
            left += [
                (entry, f"{place}[{index}]", depth + 1) for index, entry in enumerate(value) if isinstance(entry, looked_at)
            ]
        elif isinstance(value, dict):
            left += [
                (entry, f"{place}.{key}" if place else key, depth + 1)
                for key, entry in value.items()
                if isinstance(entry, looked_at)
            ]
    return content


def check(value: Any, kind: type, name: str, what: str = "") -> Any:  # noqa: ANN401
    """The value, if it is of this type; the error says that it must be `what`. Text must be encodable: JSON allows half of a
    surrogate pair, UTF-8 does not."""
    is_kind = isinstance(value, int | float if kind is float else kind)
    if not is_kind or (isinstance(value, bool) and kind in (int, float)):
        raise bad(name, f"must be {what or _KINDS[kind]}, not {kind_of(value)}")
    if kind is float and abs(value) > sys.float_info.max:
        raise bad(name, "is too large")
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise bad(name, "holds half of a surrogate pair") from error
    return value


def check_token_ids(value: Any, name: str, *, vocabulary: int) -> tuple[int, ...]:  # noqa: ANN401
    """Token ids the model has an embedding for; any other would crash the engine."""
    for token in check(value, list, name, "a list of token ids"):
        if not isinstance(token, int) or isinstance(token, bool):
            raise bad(name, f"must be a list of token ids, which are whole numbers; it holds {kind_of(token)}")
        if not 0 <= token < vocabulary:
            raise bad(name, f"token id {shown(token)} is outside the vocabulary of {vocabulary}")
    return tuple(value)


def shown(value: object) -> str:
    """A client's own value as an error repeats it, shortened if long."""
    text = str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def kind_of(value: object) -> str:
    """A JSON value's type, in words."""
    return "a number" if type(value) is int else _KINDS.get(type(value), "null")
