"""Weights that lie where receivers read them."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import SyncError
from headrace.sync import Lineage, MemoryTransport, TransportConfig, WeightSync, make_transport


@pytest.mark.parametrize("transport", ["shared_memory", "files", "http", "collective"])
def test_whatever_else_is_offered_an_adopted_model_keeps_its_weights(transport, tmp_path):
    ends = TransportConfig(
        transport=transport, folder=str(tmp_path), prefix="t", host="127.0.0.1", token="t" * 32, deadline=2.0
    )
    sync = WeightSync(Lineage("life"), make_transport(ends, is_sender=True, device="cpu"))
    try:
        model = torch.nn.Linear(64, 64)
        before = model.weight.detach().clone()
        arena = sync.adopt(model)
        sync.release(sync.offer(1, arena))
        sync.release(sync.offer(2, [("other", torch.full((64, 65), 7.0))]))
        assert torch.equal(model.weight, before)
    finally:
        sync.close()


def test_an_adopted_model_may_change_when_its_update_is_released_given_up_or_fails(monkeypatch):
    sync, changes = WeightSync(Lineage("life"), MemoryTransport()), []
    arena = sync.adopt(torch.nn.Linear(8, 8))
    released = sync.offer(1, arena, on_read=lambda: changes.append("released"))
    assert changes == []
    sync.release(released)
    assert changes == ["released"]
    sync.abort(sync.offer(2, arena, on_read=lambda: changes.append("given up")))
    assert changes == ["released", "given up"]

    def fails(*_: object) -> None:
        raise SyncError("no room")

    monkeypatch.setattr(sync._transport, "post", fails)
    with pytest.raises(SyncError, match="no room"):
        sync.offer(3, arena, on_read=lambda: changes.append("failed"))
    assert changes == ["released", "given up", "failed"]
