"""What records share: checks of plain data, read-only arrays that can grow, copies without checks, bitwise equality."""

from __future__ import annotations

import dataclasses
import threading
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Record = TypeVar("Record")
Array: TypeAlias = npt.NDArray[Any]
Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
"""Data that survives JSON and msgpack unchanged, such as task rows and settings."""
MAX_NESTING = 32
"""Levels of plain data; deeper is rejected."""


def check_plain(value: object, *, where: str, depth: int = 0) -> None:
    """Raise unless `value` is plain data that can be encoded; the error names the offending place."""
    if depth > MAX_NESTING:
        raise ValueError(f"{where} is nested deeper than {MAX_NESTING}")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{where} holds half of a character (a lone surrogate): it is not UTF-8") from None
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where}: key {key!r} is not a string")
            check_plain(key, where=where)
            check_plain(item, where=f"{where}[{key!r}]", depth=depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_plain(item, where=f"{where}[{index}]", depth=depth + 1)
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"{where} = {value} does not fit 64 bits")
    elif value is not None and not isinstance(value, float):
        raise ValueError(f"{where} is a {type(value).__name__}; use strings, numbers, booleans, lists and dicts")


def check_messages(messages: Sequence[dict[str, Plain]]) -> None:
    """Raise unless each message holds text, parts or tool calls: a chat template would print None as the word "None"."""
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            role = message.get("role")
            raise ValueError(f"message {index} of the prompt ({role}) has the content {content!r}; give text, or '' for none")


NOT_VARIABLES = (
    *("chat_template", "conversation", "messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "bos_token", "eos_token"),
)
"""What we or transformers give every chat template, and arguments of transformers' `apply_chat_template`."""


def is_template_variable(name: str) -> bool:
    """Whether a user may set a variable of a chat template by this name."""
    return name.isidentifier() and name not in NOT_VARIABLES


def check_kind(value: object, kinds: type | tuple[type, ...], name: str) -> None:
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is int):
        raise ValueError(f"{name} = {value!r} is a {type(value).__name__}")


def frozen(array: object, dtype: npt.DTypeLike | None, name: str) -> Array:
    """A read-only array of this dtype that nobody else can write to. Copies if needed; rejects lossy conversions."""
    result = np.asarray(array)
    if result.dtype.kind not in "biuf":
        raise ValueError(f"{name} must be an array of numbers, not of {result.dtype}")
    wanted = result.dtype.newbyteorder("=") if dtype is None else np.dtype(dtype)
    if result.dtype != wanted:
        if result.size and not np.can_cast(result.dtype, wanted, casting="same_kind"):
            raise ValueError(f"{name} must be {wanted.name}, not {result.dtype}")
        converted = result.astype(wanted)
        if wanted.kind in "iu" and not np.array_equal(converted, result):
            raise ValueError(f"{name} holds a number that does not fit {wanted.name}")
        result = converted
    elif _is_writable_somewhere(result):
        result = result.copy()
    result.flags.writeable = False
    return result


def _is_writable_somewhere(array: Array) -> bool:
    """Whether the memory can be changed through this array or one it is a view of."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return True
        owner = owner.base
    return owner is not None and not memoryview(owner).readonly


class _Spare(np.ndarray[Any, Any]):
    """Memory with room behind its first `num_used` rows."""

    __slots__ = ("num_used",)
    num_used: int


_claim = threading.Lock()  # an engine's thread and a checkpoint may grow the same array


def grown(old: Array, new: Array) -> Array:
    """`old` followed by `new`, read-only and with spare memory behind it: growing the result again only writes what is new. The
    rows of `old` are copied when there is no room left, or when it has been grown before, since then others read what lies
    behind it. At most a fifth of the memory is spare, and a row is copied about four times however often the array grows."""
    length, end = len(old), len(old) + len(new)
    memory: Any = old.base
    with _claim:
        has_room = type(memory) is _Spare and memory.num_used == length and end <= len(memory)
        if has_room:
            memory.num_used = end
    if not has_room:
        memory = _Spare((end + end // 4, *old.shape[1:]), old.dtype)
        memory[:length], memory.num_used = old, end
    memory[length:end] = new
    result: Array = np.ndarray((end, *old.shape[1:]), old.dtype, buffer=memory)
    result.flags.writeable = False
    return result


def unchecked_copy(record: Record, changes: dict[str, Any]) -> Record:
    """A copy of a frozen record with some fields changed, for callers that have checked the changes already."""
    kind = type(record)
    _, values_of, make = _fields(kind)  # type: ignore[arg-type]  # classes are hashable
    made = make(*values_of(record))
    for name, value in changes.items():
        setattr(made, name, value)
    made.__class__ = kind
    return made  # type: ignore[no-any-return]


def unchecked_many(record: type[Record], columns: Mapping[str, Sequence[Any]], *, num: int) -> list[Record]:
    """`num` records made without checks, from one column of values per field."""
    names, _, make = _fields(record)  # type: ignore[arg-type]  # classes are hashable
    assert columns.keys() == set(names) and all(len(column) == num for column in columns.values())
    made: list[Any] = list(map(make, *map(columns.__getitem__, names)))
    for each in made:
        each.__class__ = record
    return made


@cache
def _fields(record: type[Any]) -> tuple[list[str], Callable[[object], tuple[Any, ...]], Callable[..., Any]]:
    """The names of the fields, what reads them all, and what makes an object of them that is not frozen. To give that the
    record's class when it is whole takes a third of the time of setting the fields of a frozen one."""
    names = [each.name for each in dataclasses.fields(record)]
    return names, attrgetter(*names), dataclasses.make_dataclass(record.__name__, names, eq=False, slots=True)


def equal_records(left: object, right: object) -> bool:
    if type(left) is not type(right):
        return False
    names = [f.name for f in dataclasses.fields(left)]  # type: ignore[arg-type]  # only our own dataclasses come here
    return all(_comparable(getattr(left, name)) == _comparable(getattr(right, name)) for name in names)


def _comparable(value: object) -> object:
    """Arrays by dtype, shape and bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items()}
    return value
