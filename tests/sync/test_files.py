"""Weights through files: what other readers of safetensors see, and files that are not what was announced."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from headrace.errors import SyncError
from headrace.model.weights import StagedWeights, named_tensors
from headrace.sync import Lineage, WeightSync
from headrace.sync.files import FilesTransport, write_safetensors


@pytest.fixture
def sync(tmp_path):
    sync = WeightSync(Lineage("life"), FilesTransport(folder=tmp_path, prefix="w", deadline=0.3))
    yield sync
    sync.close()
    assert not list(tmp_path.iterdir())


def test_any_reader_of_safetensors_finds_the_models_tensors(sync, tmp_path):
    model = torch.nn.Linear(5, 3)
    update = sync.offer(1, named_tensors(model))
    found = load_file(tmp_path / update.parts[0].place["file"])
    assert found.keys() == {"weight", "bias"}
    assert all(torch.equal(found[name], tensor) for name, tensor in named_tensors(model))


def test_only_its_user_may_read_it(sync, tmp_path):
    before = os.umask(0)
    try:
        update = sync.offer(1, named_tensors(torch.nn.Linear(5, 3)))
    finally:
        os.umask(before)
    assert (tmp_path / update.parts[0].place["file"]).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("fault", ["shape", "dtype", "missing"])
def test_a_file_that_holds_something_else_is_refused(sync, tmp_path, fault):
    model = torch.nn.Linear(4, 4)
    spare, update = StagedWeights(model), sync.offer(1, named_tensors(model))
    wrong = {
        "shape": {"weight": torch.ones(2, 8), "bias": torch.ones(4)},
        "dtype": {"weight": torch.ones(4, 4, dtype=torch.int32), "bias": torch.ones(4)},
        "missing": {"other0": torch.ones(4, 4), "bias": torch.ones(4)},
    }[fault]
    path = tmp_path / update.parts[0].place["file"]
    write_safetensors(path, wrong)
    part = update.parts[0]
    update = replace(update, parts=(replace(part, place={**part.place, "bytes": path.stat().st_size}),))
    with pytest.raises(SyncError, match=r"version 1 over files: tensor 'weight' is"):
        spare.receive(update, lambda incoming: sync.receive(update, incoming))


def test_a_file_that_does_not_come_is_waited_for_as_long_as_the_deadline(sync, tmp_path):
    model = torch.nn.Linear(4, 4)
    spare, update = StagedWeights(model), sync.offer(1, named_tensors(model))
    (tmp_path / update.parts[0].place["file"]).unlink()
    with pytest.raises(SyncError, match=r"is not there after 0\.3 s \(sync\.deadline\)"):
        spare.receive(update, lambda incoming: sync.receive(update, incoming))
