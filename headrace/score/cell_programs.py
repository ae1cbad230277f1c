"""The inside of the sandbox, part two: the code under test and its tests, in two cells that exchange plain values.

Run by path, as `python -I cell_programs.py code` or `… tests NUMBER`; it imports nothing of ours. Descriptor 3 connects the
two; through 4 `tests` tells the launcher its verdicts. The tests are the user's, and see the names that the code defines as
proxies: a call sends its arguments as JSON and gets back a value, an exception's name, or a handle of an object that stays
where it is. So the code can neither reach what judges it, nor return an object that equals everything.

    tests                                                              code
    add(1, [2]) ── {"do": "call", "object": 3, "values": [1, {"list": [2]}]} ──►
                ◄── {"value": 3, "arguments": [1, {"list": [2]}]} ──   the arguments, as the call left them
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import itertools
import json
import os
import runpy
import sys
from typing import IO, Any, NoReturn

_MOST_BYTES = 16 << 20
"""Of one message."""
_MOST_ITEMS = 1_000_000
"""Taken from an iterator that the code returns."""
_CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_MADE_OF = {name: kind for kind, name in _CONTAINERS.items()}


class Broken(Exception):
    """The tests cannot be run, whatever the code is."""


class Ended(Exception):
    """The code's process has ended, or sends what it should not."""


def encode(value: object, handle: Any) -> Any:  # noqa: ANN401
    """As JSON can hold it; what is no plain value is what `handle` makes of it. Subclasses become what they are made of."""
    if value is None or isinstance(value, bool | int | float | str):
        kinds = (kind for kind in (bool, int, float, str) if isinstance(value, kind))
        return value if value is None else next(kinds)(value)
    if isinstance(value, dict):
        return {"dict": [[encode(key, handle), encode(each, handle)] for key, each in value.items()]}
    for kind, name in _CONTAINERS.items():
        if isinstance(value, kind):
            return {name: [encode(each, handle) for each in value]}  # type: ignore[attr-defined]
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy
        return encode(value.item(), handle)
    return handle(value)


def decode(value: Any, handle: Any) -> Any:  # noqa: ANN401
    if not isinstance(value, dict):
        return value
    ((name, inner),) = value.items()
    if name in _MADE_OF:
        return _MADE_OF[name](decode(each, handle) for each in inner)
    if name == "dict":
        return {decode(key, handle): decode(each, handle) for key, each in inner}
    if name == "bytes":
        return bytes.fromhex(inner)
    return complex(*inner) if name == "complex" else handle(inner)


# The code under test


def run_code() -> None:
    """Import the code, and answer what the tests ask."""
    orders, answers = os.fdopen(3, "rb", closefd=False), os.fdopen(3, "wb", closefd=False)
    objects: list[Any] = []

    def handle(value: object) -> dict[str, int]:
        objects.append(value)
        return {"object": len(objects) - 1}

    spec = importlib.util.spec_from_file_location("solution", "/tmp/solution.py")
    assert spec is not None and spec.loader is not None
    sys.modules["solution"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = {name: encode(value, handle) for name, value in vars(module).items() if not name.startswith("__")}
    _send(answers, {"names": names})
    for line in orders:
        try:
            answer = _answered(json.loads(line), objects, handle)
        except BaseException as error:
            answer = {"raised": type(error).__name__, "text": str(error)[:1000]}
            if isinstance(error, MemoryError):
                raise
        _send(answers, answer)


def _answered(order: dict[str, Any], objects: list[Any], handle: Any) -> dict[str, Any]:  # noqa: ANN401
    subject = objects[order["object"]]
    if order["do"] == "get":
        return {"value": encode(getattr(subject, order["name"]), handle)}
    if order["do"] == "items":
        return {"value": {"list": [encode(each, handle) for each in itertools.islice(subject, _MOST_ITEMS)]}}
    given = [decode(each, objects.__getitem__) for each in order["values"]]
    named = {name: decode(each, objects.__getitem__) for name, each in order["named"].items()}
    value = encode(subject(*given, **named), handle)
    return {"value": value, "arguments": [encode(each, handle) for each in given]}


# The tests


def run_tests(count: int) -> None:
    """Run each test, and say how it went."""
    connection, verdicts = Connection(), os.fdopen(4, "wb", closefd=False)
    try:
        names = connection.names()
    except Ended as error:
        names, connection.error = {}, error
    for number in range(count):
        try:
            if connection.error is not None:
                raise connection.error
            runpy.run_path(f"/tmp/test_{number}.py", init_globals=dict(names))
            verdict: dict[str, Any] = {"passed": True}
        except Broken as error:
            verdict = {"broken": str(error)}
        except (SyntaxError, ImportError) as error:
            own = f"/tmp/test_{number}.py"  # and not what the test compiles: that may be the code's
            is_ours = error is not connection.raised and getattr(error, "filename", own) == own
            verdict = {"broken" if is_ours else "failed": f"{type(error).__name__}: {error}"}
        except BaseException as error:  # noqa: BLE001
            verdict = {"failed": f"{type(error).__name__}: {error}"[:1000]}
        _send(verdicts, verdict)


class Connection:
    """To the process that runs the code."""

    def __init__(self) -> None:
        self._orders, self._answers = os.fdopen(3, "wb", closefd=False), os.fdopen(3, "rb", closefd=False)
        self.error: Ended | None = None
        self.raised: BaseException | None = None
        """The last exception that the code raised."""

    def names(self) -> dict[str, Any]:
        """What the code defines, but for names by which tests judge: built-in ones stay as they are, and a module of the
        standard library that the code imports is the real one here."""
        names, found = self._read().get("names"), dict[str, Any]()
        for name, value in names.items() if isinstance(names, dict) else ():
            if name in sys.stdlib_module_names:
                found[name] = importlib.import_module(name)
            elif not name.startswith("__") and not hasattr(builtins, name):
                found[name] = decode(value, self.proxy)
        return found

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            _send(self._orders, order)
            answer = self._read()
            if "raised" in answer:
                self._raise(str(answer["raised"]), str(answer.get("text")))
            return {"value": decode(answer["value"], self.proxy), "arguments": answer.get("arguments", [])}
        except (OSError, KeyError, ValueError, TypeError) as error:
            if error is self.raised:
                raise
            self.error = Ended(f"the code's process sent {error!r}")
            raise self.error from None

    def _raise(self, name: str, text: str) -> NoReturn:
        """What the code raised, as a built-in exception. What ends a program, such as SystemExit, must not end this one."""
        kind = getattr(builtins, name, None)
        self.raised = RuntimeError(f"{name}: {text}")
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
            self.raised = kind(text)
        raise self.raised

    def proxy(self, number: int) -> Proxy:
        return Proxy(self, number)

    def _read(self) -> dict[str, Any]:
        line = self._answers.readline(_MOST_BYTES)
        try:
            answer = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            self.error = Ended("the code ended before its tests did, or returned too much")
            raise self.error
        return answer


class Proxy:
    """An object of the code's process."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection, self._number = connection, number

    def __call__(self, *values: object, **named: object) -> Any:  # noqa: ANN401
        order = {"do": "call", "object": self._number, "values": [encode(each, _sent) for each in values]}
        answer = self._connection.ask({**order, "named": {name: encode(each, _sent) for name, each in named.items()}})
        for given, after in zip(values, answer["arguments"], strict=False):
            _put_back(given, decode(after, self._connection.proxy))
        return answer["value"]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return self._connection.ask({"do": "get", "object": self._number, "name": name})["value"]

    def __iter__(self) -> Any:  # noqa: ANN401
        return iter(self._connection.ask({"do": "items", "object": self._number})["value"])

    def __len__(self) -> int:
        try:
            return int(self.__getattr__("__len__")())
        except AttributeError:  # `list` asks for a length too, and takes this for an answer
            raise TypeError("an object of the code has no len()") from None

    def __getitem__(self, key: object) -> Any:  # noqa: ANN401
        return self.__getattr__("__getitem__")(key)

    def __bool__(self) -> bool:
        return True


def _sent(value: object) -> dict[str, int]:
    if isinstance(value, Proxy):
        return {"object": value._number}
    raise Broken(f"a test passes a {type(value).__name__} to the code; only plain values can be passed")


def _put_back(given: object, after: object) -> None:
    """What the code did to an argument in place."""
    if isinstance(given, list) and isinstance(after, list):
        given[:] = after
    elif (isinstance(given, set) and isinstance(after, set)) or (isinstance(given, dict) and isinstance(after, dict)):
        given.clear()
        given.update(after)


def _send(file: IO[bytes], message: dict[str, Any]) -> None:
    file.write(json.dumps(message).encode() + b"\n")
    file.flush()


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    if sys.argv[1] == "code":
        run_code()
    else:
        run_tests(int(sys.argv[2]))
