"""Manifests of tensors, and updates brought by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.model.weights import checksum, describe

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from headrace.model.weights import StagedWeights, StagingBuffer
    from headrace.records import Manifest, WeightUpdate


def make_manifest(tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
    """Names, dtypes, shapes and checksums."""
    named = dict(tensors)
    return describe(named).with_checksums(np.asarray([checksum(tensor) for tensor in named.values()], dtype=np.uint64))


def fill(spare: StagedWeights, tensors: Iterable[tuple[str, Tensor]], update: WeightUpdate) -> Manifest:
    """Receive an update from tensors by name."""

    def bring(incoming: StagingBuffer) -> None:
        for name, tensor in tensors:
            incoming.views[name].copy_(tensor)

    return spare.receive(update, bring)
