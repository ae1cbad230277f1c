"""The ledger: what was submitted is settled, buffered or in flight, and books that do not close are noticed."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, strategies as st
from strategies import quick

from headrace.run.ledger import SETTLED, AccountingError, Ledger

TERMS = ("trained", "rejected", "failed", "filtered", "unused", "buffered", "in_flight")


def make(*, submitted: int, buffered: int = 0) -> tuple[Ledger, Counter[str]]:
    """A ledger, and what is open beside it."""
    still_open = Counter(buffered=buffered, in_flight=submitted - buffered)
    ledger = Ledger(lambda: (still_open["buffered"], still_open["in_flight"]))
    ledger.submitted = submitted
    return ledger, still_open


def test_the_way_of_a_trained_rollout() -> None:
    ledger, still_open = make(submitted=3)
    assert ledger.counts()["in_flight"] == 3
    still_open.update(in_flight=-2, buffered=2)
    assert (ledger.counts()["in_flight"], ledger.counts()["buffered"]) == (1, 2)
    ledger.check()
    still_open.clear()
    ledger.settle("trained", 2)
    ledger.settle("failed", reason="worker died")
    ledger.check()
    assert ledger.counts() == {
        **dict.fromkeys(TERMS, 0),
        **{"submitted": 3, "trained": 2, "failed": 1, "evaluation": 0},
    }
    assert ledger.reasons == {"failed: worker died": 1}


def test_the_equation_reads() -> None:
    ledger, still_open = make(submitted=5, buffered=2)
    ledger.settle("trained")
    still_open["buffered"] -= 1
    expected = "5 submitted = 1 trained + 0 rejected + 0 failed + 0 filtered + 0 unused + 1 buffered + 3 in flight"
    assert ledger.equation() == expected


def test_reasons_are_counted_apart() -> None:
    ledger, _ = make(submitted=6, buffered=6)
    ledger.settle("rejected", 2, reason="lag")
    ledger.settle("rejected", reason="lineage")
    ledger.settle("filtered", reason="lag")
    ledger.settle("trained")
    assert ledger.reasons == {"rejected: lag": 2, "rejected: lineage": 1, "filtered: lag": 1}


def test_a_state_that_is_none_is_refused() -> None:
    with pytest.raises(AssertionError):
        make(submitted=1)[0].settle("forgotten")


@pytest.mark.parametrize("wrong", [{"buffered": -1}, {"buffered": 1}, {"in_flight": -1}, {"in_flight": 1}])
def test_a_rollout_that_vanished_or_is_in_two_places_is_noticed(wrong) -> None:
    ledger, still_open = make(submitted=3, buffered=2)
    ledger.check()
    still_open.update(wrong)
    with pytest.raises(AccountingError, match="the books do not close: 3 submitted = "):
        ledger.check()


def test_a_rollout_that_is_settled_twice_is_noticed() -> None:
    ledger, still_open = make(submitted=3, buffered=2)
    still_open["buffered"] -= 1
    ledger.settle("trained")
    ledger.check()
    ledger.settle("failed")
    with pytest.raises(AccountingError, match="the books do not close"):
        ledger.check()


def test_at_the_end_nothing_is_open() -> None:
    ledger, still_open = make(submitted=4, buffered=2)
    still_open["buffered"] -= 1
    ledger.settle("trained")
    ledger.close()
    ledger.check()
    assert ledger.counts()["unused"] == 3
    assert ledger.counts()["in_flight"] == ledger.counts()["buffered"] == 0


def test_evaluation_is_counted_apart() -> None:
    ledger, _ = make(submitted=1, buffered=1)
    ledger.evaluation += 5
    ledger.check()
    assert (ledger.counts()["submitted"], ledger.counts()["evaluation"]) == (1, 5)


def test_a_restored_ledger_goes_on() -> None:
    ledger, still_open = make(submitted=5, buffered=2)
    ledger.evaluation = 4
    still_open.update(in_flight=-1, buffered=-1)
    ledger.settle("failed", reason="worker died")
    ledger.settle("trained")
    other = Ledger(lambda: (still_open["buffered"], still_open["in_flight"]))
    other.restore(json.loads(json.dumps(ledger.state())))
    assert other.counts() == ledger.counts() and other.reasons == ledger.reasons
    other.check()
    still_open.clear()
    other.settle("trained", 2)
    other.settle("failed", reason="worker died")
    other.check()
    assert other.reasons == {"failed: worker died": 2}
    assert ledger.counts()["trained"] == 1, "the first ledger is not changed by the second"


def test_a_rollout_lost_in_a_checkpoint_is_noticed() -> None:
    ledger, _ = make(submitted=5, buffered=2)
    other = Ledger(lambda: (2, 2))
    other.restore(ledger.state())
    with pytest.raises(AccountingError, match="the books do not close"):
        other.check()


@given(st.data())
@quick
def test_after_any_course_of_events_the_books_close(data: st.DataObject) -> None:
    ledger, still_open = make(submitted=0)
    settled: Counter[str] = Counter()
    for _ in range(data.draw(st.integers(1, 25))):
        move = data.draw(st.sampled_from(["submit"] + [place for place, count in still_open.items() if count]))
        if move == "submit":
            count = data.draw(st.integers(1, 3))
            ledger.submitted += count
            still_open["in_flight"] += count
        else:
            count = data.draw(st.integers(1, still_open[move]))
            still_open[move] -= count
            if move == "in_flight" and data.draw(st.booleans()):
                still_open["buffered"] += count
            else:
                state = data.draw(st.sampled_from(SETTLED))
                ledger.settle(state, count)
                settled[state] += count
        ledger.check()
        found = settled + still_open
        assert ledger.counts() == {"submitted": found.total(), "evaluation": 0, **{term: found[term] for term in TERMS}}


def test_reasons_are_few_whatever_is_dropped() -> None:
    """The first of each kind is shown. A reward may raise something else for every task, and its first reasons are kept."""
    ledger, _ = make(submitted=500)
    ids = [f"g{number}/1" for number in range(500)]
    for number, id in enumerate(ids[:100]):
        ledger.settle("filtered", reason=f"rollout {id!r} has {600 + number} tokens; the context is 512", id=id)
    ledger.settle("filtered", reason="rollout 'g100/1/2' has 7,000 tokens; the context is 512", id="g100/1")
    assert ledger.reasons == {"filtered: rollout … has 600 tokens; the context is 512": 101}
    for id in ids[101:]:
        word = "".join(chr(97 + int(digit)) for digit in id[1:-2])
        ledger.settle("failed", reason=f"reward 'judge' raised ValueError: {word}\nand more of it", id=id)
    assert len(ledger.reasons) == 21 and sum(ledger.reasons.values()) == 500
    assert ledger.reasons["failed: other reasons, in logs/launcher.log"] == 380
    restored, _ = make(submitted=0)
    restored.restore(json.loads(json.dumps(ledger.state())))
    assert restored.reasons == ledger.reasons
    restored.restore({**ledger.state(), "reasons": {f"failed: rollout {id}": 1 for id in ids}})
    assert len(restored.reasons) == 21 and sum(restored.reasons.values()) == 500


def test_a_reason_keeps_the_numbers_of_its_advice() -> None:
    advice = "has 20 tokens and may come to have 620; the whole KV cache holds 32: raise engine.kv_blocks to 40" + " or so" * 9
    ledger, _ = make(submitted=2)
    ledger.settle("filtered", reason=f"rollout 'a' {advice}", id="a")
    ledger.settle("filtered", reason=f"rollout 'b' {advice.replace('20', '21')}", id="b")
    assert ledger.reasons == {f"filtered: rollout … {advice}": 2}
