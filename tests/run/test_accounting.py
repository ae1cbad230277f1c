"""The ledger: every rollout is in exactly one place, and a move that cannot happen is refused."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, strategies as st
from strategies import quick

from headrace.run.ledger import SETTLED, AccountingError, Ledger

TERMS = ("trained", "rejected", "failed", "filtered", "unused", "buffered", "in_flight")


def make(*, in_flight: str = "", buffered: str = "") -> Ledger:
    """A ledger with rollouts named by letters."""
    ledger = Ledger()
    ledger.submit(in_flight + buffered)
    ledger.buffer(buffered)
    return ledger


def test_the_way_of_a_trained_rollout() -> None:
    ledger = make(in_flight="abc")
    assert ledger.counts()["in_flight"] == 3
    ledger.buffer("ab")
    assert (ledger.counts()["in_flight"], ledger.counts()["buffered"]) == (1, 2)
    ledger.check(buffered=2)
    ledger.settle("ab", "trained")
    ledger.settle("c", "failed", "worker died")
    ledger.check(buffered=0)
    assert ledger.counts() == {
        **dict.fromkeys(TERMS, 0),
        **{"submitted": 3, "trained": 2, "failed": 1, "evaluation": 0},
    }
    assert ledger.reasons == {"failed: worker died": 1}


def test_the_equation_reads() -> None:
    ledger = make(in_flight="abc", buffered="de")
    ledger.settle("d", "trained")
    expected = "5 submitted = 1 trained + 0 rejected + 0 failed + 0 filtered + 0 unused + 1 buffered + 3 in flight"
    assert ledger.equation() == expected


def test_reasons_are_counted_apart() -> None:
    ledger = make(buffered="abcdef")
    ledger.settle("ab", "rejected", "lag")
    ledger.settle("c", "rejected", "lineage")
    ledger.settle("d", "filtered", "lag")
    ledger.settle("e", "trained")
    assert ledger.reasons == {"rejected: lag": 2, "rejected: lineage": 1, "filtered: lag": 1}


MOVES = {
    "submitted while in flight": (lambda ledger: ledger.submit("a"), "a was submitted twice"),
    "submitted while buffered": (lambda ledger: ledger.submit("b"), "b was submitted twice"),
    "buffered twice": (lambda ledger: ledger.buffer("b"), "b entered the buffer but was buffered"),
    "buffered unknown": (lambda ledger: ledger.buffer("x"), "x entered the buffer but was settled"),
    "buffered after it was settled": (lambda ledger: ledger.buffer("c"), "c entered the buffer but was settled"),
    "trained from in flight": (lambda ledger: ledger.settle("a", "trained"), "a was trained without leaving the buffer"),
    "settled twice": (lambda ledger: ledger.settle("c", "failed"), "c became failed but was already settled"),
    "settled unknown": (lambda ledger: ledger.settle("x", "rejected"), "x became rejected but was already settled"),
}


@pytest.mark.parametrize(("move", "problem"), MOVES.values(), ids=MOVES.keys())
def test_a_move_that_cannot_happen_is_refused(move, problem: str) -> None:
    ledger = make(in_flight="a", buffered="bc")
    ledger.settle("c", "trained")
    before = ledger.counts()
    with pytest.raises(AccountingError, match=problem):
        move(ledger)
    assert ledger.counts() == before


def test_a_state_that_is_none_is_refused() -> None:
    with pytest.raises(AssertionError):
        make(in_flight="a").settle("a", "forgotten")


def test_the_buffer_must_hold_what_the_books_say() -> None:
    ledger = make(in_flight="a", buffered="bc")
    ledger.check(buffered=2)
    for wrong in (0, 1, 3):
        with pytest.raises(AccountingError, match=f"the books do not close: 3 submitted = .*; the buffer holds {wrong}"):
            ledger.check(buffered=wrong)


def test_at_the_end_nothing_is_open() -> None:
    ledger = make(in_flight="ab", buffered="cd")
    ledger.settle("c", "trained")
    ledger.close()
    ledger.check(buffered=0)
    assert ledger.counts()["unused"] == 3
    assert ledger.counts()["in_flight"] == ledger.counts()["buffered"] == 0


def test_evaluation_is_counted_apart() -> None:
    ledger = make(buffered="a")
    ledger.evaluation += 5
    ledger.check(buffered=1)
    assert (ledger.counts()["submitted"], ledger.counts()["evaluation"]) == (1, 5)


def test_a_restored_ledger_goes_on() -> None:
    ledger = make(in_flight="abc", buffered="de")
    ledger.evaluation = 4
    ledger.settle("a", "failed", "worker died")
    ledger.settle("d", "trained")
    state = json.loads(json.dumps(ledger.state()))
    other = Ledger()
    other.restore(state, buffered="e", in_flight="bc")
    assert other.counts() == ledger.counts()
    assert other.reasons == ledger.reasons
    other.check(buffered=1)
    other.buffer("b")
    other.settle("be", "trained")
    other.settle("c", "failed", "worker died")
    other.check(buffered=0)
    assert other.reasons == {"failed: worker died": 2}
    assert ledger.counts()["trained"] == 1, "the first ledger is not changed by the second"


def test_a_rollout_lost_in_a_checkpoint_is_noticed() -> None:
    ledger = make(in_flight="abc", buffered="de")
    other = Ledger()
    other.restore(ledger.state(), buffered="de", in_flight="ab")
    with pytest.raises(AccountingError, match="the books do not close"):
        other.check(buffered=2)


@given(st.data())
@quick
def test_after_any_course_of_events_the_books_close(data: st.DataObject) -> None:
    """Against a plain dict from rollout to place."""
    ledger, places, last = Ledger(), {}, 0
    for _ in range(data.draw(st.integers(1, 25))):
        here = {place: [id for id, at in places.items() if at == place] for place in ("in_flight", "buffered")}
        move = data.draw(st.sampled_from(["submit"] + ["buffer"] * bool(here["in_flight"]) + ["settle"] * bool(last)))
        if move == "submit":
            ids = [str(last + offset) for offset in range(data.draw(st.integers(1, 3)))]
            last += len(ids)
            ledger.submit(ids)
            places |= dict.fromkeys(ids, "in_flight")
        elif move == "buffer":
            id = data.draw(st.sampled_from(here["in_flight"]))
            ledger.buffer([id])
            places[id] = "buffered"
        else:
            id, state = data.draw(st.sampled_from(list(places))), data.draw(st.sampled_from(SETTLED))
            can_happen = places[id] == "buffered" or (places[id] == "in_flight" and state != "trained")
            if can_happen:
                ledger.settle([id], state)
                places[id] = state
            else:
                with pytest.raises(AccountingError):
                    ledger.settle([id], state)
        found = Counter(places.values())
        ledger.check(buffered=found["buffered"])
        assert ledger.counts() == {"submitted": last, "evaluation": 0, **{term: found[term] for term in TERMS}}


def test_reasons_are_few_whatever_is_dropped() -> None:
    """The first of each kind is shown. A reward may raise something else for every task, and its first reasons are kept."""
    ledger = Ledger()
    ids = [f"g{number}/1" for number in range(500)]
    ledger.submit(ids)
    for number, id in enumerate(ids[:100]):
        ledger.settle([id], "filtered", f"rollout {id!r} has {600 + number} tokens; the context is 512")
    ledger.settle(["g100/1"], "filtered", "rollout 'g100/1/2' has 7,000 tokens; the context is 512")
    assert ledger.reasons == {"filtered: rollout … has 600 tokens; the context is 512": 101}
    for id in ids[101:]:
        word = "".join(chr(97 + int(digit)) for digit in id[1:-2])
        ledger.settle([id], "failed", f"reward 'judge' raised ValueError: {word}\nand more of it")
    assert len(ledger.reasons) == 21 and sum(ledger.reasons.values()) == 500
    assert ledger.reasons["failed: other reasons, in logs/launcher.log"] == 380
    restored = Ledger()
    restored.restore(json.loads(json.dumps(ledger.state())), buffered=(), in_flight=())
    assert restored.reasons == ledger.reasons
    many = {**ledger.state(), "reasons": {f"failed: rollout {id}": 1 for id in ids}}
    restored.restore(many, buffered=(), in_flight=())
    assert len(restored.reasons) == 21 and sum(restored.reasons.values()) == 500


def test_a_reason_keeps_the_numbers_of_its_advice() -> None:
    advice = "has 20 tokens and may come to have 620; the whole KV cache holds 32: raise engine.kv_blocks to 40" + " or so" * 9
    ledger = make(in_flight="ab")
    ledger.settle("a", "filtered", f"rollout 'a' {advice}")
    ledger.settle("b", "filtered", f"rollout 'b' {advice.replace('20', '21')}")
    assert ledger.reasons == {f"filtered: rollout … {advice}": 2}
