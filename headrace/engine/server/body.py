"""A JSON body, read field by field. Fields that are left at the end are refused by name, never ignored."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_MAX_DEPTH = 100  # of nested lists and objects: deeper ones could overflow the stack of code that walks them
_MAX_SHOWN = 100  # characters of a client's own value that an error repeats


class ApiError(Exception):
    """Ends a request with a status and an OpenAI error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The error object OpenAI's clients read."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


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

    def take(self, name: str) -> Any:  # noqa: ANN401  (any JSON value; the caller checks)
        return self._left.pop(name, None)

    def whole(self, name: str, default: int, *, low: int, high: int) -> int:
        value: int = self._typed(name, default, int, "a whole number")
        if not low <= value <= high:
            raise bad(name, f"must be between {low} and {high}")
        return value

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        value: float = self._typed(name, default, int | float, "a number")
        if not (low <= value <= high and math.isfinite(value)):
            raise bad(name, f"must be between {low:g} and {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._typed(name, default, bool, "true or false"))

    def one_of(self, name: str, default: str, choices: Collection[str]) -> str:
        value = self.take(name)
        if value is not None and value not in choices:
            raise bad(name, f"must be one of {', '.join(choices)}")
        return default if value is None else str(value)

    def token_ids(self, name: str, *, vocabulary: int) -> tuple[int, ...]:
        value = self.take(name)
        return () if value is None else check_token_ids(value, name, vocabulary=vocabulary)

    def end(self, *, harmless: Collection[str] = (), neutral: Mapping[str, Collection[Any]] | None = None) -> None:
        """Refuse the fields that are left, except `harmless` ones, and `neutral` ones with a value that requests nothing."""
        for name, value in self._left.items():
            if name in harmless:
                continue
            if neutral is None or name not in neutral:
                raise bad(shown(name), "is not a parameter this server knows", code="unknown_parameter")
            if not any(value is nothing or (value == nothing and not isinstance(value, bool)) for nothing in neutral[name]):
                raise unsupported(name)

    def _typed(self, name: str, default: Any, kind: Any, what: str) -> Any:  # noqa: ANN401
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise bad(name, f"must be {what}, not {kind_of(value)}")
        return value


def read_json(raw: bytes, name: str) -> Any:  # noqa: ANN401
    """The JSON of the parameter `name`, or of the body, whose name is empty. Raises ValueError if it is not JSON, and a 400
    that names the place of NaN, Infinity or 1e999, which Python would accept."""
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
    """Refuse values nested too deep or not finite, naming their place, such as `tools[0].function`."""
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
    """Token ids the model has an embedding for; any other would crash the engine."""
    for token in check_list(value, name, "token ids"):
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


def check_object(value: Any, name: str, what: str = "an object") -> dict[str, Any]:  # noqa: ANN401
    if not isinstance(value, dict):
        raise bad(name, f"must be {what}, not {kind_of(value)}")
    return value


def check_list(value: Any, name: str, of: str) -> list[Any]:  # noqa: ANN401
    if not isinstance(value, list):
        raise bad(name, f"must be a list of {of}, not {kind_of(value)}")
    return value


def shown(value: object) -> str:
    """A client's own value as an error repeats it, shortened if long."""
    text = str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def kind_of(value: object) -> str:
    """A JSON value's type, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")
