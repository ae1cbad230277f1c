"""Strict settings: TOML or plain dicts into frozen dataclasses, errors that name the line, `--a.b=value` overrides.

It knows nothing of recipes (`headrace.config` does) and imports nothing heavy, so a wrong key is reported in well under a
second. The string under each field is its documentation, also in `--help`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import inspect
import json
import tomllib
import types
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

ELASTIC = {"resume": "elastic"}
"""Metadata of a setting that says how or where a run runs, not what it is: it may change when the run is resumed, except in
exact mode. A setting without metadata is part of what the run is."""
OPERATIONAL = {"resume": "operational"}
"""Of a setting that changes no bit of the result: it may change in exact mode too."""


class ConfigError(ValueError):
    """A setting is wrong; the message names the key, the value and the fix."""


@dataclass(frozen=True)
class Origin:
    """Where settings were read from, so that an error can point at the line."""

    name: str = ""
    text: str = ""
    overrides: frozenset[str] = frozenset()
    """Dotted keys given on the command line or in a call."""
    presets: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What set each dotted key that the user did not write, such as `algorithm = 'dapo'`."""
    advise: Callable[[str], str] = lambda _: ""
    """What to write instead of a name that is not a setting, or of `key = value` with a value that is none; "" if unknown."""

    def locate(self, key: str) -> str:
        """`file:line: ` of a dotted key; the file alone if the line is not found."""
        if any(key == given or given.startswith(f"{key}.") or key.startswith(f"{given}.") for given in self.overrides):
            return "override: "
        if key in self.presets:
            return f"{self.presets[key]}: "
        if not self.name:
            return ""
        section, sections = "", dict[str, int]()
        for number, raw in enumerate(self.text.splitlines(), start=1):
            line = raw.split("#")[0].strip()
            if line.startswith("[["):
                table = line.strip("[] ")
                sections[table] = sections.get(table, -1) + 1
                section = f"{table}.{sections[table]}."
            elif line.startswith("["):
                section = line.strip("[] ") + "."
            elif "=" in line and (section + line.split("=")[0].strip().strip('"')) == key:
                return f"{self.name}:{number}: "
            if section.rstrip(".") == key:
                return f"{self.name}:{number}: "
        return f"{self.name}: "


def load_toml(text: str, *, name: str) -> dict[str, Any]:
    """Parse TOML; a syntax error names the file."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not valid TOML: {error}") from None


def build(cls: type[T], data: Mapping[str, Any], *, origin: Origin = Origin(), prefix: str = "") -> T:
    """An instance of dataclass `cls` from a dict; unknown keys and wrong types are refused, all of them at once."""
    hints = typing.get_type_hints(cls)
    values, wrong = {}, []
    for key, value in data.items():
        path = prefix + key
        if key in hints:
            try:
                values[key] = _convert(hints[key], value, origin=origin, path=path)
            except ConfigError as error:
                wrong.append(str(error))
        else:
            advice = origin.advise(_first_leaf(path, value)) or origin.advise(key)
            advice = advice or nearest(key, [f.name for f in dataclasses.fields(cls)], prefix)
            wrong.append(f"{origin.locate(path)}{path} is not a setting; {advice}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    for f in dataclasses.fields(cls):
        if f.name not in values and _default(f) is dataclasses.MISSING:
            raise ConfigError(f"{origin.locate(prefix.rstrip('.'))}{prefix}{f.name} is missing and has no default")
    try:
        return cls(**values)
    except ConfigError as error:
        key = prefix + str(error).split(" ", maxsplit=1)[0]
        raise ConfigError(f"{origin.locate(key)}{prefix}{error}") from None


def _first_leaf(path: str, value: object) -> str:
    """The dotted key of the first setting in an unknown section, or of an unknown setting itself."""
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        path = f"{path}.{key}"
    return path


def apply_overrides(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested `data` with dotted keys set; a number in a path is an index into a list of tables."""
    result: dict[str, Any] = _copy(dict(data))
    for path, value in _copy(dict(overrides)).items():
        *parents, last = path.split(".")
        node: Any = result
        for depth, part in enumerate(parents):
            node = node[_index(part, node, path)] if isinstance(node, list) else node.setdefault(part, {})
            if not isinstance(node, dict | list):
                raise ConfigError(f"{path}: {'.'.join(parents[: depth + 1])} is a value, not a section")
        if isinstance(node, list):
            node[_index(last, node, path)] = value
        elif isinstance(value, dict) and isinstance(node.get(last), dict):
            node[last] = apply_overrides(node[last], value)
        else:
            node[last] = value
    return result


def _copy(value: Any) -> Any:  # noqa: ANN401
    """Sections and lists are copied; a user's own objects, such as a dataset, are not."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def parse_override(argument: str) -> tuple[str, Any]:
    """`--a.b=value` as (path, value); the value is TOML if it parses, else a string."""
    key, separator, text = argument.removeprefix("--").partition("=")
    if not argument.startswith("--") or not separator or not key:
        raise ConfigError(f"{argument!r}: write an override as --section.key=value")
    if text in ("True", "False"):
        text = text.lower()
    try:
        return key.replace("-", "_"), tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key.replace("-", "_"), text


def to_dict(settings: Any) -> dict[str, Any]:  # noqa: ANN401  (any settings dataclass)
    """Nested plain data that `build` accepts; None is left out."""
    pairs = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    return {name: _plain(value) for name, value in pairs.items() if value is not None}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return dict(value)
    return to_dict(value) if dataclasses.is_dataclass(value) else value


def identity(settings: Any, *, is_exact: bool) -> dict[str, Any]:  # noqa: ANN401  (any settings dataclass)
    """`to_dict` without the settings that may change when a run is resumed; a section's own `identity` may refine it."""
    left_out = (OPERATIONAL,) if is_exact else (OPERATIONAL, ELASTIC)
    result = to_dict(settings)
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        if f.metadata in left_out:
            result.pop(f.name, None)
        elif dataclasses.is_dataclass(value):
            result[f.name] = identity(value, is_exact=is_exact)
    return settings.identity(result) if hasattr(settings, "identity") else result


def flatten(data: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Nested tables and lists of tables as dotted keys; other lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, list) and _is_table(value):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, dict):
            flat |= flatten(value, prefix=f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def to_toml(data: Mapping[str, Any], *, prefix: str = "") -> str:
    """TOML text of nested plain data: values first, then tables, then lists of tables."""
    lines = [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in data.items() if not _is_table(value)]
    for key, value in data.items():
        if _is_table(value):
            name, is_list = prefix + _toml_key(key), isinstance(value, list)
            for item in value if is_list else [value]:
                lines += ["", f"[[{name}]]" if is_list else f"[{name}]", to_toml(item, prefix=f"{name}.").strip("\n")]
    return "\n".join(lines) + "\n"


def describe(cls: type[Any], *, prefix: str = "", may_change: bool = False) -> Iterator[tuple[str, str, str, str]]:
    """(dotted key, type, default, documentation) of every setting, in order. `may_change`: all of them may on resume."""
    hints, docs = typing.get_type_hints(cls), _field_docs(cls)
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint  # of a list of tables
        is_elastic = may_change or "resume" in f.metadata
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            below = f"{prefix}{f.name}." if hint is inner else f"{prefix}{f.name}.N."
            yield from describe(inner, prefix=below, may_change=is_elastic)
        else:
            default = _default(f)
            shown = "" if default is dataclasses.MISSING else _toml_value(default)
            yield prefix + f.name, _type_name(hint), shown, docs.get(f.name, "") + " May change on resume." * is_elastic


def _convert(hint: Any, value: Any, *, origin: Origin, path: str) -> Any:  # noqa: ANN401
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        choices = [a for a in arguments if a is not type(None)]
        if len(choices) == 1:
            return _convert(choices[0], value, origin=origin, path=path)
        for choice in choices:
            with contextlib.suppress(ConfigError):
                return _convert(choice, value, origin=origin, path=path)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if isinstance(value, dict):
            return build(hint, value, origin=origin, prefix=path + ".")
    elif kind is Literal:
        if value in arguments:
            return value
        guess = difflib.get_close_matches(str(value).lower(), [str(a) for a in arguments], n=1)
        asked = _first_leaf(path, value) if isinstance(value, dict) else f"{path} = {value}"
        advice = origin.advise(asked) or (f"did you mean {guess[0]!r}?" if guess else "")
        allowed = ", ".join(repr(a) for a in arguments)
        raise ConfigError(f"{origin.locate(path)}{path} = {value!r}: must be one of {allowed}{advice and f'; {advice}'}")
    elif kind is tuple and isinstance(value, str) and (arguments[0] is str or typing.get_origin(arguments[0]) is Literal):
        return (_convert(arguments[0], value, origin=origin, path=path),)  # one text for a list of one
    elif kind is tuple and isinstance(value, dict) and dataclasses.is_dataclass(arguments[0]):
        raise ConfigError(f"{origin.locate(path)}{path} is a list of tables: write [[{path}]], in Python {path}=[{{…}}]")
    elif kind is tuple and isinstance(value, list | tuple):
        return tuple(_convert(arguments[0], v, origin=origin, path=f"{path}.{i}") for i, v in enumerate(value))
    elif kind is dict and isinstance(value, dict):
        return {str(k): _convert(arguments[1], v, origin=origin, path=f"{path}.{k}") for k, v in value.items()}
    elif hint is Any:
        return value
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif hint in (str, int, bool) and type(value) is hint:
        return value
    raise ConfigError(f"{origin.locate(path)}{path} = {value!r}: must be {_type_name(hint)}")


def nearest(key: str, names: list[str], prefix: str) -> str:
    """What to write instead of an unknown name."""
    guess = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f"did you mean {prefix}{guess[0]}?" if guess else f"there are: {', '.join(prefix + name for name in names)}"


def _default(f: dataclasses.Field[Any]) -> Any:  # noqa: ANN401  (MISSING if it has none)
    factory = f.default_factory
    return f.default if factory is dataclasses.MISSING else factory()


def _type_name(hint: Any) -> str:  # noqa: ANN401
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if kind is Literal:
        return " | ".join(_toml_value(a) for a in arguments)
    if kind in (typing.Union, types.UnionType):
        names = [_type_name(a) for a in arguments if a is not type(None) and not (a is int and float in arguments)]
        return " | ".join(names) + " or nothing" * (type(None) in arguments)
    if kind is tuple:
        return f"a list of {_type_name(arguments[0])}"
    if kind is dict:
        return f"a table of {_type_name(arguments[1])}"
    return {str: "text", int: "a whole number", float: "a number", bool: "true or false", Any: "anything"}.get(hint, "a table")


def _field_docs(cls: type[Any]) -> dict[str, str]:
    docs = {} if cls.__base__ in (object, None) else _field_docs(cls.__base__)
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            docs[field.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return docs


def _index(part: str, items: list[Any], path: str) -> int:
    if not part.isdecimal() or int(part) >= len(items):
        raise ConfigError(f"{path}: {part!r} must be an index below {len(items)}")
    return int(part)


def _is_table(value: object) -> bool:
    """A dict, or a list of nothing but dicts; other lists are values."""
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value))


def _toml_key(key: str) -> str:
    is_bare = key.isascii() and bool(key) and all(letter.isalnum() or letter in "_-" for letter in key)
    return key if is_bare else _toml_value(key)


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON strings are TOML strings, except for DEL
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items()) + "}"
    return "none" if value is None else repr(value)


def check(holds: bool, name: str, value: object, wanted: str) -> None:
    """Refuse a value unless `holds`; `build` adds the section's name and the line of the file."""
    if not holds:
        raise ConfigError(f"{name} = {value!r}: must be {wanted}")


def check_least(least: int, settings: object, *names: str) -> None:
    """Refuse any of these settings that is below `least`."""
    for name in names:
        check(getattr(settings, name) >= least, name, getattr(settings, name), f"≥ {least}")
