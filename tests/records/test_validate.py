"""The check of plain data passes nothing that cannot travel."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from strategies import names, plain, quick

from headrace.records import FinishReason
from headrace.records.frames import decode, encode
from headrace.records.validate import MAX_NESTING, check_messages, check_plain

odd = st.sampled_from(
    [
        *(2**64, -(2**63) - 1, b"x", (1, 2), {1: 2}, {"\ud800": 1}, "\ud800", np.int64(3), object(), 1j, {1}),
        *("é", np.float64(1), FinishReason.STOP, True, float("nan"), {"é": "ü"}, 2**64 - 1, -(2**63)),
    ]
)
values = st.recursive(
    plain | odd, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=6
)


def is_refused(value: object) -> bool:
    try:
        check_plain(value, where="row")
    except ValueError:
        return True
    return False


@given(values)
@settings(parent=quick, max_examples=300)
def test_whatever_passes_can_travel(value: object) -> None:
    if not is_refused(value):
        assert repr(decode(encode(value))) == repr(json.loads(json.dumps(value)))


@given(plain)
@quick
def test_plain_data_passes(value: object) -> None:
    assert not is_refused(value)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"a": inner}], ids=["list", "dict"])
def test_nesting_has_an_end(wrap) -> None:
    value: object = 1
    for depth in range(MAX_NESTING + 3):
        assert is_refused(value) == (depth > MAX_NESTING)
        value = wrap(value)


def test_a_message_needs_text_parts_or_calls_of_tools() -> None:
    calls = [{"role": "assistant", "tool_calls": [{"name": "add"}]}, {"role": "assistant", "content": None, "tool_calls": [{}]}]
    check_messages([{"role": "user", "content": "1 + 1?"}, *calls, {"role": "tool", "content": [{"text": "2"}]}])
    for empty in (
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "assistant", "content": None, "tool_calls": []},
    ):
        with pytest.raises(ValueError, match=rf"message 0 of the prompt \({empty['role']}\) has the content None"):
            check_messages([empty])
