"""A batch that left the buffer and was not trained goes back to where it was, and is trained once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from helpers import small_run
from test_kinds import Seen, closes

from headrace.trainer.local import LocalTrainer

if TYPE_CHECKING:
    from headrace.buffer import Group


def ids(batch: list[Group]) -> list[str]:
    return [episode.id for group in batch for episode in group.episodes]


@pytest.mark.parametrize("order", ["completion", "submission"])
def test_ack_and_rewind_a_failed_step_rewinds_its_batch_in_order_and_it_is_trained_once(tmp_path, monkeypatch, order) -> None:
    settings: dict[str, Any] = {"steps": 5, "held_out": None, "buffer": {"order": order}, "checkpoint": {"every": 10}}
    before, after, original = Seen(), Seen(), LocalTrainer.step
    num_steps = 0

    async def failing(self: LocalTrainer, *arguments: Any, **keywords: Any) -> dict[str, float]:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise RuntimeError("the trainer has failed")
        return await original(self, *arguments, **keywords)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the trainer has failed"):
        patch.setattr(LocalTrainer, "step", failing)
        small_run(tmp_path / "run", callbacks=[before], **settings)
    assert len(before.batches) == 3, "the third was taken"
    result = small_run(tmp_path / "run", callbacks=[after], **settings)
    assert ids(after.batches[0]) == ids(before.batches[2]), "and is the first after the restart, in the same order"
    trained = [each for batch in before.batches[:2] + after.batches for each in ids(batch)]
    assert len(set(trained)) == len(trained) == 5 * 16 == result.summary["accounting"]["trained"]
    assert closes(result.summary) and result.summary["accounting"]["submitted"] >= len(trained)
