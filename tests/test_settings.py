"""Strict settings on dataclasses of this file's own: conversion, errors that point at the line, overrides, TOML out."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, strategies as st
from strategies import quick

from headrace.settings import ConfigError, Origin, apply_overrides, build, describe, load_toml, parse_override, to_dict, to_toml


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One of several."""

    size: float
    """Across."""
    label: str = "plain"
    """What it is called."""

    def __post_init__(self) -> None:
        if self.size <= 0:
            raise ConfigError(f"size = {self.size}: must be above 0")


@dataclass(frozen=True, kw_only=True)
class Motor:
    """A section."""

    power: int = 3
    """In horses."""
    is_loud: bool = False
    """Whether it can be heard
    from afar."""
    fuel: Literal["petrol", "diesel", "steam"] = "steam"
    """What it burns."""
    spare: int | None = None
    """There may be none."""


@dataclass(frozen=True, kw_only=True)
class Mill:
    """Everything."""

    name: str = "mill"
    """Its name."""
    speed: float = 1.0
    """Turns a second."""
    motor: Motor = field(default_factory=Motor)
    wheels: tuple[Wheel, ...] = ()
    tags: tuple[str, ...] = ()
    """Words."""
    loads: dict[str, float] = field(default_factory=dict)
    """By name."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Anything."""


def parse(text: str) -> Mill:
    return build(Mill, load_toml(text, name="mill.toml"), origin=Origin(name="mill.toml", text=text))


def message(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return str(caught.value)


FULL = """\
name = "grist"   # with a comment
speed = 2

[motor]
power = 7
is_loud = true
fuel = "diesel"
spare = 1

[[wheels]]
size = 1.5

[[wheels]]
size = 2
label = "large # not a comment"

[loads]
oats = 3
"""


def test_everything_is_built_and_converted() -> None:
    mill = parse(FULL)
    assert mill == Mill(
        name="grist",
        speed=2.0,
        motor=Motor(power=7, is_loud=True, fuel="diesel", spare=1),
        wheels=(Wheel(size=1.5), Wheel(size=2.0, label="large # not a comment")),
        loads={"oats": 3.0},
    )
    assert type(mill.speed) is float and type(mill.wheels[1].size) is float and type(mill.loads["oats"]) is float
    assert parse("") == Mill()


# Errors


def test_an_unknown_key_names_the_nearest_and_the_line() -> None:
    assert message("name = 'a'\nsped = 2\n") == "mill.toml:2: sped is not a setting; did you mean speed?"
    assert message("[motor]\n\npwoer = 2\n") == "mill.toml:3: motor.pwoer is not a setting; did you mean motor.power?"
    assert message("motor.pwoer = 2\n") == "mill.toml:1: motor.pwoer is not a setting; did you mean motor.power?"


def test_an_unknown_key_of_a_list_of_tables_names_the_line_of_that_table() -> None:
    text = "[[wheels]]\nsize = 1\n\n[[wheels]]\nsize = 1\nlable = 'x'\n"
    assert message(text) == "mill.toml:6: wheels.1.lable is not a setting; did you mean wheels.1.label?"
    text = "[[wheels]]\nsize = 1\nlable = 'x'\n\n[[wheels]]\nsize = 1\n"
    assert message(text).startswith("mill.toml:3: wheels.0.lable")


def test_an_unknown_section_names_the_line_of_its_heading() -> None:
    assert message("speed = 1\n\n[mtor]\npower = 1\n") == "mill.toml:3: mtor is not a setting; did you mean motor?"


def test_an_unknown_key_like_no_other_gets_the_list() -> None:
    text = message("[motor]\nzzzzzz = 1\n")
    assert text == "mill.toml:2: motor.zzzzzz is not a setting; there are: motor.power, motor.is_loud, motor.fuel, motor.spare"


def test_a_key_that_is_not_in_the_text_names_the_file() -> None:
    with pytest.raises(ConfigError, match=r"^mill.toml: motor.pwoer is not"):
        build(Mill, {"motor": {"pwoer": 1}}, origin=Origin(name="mill.toml", text=FULL))
    with pytest.raises(ConfigError, match=r"^motor.pwoer is not"):
        build(Mill, {"motor": {"pwoer": 1}})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("name = 1", "name = 1: must be text"),
        ("name = ['a']", "name = ['a']: must be text"),
        ("speed = 'fast'", "speed = 'fast': must be a number"),
        ("speed = true", "speed = True: must be a number"),
        ("motor.power = 1.5", "motor.power = 1.5: must be a whole number"),
        ("motor.power = 2.0", "motor.power = 2.0: must be a whole number"),
        ("motor.power = true", "motor.power = True: must be a whole number"),
        ("motor.power = '3'", "motor.power = '3': must be a whole number"),
        ("motor.is_loud = 1", "motor.is_loud = 1: must be true or false"),
        ("motor.is_loud = 'true'", "motor.is_loud = 'true': must be true or false"),
        ("motor.spare = 'x'", "motor.spare = 'x': must be a whole number"),
        ("motor = 3", "motor = 3: must be a table"),
        ("wheels = 3", "wheels = 3: must be a list of a table"),
        ("tags = 1", "tags = 1: must be a list of text"),
        ("loads = 3", "loads = 3: must be a table of a number"),
    ],
)
def test_a_wrong_type_names_the_line_the_value_and_what_is_wanted(line: str, problem: str) -> None:
    assert message(f"\n{line}\n") == f"mill.toml:2: {problem}"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("tags = ['a', 1]", "tags.1 = 1: must be text"),
        ("wheels = [1]", "wheels.0 = 1: must be a table"),
        ("loads = {oats = 'many'}", "loads.oats = 'many': must be a number"),
        ("loads = {oats = true}", "loads.oats = True: must be a number"),
    ],
)
def test_a_wrong_type_inside_a_list_or_table_is_named(line: str, problem: str) -> None:
    assert message(line).endswith(problem)


def test_a_word_that_is_not_a_choice_names_the_choices_and_the_nearest() -> None:
    choices = "must be one of 'petrol', 'diesel', 'steam'"
    assert message("[motor]\nfuel = 'deisel'\n") == f"mill.toml:2: motor.fuel = 'deisel': {choices}; did you mean 'diesel'?"
    assert message("[motor]\nfuel = 'xyz'\n") == f"mill.toml:2: motor.fuel = 'xyz': {choices}"
    assert message("[motor]\nfuel = 3\n") == f"mill.toml:2: motor.fuel = 3: {choices}"
    assert message("[motor]\nfuel = ['steam']\n").startswith("mill.toml:2: motor.fuel = ['steam']: must be one of")


def test_a_missing_setting_is_named() -> None:
    assert message("[[wheels]]\nlabel = 'a'\n") == "mill.toml:1: wheels.0.size is missing and has no default"


def test_an_error_of_a_sections_own_check_names_the_line() -> None:
    assert message("[[wheels]]\nsize = 1\n[[wheels]]\nsize = -2\n") == "mill.toml:4: wheels.1.size = -2.0: must be above 0"


def test_toml_that_is_not_toml_names_the_file_and_line() -> None:
    text = message("speed = 1\nname = \n")
    assert text.startswith("mill.toml: not valid TOML") and "line 2" in text


# Overrides


def test_overrides_set_make_and_merge() -> None:
    data = {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "list": [{"x": 1}, {"x": 2}]}
    overrides = {"a": 5, "b.c": 6, "b.d": {"f": 7}, "new.deep": 8, "list.1.x": 9, "list.0": {"y": 1}}
    assert apply_overrides(data, overrides) == {
        "a": 5,
        "b": {"c": 6, "d": {"e": 3, "f": 7}},
        "list": [{"y": 1}, {"x": 9}],
        "new": {"deep": 8},
    }
    assert data == {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "list": [{"x": 1}, {"x": 2}]}


def test_a_table_given_as_an_override_may_hold_dotted_keys() -> None:
    assert apply_overrides({"b": {"c": {"d": 1}}}, {"b": {"c.e": 2}}) == {"b": {"c": {"d": 1, "e": 2}}}


def test_a_later_override_wins() -> None:
    assert apply_overrides({}, {"a.b": 1, "a": {"b": 2, "c": 3}, "a.c": 4}) == {"a": {"b": 2, "c": 4}}


def test_overrides_leave_the_callers_tables_alone() -> None:
    mine = {"batch": 8}
    assert apply_overrides({}, {"train": mine, "train.group_size": 4}) == {"train": {"batch": 8, "group_size": 4}}
    assert mine == {"batch": 8}


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("list.2.x", "list.2.x: '2' must be an index below 2"),
        ("list.-1.x", "list.-1.x: '-1' must be an index below 2"),
        ("list.first.x", "list.first.x: 'first' must be an index below 2"),
        ("list.5", "list.5: '5' must be an index below 2"),
        ("a.b", "a.b: a is a value, not a section"),
        ("b.c.d", "b.c.d: b.c is a value, not a section"),
    ],
)
def test_an_override_of_what_is_not_there_is_refused(path: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides({"a": 1, "b": {"c": 2}, "list": [{"x": 1}, {"x": 2}]}, {path: 3})
    assert str(caught.value) == problem


@pytest.mark.parametrize(
    ("argument", "path", "value"),
    [
        ("--steps=3", "steps", 3),
        ("--train.learning_rate=1e-5", "train.learning_rate", 1e-5),
        ("--train.learning-rate=2.5", "train.learning_rate", 2.5),
        ("--exact=true", "exact", True),
        ("--exact=True", "exact", True),
        ("--exact=False", "exact", False),
        ("--device=cpu", "device", "cpu"),
        ("--device='cpu'", "device", "cpu"),
        ("--train.loss=my.module:loss", "train.loss", "my.module:loss"),
        ("--reward.weights=[1, 2.5]", "reward.weights", [1, 2.5]),
        ("--train.constants={clip_low = 0.1}", "train.constants", {"clip_low": 0.1}),
        ("--tasks.0.source=/a=b.jsonl", "tasks.0.source", "/a=b.jsonl"),
        ("--name=", "name", ""),
    ],
)
def test_an_argument_is_toml_or_else_text(argument: str, path: str, value: object) -> None:
    parsed = parse_override(argument)
    assert parsed == (path, value)
    assert type(parsed[1]) is type(value)


@pytest.mark.parametrize("argument", ["--steps", "steps=3", "-steps=3", "--=3", "extra"])
def test_an_argument_that_is_no_override_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"--section\.key=value"):
        parse_override(argument)


# Out again


def test_settings_go_to_plain_data_and_back() -> None:
    mill = parse(FULL)
    data = to_dict(mill)
    assert data["wheels"] == [{"size": 1.5, "label": "plain"}, {"size": 2.0, "label": "large # not a comment"}]
    assert build(Mill, data) == mill
    assert build(Mill, tomllib.loads(to_toml(data))) == mill
    assert "spare" not in to_dict(Mill())["motor"]  # None is left out: TOML has no word for it


words = st.from_regex(r"[a-z][a-z_0-9]{0,5}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t"), max_size=8)
toml_scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts
toml_values = toml_scalars | st.lists(toml_scalars, max_size=3)
tables = st.recursive(
    st.dictionaries(words, toml_values, max_size=3),
    lambda inner: st.dictionaries(words, toml_values | inner | st.lists(inner, max_size=2), max_size=3),
    max_leaves=5,
)


@given(tables)
@quick
def test_toml_of_any_tables_parses_to_the_same(data: dict) -> None:
    assert typed(tomllib.loads(to_toml(data))) == typed(data)


def test_a_list_of_tables_and_values_is_a_value_and_odd_names_are_quoted() -> None:
    data = {"mixed": [{"a": 1}, 2], "odd name": [{"b": {"c.d": [{"e": True}]}}]}
    assert tomllib.loads(to_toml({"deep": data})) == {"deep": data}


def typed(value: object) -> object:
    """With the type beside each value: 1, 1.0 and True are equal but not the same setting."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    return [typed(item) for item in value] if isinstance(value, list) else (type(value), value)


def test_descriptions_come_from_the_text_under_each_field() -> None:
    rows = {key: (kind, default, text) for key, kind, default, text in describe(Mill)}
    assert rows["motor.is_loud"] == ("true or false", "false", "Whether it can be heard from afar.")
    assert rows["motor.fuel"] == ('"petrol" | "diesel" | "steam"', '"steam"', "What it burns.")
    assert rows["wheels.N.size"] == ("a number", "", "Across.")
    assert rows["extra"][0] == "a table of anything"
    assert rows["motor.spare"][0] == "a whole number or nothing"
    assert list(rows) == [
        *("name", "speed", "motor.power", "motor.is_loud", "motor.fuel", "motor.spare"),
        *("wheels.N.size", "wheels.N.label", "tags", "loads", "extra"),
    ]
