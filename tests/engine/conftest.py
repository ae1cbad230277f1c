"""An engine over a fake vLLM server."""

from __future__ import annotations

import asyncio

import pytest
from fake_vllm import serving

from headrace.engine.vllm.api import VllmApi
from headrace.engine.vllm.engine import VllmEngine
from headrace.engine.vllm.handover import FolderHandover
from headrace.model.load import load_model
from headrace.model.weights import StagedWeights, named_tensors
from headrace.observe import Timeline
from headrace.sync import Lineage, MemoryTransport, WeightSync


@pytest.fixture
def run(tiny_model, tmp_path):
    """Runs a test over a fake server and an engine that holds version 0 of it."""

    def runner(test, fake, *, patience=60.0, tells_late=False, decode=None, **records):
        async def main():
            sync = WeightSync(Lineage("life"), MemoryTransport())
            async with serving(fake) as url:
                api = VllmApi(url, log="server.log")
                model = load_model(tiny_model)
                limits = {"slots": 2, "context": 64, "vocabulary": 200}
                engine = VllmEngine(
                    api,
                    await api.about(),
                    name="engine-0",
                    **limits,
                    model=model,
                    staged=StagedWeights(model, in_place=False),
                    sync=sync,
                    handover=FolderHandover(tmp_path / "weights"),
                    timeline=Timeline("engine"),
                    patience=patience,
                    tells_late=tells_late,
                    decode=decode,
                    **records,
                )
                engine.start()

                async def publish(version, **options):
                    update = sync.offer(version, named_tensors(load_model(tiny_model)))
                    await engine.load(update, **options)
                    sync.release(update)

                try:
                    await publish(0)
                    await asyncio.wait_for(test(engine, publish), 30)
                finally:
                    await engine.close()
                    await api.close()

        asyncio.run(main())

    return runner
