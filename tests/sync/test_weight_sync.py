"""What a sender makes of weights, whatever carries them."""

from __future__ import annotations

import pytest
import torch

from headrace.sync import Lineage, MemoryTransport, SyncError, WeightSync
from headrace.types import Payload


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {"matrix": torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), "norm": torch.ones(9)}


def test_the_same_version_again_is_no_difference_from_itself(weights):
    """As at the beginning of a leg: an engine that was started meanwhile could not take one."""
    sync = WeightSync(Lineage("life"), MemoryTransport(), payload="delta")
    kinds = []
    for version in (0, 1, 1, 2):
        update = sync.offer(version, weights.items())
        sync.release(update)
        kinds.append((update.payload, update.base_version))
    assert kinds == [(Payload.FULL, None), (Payload.DELTA, 0), (Payload.FULL, None), (Payload.DELTA, 1)]


def test_weights_that_are_not_finite_are_not_published_and_leave_no_room_behind(weights):
    sync = WeightSync(Lineage("life"), MemoryTransport())
    weights["norm"][3] = float("nan")
    with pytest.raises(SyncError, match="'norm' holds NaN"):
        sync.offer(0, weights.items())
    assert not sync._offered and not sync._transport._rooms._held
