"""Helpers of the records: checks of plain data, read-only arrays, copies without checks, bitwise equality."""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import repeat
from operator import attrgetter, call
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Record = TypeVar("Record")
Array: TypeAlias = npt.NDArray[Any]
Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
"""Data that survives JSON and msgpack unchanged, such as task rows and settings."""
MAX_NESTING = 32
"""Levels of plain data; deeper is rejected."""


def check_plain(value: object, *, where: str) -> None:
    """Raise unless `value` is plain data that can be encoded; the error names the offending place."""
    problem = _problem_of(value, 0)
    if problem:
        raise ValueError(f"{where}{problem}")


def _problem_of(value: Any, depth: int) -> str:  # noqa: ANN401
    """The path to the first place that is not plain, and what is wrong; "" if all is plain."""
    if depth > MAX_NESTING:
        return f" is nested deeper than {MAX_NESTING}"
    if isinstance(value, str):
        return _problem_of_text(value)
    if isinstance(value, int):
        return "" if -(2**63) <= value < 2**64 else f" = {value} does not fit 64 bits"
    if value is None or isinstance(value, float):
        return ""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                return f": key {key!r} is not a string"
            problem = _problem_of_text(key)
            if problem:
                return problem
            problem = _problem_of(item, depth + 1)
            if problem:
                return f"[{key!r}]{problem}"
        return ""
    if isinstance(value, list):
        for index, item in enumerate(value):
            problem = _problem_of(item, depth + 1)
            if problem:
                return f"[{index}]{problem}"
        return ""
    return f" is a {type(value).__name__}; use strings, numbers, booleans, lists and dicts"


def _problem_of_text(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return " holds half of a character (a lone surrogate); it cannot be written as UTF-8"
    return ""


def check_messages(messages: Sequence[dict[str, Plain]]) -> None:
    """Raise unless each message holds text, parts or tool calls: a chat template would print None as the word "None"."""
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            role = message.get("role")
            raise ValueError(f"message {index} of the prompt ({role}) has the content {content!r}; give text, or '' for none")


def check_kind(value: object, kinds: type | tuple[type, ...], name: str) -> None:
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is int):
        raise ValueError(f"{name} = {value!r} is a {type(value).__name__}")


def frozen(array: object, dtype: type | None, name: str) -> Array:
    """A read-only array of this dtype that nobody else can write to. Copies if needed; rejects lossy conversions."""
    result = np.asarray(array)
    if result.dtype.kind not in "biuf":
        raise ValueError(f"{name} must be an array of numbers, not of {result.dtype}")
    wanted = result.dtype.newbyteorder("=") if dtype is None else np.dtype(dtype)
    if result.dtype != wanted:
        _check_fits(result, wanted, name)
        result = result.astype(wanted)
    elif _is_writable_somewhere(result):
        result = result.copy()
    result.flags.writeable = False
    return result


def _check_fits(array: Array, wanted: np.dtype[Any], name: str) -> None:
    if array.size and not np.can_cast(array.dtype, wanted, casting="same_kind"):
        raise ValueError(f"{name} must be {wanted.name}, not {array.dtype}")
    if array.size and wanted.kind in "iu" and array.dtype.kind in "iu":
        limits = np.iinfo(wanted)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise ValueError(f"{name} holds a number that does not fit {wanted.name}")


def _is_writable_somewhere(array: Array) -> bool:
    """Whether the memory can be changed through this array or one it is a view of."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return True
        owner = owner.base
    return owner is not None and not memoryview(owner).readonly


def unchecked(record: type[Record], fields: dict[str, Any]) -> Record:
    """A frozen record made without checks, for callers that have checked already. `fields` must be complete."""
    made, set_field = object.__new__(record), object.__setattr__
    for name, value in fields.items():
        set_field(made, name, value)
    return made


def unchecked_copy(record: Record, changes: dict[str, Any]) -> Record:
    """A copy of a frozen record with some fields changed, without checks."""
    kind: type[Any] = type(record)
    values_of, setters = _slots(kind)  # type: ignore[arg-type]  # classes are hashable
    made: Record = object.__new__(kind)
    any(map(call, setters, repeat(made), values_of(record)))  # a fast loop: setters return None, so `any` runs them all
    for name, value in changes.items():
        object.__setattr__(made, name, value)
    return made


@cache
def _slots(record: type) -> tuple[Callable[[object], tuple[Any, ...]], tuple[Callable[[object, Any], None], ...]]:
    names = [f.name for f in dataclasses.fields(record)]
    return attrgetter(*names), tuple(record.__dict__[name].__set__ for name in names)


def unchecked_many(record: type[Record], columns: dict[str, Sequence[Any]], *, num: int) -> list[Record]:
    """`num` records made without checks, from one column of values per field."""
    made = [object.__new__(record) for _ in range(num)]
    for name, column in columns.items():
        assert len(column) == num
        any(map(record.__dict__[name].__set__, made, column))
    return made


def equal_records(left: object, right: object) -> bool:
    if type(left) is not type(right):
        return False
    names = [f.name for f in dataclasses.fields(left)]  # type: ignore[arg-type]  # only our own dataclasses come here
    return all(_equal_values(getattr(left, name), getattr(right, name)) for name in names)


def _equal_values(left: object, right: object) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return False
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_equal_values, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal_values(left[key], right[key]) for key in left)
    return left == right
