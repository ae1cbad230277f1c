"""The quick look at plain data passes nothing that the whole rule refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from strategies import names, plain, quick

from headrace.records import FinishReason
from headrace.records.validate import MAX_NESTING, _explain_plain, _is_plain, check_messages, check_plain

odd = st.sampled_from(
    [
        *(2**64, -(2**63) - 1, b"x", (1, 2), {1: 2}, {"\ud800": 1}, "\ud800", np.int64(3), object(), 1j, {1}),
        *("é", np.float64(1), FinishReason.STOP, True, float("nan"), {"é": "ü"}, 2**64 - 1, -(2**63)),
    ]
)
values = st.recursive(
    plain | odd, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=6
)


def is_refused(check) -> bool:
    try:
        check()
    except ValueError:
        return True
    return False


@given(values)
@settings(parent=quick, max_examples=300)
def test_both_ways_refuse_the_same(value: object) -> None:
    by_rule = is_refused(lambda: _explain_plain(value, "row", 0))
    assert is_refused(lambda: check_plain(value, where="row")) == by_rule
    assert not (_is_plain(value, 0) and by_rule)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"a": inner}], ids=["list", "dict"])
def test_nesting_has_the_same_end(wrap) -> None:
    value: object = 1
    for depth in range(MAX_NESTING + 3):
        by_rule = is_refused(lambda value=value: _explain_plain(value, "row", 0))
        assert is_refused(lambda value=value: check_plain(value, where="row")) == by_rule == (depth > MAX_NESTING)
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
