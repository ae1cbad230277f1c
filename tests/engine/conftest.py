"""A pool of engines, and an engine over a fake vLLM server."""

from __future__ import annotations

import contextlib

import pytest
import torch
from fake_vllm import engine_over
from pooled import pooled

from headrace.engine.vllm.handover import FolderHandover
from headrace.model.load import load_model
from headrace.model.weights import named_tensors
from headrace.sync import Lineage, MemoryTransport, WeightSync


@pytest.fixture
def bench(tiny_model):
    """A pool that engines may join, open while a test runs (`Pooled`)."""
    torch.manual_seed(0)
    return pooled(tiny_model)


@pytest.fixture
def over(tiny_model, tmp_path):
    """Opens an engine over a fake server that holds version 0: (engine, publish)."""

    @contextlib.asynccontextmanager
    async def opening(fake, **options):
        sync = WeightSync(Lineage("life"), MemoryTransport())
        handover = FolderHandover(tmp_path / "weights")
        async with engine_over(fake, load_model(tiny_model), sync=sync, handover=handover, **options) as engine:

            async def publish(version, **options):
                update = sync.offer(version, named_tensors(load_model(tiny_model)))
                await engine.load(update, **options)
                sync.release(update)

            await publish(0)
            yield engine, publish

    return opening
