"""Weights that lie where receivers read them."""

from __future__ import annotations

import pytest
import torch

from headrace.sync import Ends, Lineage, WeightSync


@pytest.mark.parametrize("transport", ["shared_memory", "files", "http", "collective"])
def test_whatever_else_is_offered_an_adopted_model_keeps_its_weights(transport, tmp_path):
    ends = Ends(transport=transport, folder=str(tmp_path), prefix="t", host="127.0.0.1", token="t" * 32, deadline=2.0)
    sync = WeightSync(Lineage("life"), ends.make(is_sender=True, device="cpu"))
    try:
        model = torch.nn.Linear(64, 64)
        before = model.weight.detach().clone()
        arena = sync.adopt(model)
        sync.release(sync.offer(1, arena))
        sync.release(sync.offer(2, [("other", torch.full((64, 65), 7.0))]))
        assert torch.equal(model.weight, before)
    finally:
        sync.close()
