"""The trainer of a trainer process: publishing beside the next step, and never a weight of it."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from manifests import make_manifest

from headrace.errors import SyncError
from headrace.model.load import load_model, load_tokenizer
from headrace.model.weights import StagedWeights, named_tensors
from headrace.observe import ProcessTimeline
from headrace.records.columns import pack_batch
from headrace.run.publishing import make_canary
from headrace.sync import Lineage, MemoryTransport, SharedMemoryTransport, WeightSync, weight_sync
from headrace.trainer import DeviceTrainer, TrainSettings
from headrace.trainer.local import LocalTrainer
from headrace.trainer.protocol import Superseded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from torch import Tensor

    from headrace.model.arena import Arena
    from headrace.records import Array, Batch, WeightUpdate

CANARY = make_canary(np.arange(6, 20))
PACKED = pack_batch(CANARY)
ones = (np.ones(len(CANARY.rollouts[0]), dtype=np.float32),)
LESSON = pack_batch(dataclasses.replace(CANARY, advantages=ones, weights=ones))


class Noting:
    """A trainer that writes down what it is asked, and whose one weight counts its optimizer steps."""

    def __init__(self) -> None:
        self.weight = torch.zeros(4)
        self.num_passes = 0
        self.asked: list[str] = []
        self.is_saving, self.may_copy, self.may_write = threading.Event(), threading.Event(), threading.Event()
        self.may_copy.set()
        self.may_write.set()

    def forward(self, batch: Batch, *, column: str = "proximal") -> list[Array]:
        self.asked.append("forward")
        return [np.zeros(len(rollout), dtype=np.float32) for rollout in batch.rollouts]

    def forward_backward(self, batch: Batch) -> dict[str, float]:
        self.asked.append("forward_backward")
        return {"loss": 1.0}

    def optim_step(self, learning_rate: float) -> dict[str, float]:
        self.asked.append("optim_step")
        self.weight += 1
        return {"learning_rate": learning_rate}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.weight

    def save(self, folder: Path, *, on_read: Callable[[], None]) -> dict[str, list[int]]:
        self.is_saving.set()
        self.may_copy.wait(60)
        self.asked.append("save")
        saved = float(self.weight[0])
        on_read()
        self.may_write.wait(60)
        return {"weight": [int(saved), 0]}

    def load(self, folder: Path) -> None:
        self.asked.append("load")
        self.weight += 100


class Slow(WeightSync):
    """Reads the weights when it is let to, and only then."""

    def __init__(self) -> None:
        super().__init__(Lineage("life"), MemoryTransport())
        self.may_read, self.read, self.is_reading = threading.Event(), {}, threading.Event()
        self.may_finish = threading.Event()
        self.may_finish.set()
        self.failure: Exception | None = None

    def offer(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, on_read: Callable[[], None], **settings: Any
    ) -> WeightUpdate:
        self.is_reading.set()
        self.may_read.wait()
        if self.failure is not None:
            raise self.failure

        def has_read() -> None:
            self.read[version] = {name: tensor.clone() for name, tensor in tensors}
            on_read()
            self.may_finish.wait()

        tensors = list(tensors)
        return super().offer(version, tensors, on_read=has_read, **settings)


async def is_set(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 10)


@dataclasses.dataclass
class Bench:
    trainer: Noting
    sync: Slow
    timeline: ProcessTimeline
    worker: LocalTrainer

    def begin(self, name: str, **arguments: Any) -> asyncio.Task[Any]:
        """As a stream does: calls are begun in the order they arrive."""
        return asyncio.ensure_future(self.worker.calls()[name](**arguments))

    async def asked(self, count: int) -> list[str]:
        while len(self.trainer.asked) < count:  # noqa: ASYNC110  (it is written in another thread)
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.03)  # for one too many
        return self.trainer.asked


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.chdir(tmp_path)  # checkpoints are saved in folders there
    trainer, sync, timeline = Noting(), Slow(), ProcessTimeline("trainer")
    return Bench(trainer, sync, timeline, LocalTrainer(trainer, sync=sync, timeline=timeline, in_threads=True))


async def test_publishing_overlaps_the_next_pass_and_the_optimizer_waits_for_the_copy(bench: Bench):
    publishing = bench.begin("publish", version=1, canary=PACKED)
    stepping = bench.begin("step", batch=LESSON, learning_rate=0.5)
    await is_set(bench.sync.is_reading)
    assert await bench.asked(2) == ["forward", "forward_backward"]
    await asyncio.sleep(0.1)
    assert not stepping.done() and not publishing.done()
    assert bench.timeline.report()["state"] == "publish", "that is what the trainer waits for"
    bench.sync.may_read.set()
    published = await publishing
    assert published.update.version == 1 and len(published.canary) == len(CANARY.rollouts[0])
    assert await stepping == {"loss": 1.0, "learning_rate": 0.5}
    assert bench.trainer.asked == ["forward", "forward_backward", "optim_step"]
    assert torch.equal(bench.sync.read[1]["weight"], torch.zeros(4)) and bench.trainer.weight[0] == 1
    totals = bench.timeline.report()["totals"]
    assert totals["publish"] > 0.09 and totals["compute"] < 0.09


async def test_the_optimizer_steps_while_what_was_read_is_hashed_and_moved(bench: Bench):
    bench.sync.may_read.set()
    bench.sync.may_finish.clear()
    publishing = bench.begin("publish", version=1, canary=PACKED)
    assert await bench.begin("step", batch=LESSON, learning_rate=0.5) == {"loss": 1.0, "learning_rate": 0.5}
    assert not publishing.done() and bench.trainer.weight[0] == 1
    bench.sync.may_finish.set()
    assert (await publishing).update.version == 1
    assert torch.equal(bench.sync.read[1]["weight"], torch.zeros(4))
    assert any("beside offer 1" in states for _, _, states in bench.timeline.report()["slices"])


async def test_the_end_of_one_publication_does_not_give_free_what_the_next_has_yet_to_read(bench: Bench):
    bench.sync.may_read.set()
    bench.sync.may_finish.clear()
    first = bench.begin("publish", version=1, canary=PACKED)
    await bench.begin("step", batch=LESSON, learning_rate=0.5)
    second = bench.begin("publish", version=2, canary=PACKED)
    stepping = bench.begin("step", batch=LESSON, learning_rate=0.5)
    assert (await bench.asked(5))[3:] == ["forward", "forward_backward"]
    bench.sync.may_finish.set()
    update = (await first).update  # the second waits for its turn, and the third step for the second
    await asyncio.sleep(0.05)
    assert not stepping.done() and not second.done()
    await bench.begin("release", update=update)
    await asyncio.gather(second, stepping)
    assert torch.equal(bench.sync.read[2]["weight"], torch.ones(4)) and bench.trainer.weight[0] == 2


async def test_the_optimizer_waits_until_a_save_has_copied_the_weights_and_not_until_they_are_written(bench: Bench):
    bench.trainer.may_copy.clear()
    bench.trainer.may_write.clear()
    saving = bench.begin("save", folder="somewhere")
    stepping = bench.begin("step", batch=LESSON, learning_rate=0.5)
    await is_set(bench.trainer.is_saving)
    assert await bench.asked(1) == ["forward_backward"], "the pass does not wait"
    assert bench.timeline.report()["state"] == "save" and not stepping.done()
    bench.trainer.may_copy.set()
    await stepping
    await bench.begin("step", batch=LESSON, learning_rate=0.5)
    assert bench.trainer.weight[0] == 2 and not saving.done(), "two steps were made while it was written"
    bench.trainer.may_write.set()
    assert await saving == {"weight": [0, 0]}
    assert "beside save" in str(bench.timeline.report())


async def test_a_save_that_fails_lets_the_optimizer_go(bench: Bench):
    def full(folder: Path, *, on_read: Callable[[], None]) -> None:
        raise OSError(28, "No space left on device")

    bench.trainer.save = full  # type: ignore[method-assign,assignment]
    saving, stepping = bench.begin("save", folder="x"), bench.begin("step", batch=LESSON, learning_rate=0.5)
    with pytest.raises(OSError, match="No space left"):
        await saving
    await asyncio.wait_for(stepping, 30)


async def test_a_version_is_offered_again_only_while_its_weights_are_there(bench: Bench):
    bench.sync.may_read.set()
    first = (await bench.begin("publish", version=1, canary=PACKED)).update
    await bench.begin("abort", update=first)
    again = (await bench.begin("publish", version=1, canary=PACKED, whole=True)).update
    assert again.manifest == first.manifest and again.parts[0].key != first.parts[0].key
    await bench.begin("abort", update=again)
    await bench.begin("step", batch=LESSON, learning_rate=0.5)
    with pytest.raises(Superseded, match="version 1"):
        await bench.begin("publish", version=1, canary=PACKED, whole=True)
    assert (await bench.begin("publish", version=2, canary=PACKED)).update.version == 2


async def test_a_checkpoint_is_not_loaded_under_a_publication(bench: Bench):
    publishing = bench.begin("publish", version=1, canary=PACKED)
    loading = bench.begin("load", folder="nowhere")
    await is_set(bench.sync.is_reading)
    assert await bench.asked(1) == ["forward"]
    bench.sync.may_read.set()
    await asyncio.gather(publishing, loading)
    assert torch.equal(bench.sync.read[1]["weight"], torch.zeros(4)) and bench.trainer.weight[0] == 100


@pytest.mark.parametrize("fault", ["read", "offer", "canary"])
async def test_a_publication_that_fails_lets_the_optimizer_go(bench: Bench, fault, monkeypatch):
    bench.sync.may_read.set()
    bench.sync.failure = SyncError("no room") if fault == "read" else None
    with monkeypatch.context() as patch:
        if fault != "read":

            def fails(*_: object, **__: object) -> None:
                raise SyncError("no room")

            patch.setattr(bench.sync if fault == "offer" else bench.trainer, {"canary": "forward"}.get(fault, fault), fails)
        publishing = bench.begin("publish", version=1, canary=PACKED)
        stepping = bench.begin("step", batch=LESSON, learning_rate=0.5)
        with pytest.raises(SyncError, match="no room"):
            await publishing
        await asyncio.wait_for(stepping, 30)
    bench.sync.failure = None
    assert (await bench.begin("publish", version=2, canary=PACKED)).update.version == 2


async def test_one_update_is_under_way_at_a_time(bench: Bench):
    """The next is not written before the engines hold the one before: it might be written over what they still read."""
    bench.sync.may_read.set()
    first = (await bench.begin("publish", version=1, canary=PACKED)).update
    second = bench.begin("publish", version=2, canary=PACKED)
    await asyncio.sleep(0.05)
    assert not second.done()
    await bench.begin("release", update=first)
    assert (await second).update.version == 2


async def test_calls_are_done_in_the_order_they_were_made(bench: Bench):
    bench.sync.may_read.set()
    step = {"batch": LESSON, "learning_rate": 0.1}
    calls = [
        bench.begin("step", **step),
        bench.begin("save", folder="somewhere"),
        bench.begin("forward", batch=PACKED),
        bench.begin("publish", version=1, canary=PACKED),
        bench.begin("save", folder="somewhere"),
        bench.begin("step", **step),
        bench.begin("load", folder="somewhere"),
    ]
    await asyncio.gather(*calls)
    one_step = ["forward_backward", "optim_step"]
    assert [call for call in bench.trainer.asked if call != "save"] == [*one_step, "forward", "forward", *one_step, "load"]
    saves = [index for index, call in enumerate(bench.trainer.asked) if call == "save"]
    assert len(saves) == 2 and saves[0] > 1 and saves[1] < len(bench.trainer.asked) - 2, "before the next optimizer step"
    assert torch.equal(bench.sync.read[1]["weight"], torch.ones(4))


async def test_what_a_call_raises_is_the_callers_and_the_next_goes_on(bench: Bench):
    def full(folder: Path, *, on_read: Callable[[], None]) -> None:
        raise OSError(28, "No space left on device")

    bench.trainer.save = full  # type: ignore[method-assign,assignment]
    failing, going_on = bench.begin("save", folder="x"), bench.begin("forward", batch=PACKED)
    with pytest.raises(OSError, match="No space left"):
        await failing
    assert len(await going_on) == 1 and bench.timeline.report()["state"] == "wait-batch"


def test_a_version_is_published_bit_for_bit_although_the_next_step_was_begun_at_once(tiny_model, tmp_path, monkeypatch):
    """With the trainer and the transport of a real run, and a copy that takes its time."""
    trainer = DeviceTrainer(load_model(tiny_model), tokenizer=load_tokenizer(tiny_model), settings=TrainSettings())
    sender, receiver = (WeightSync(Lineage("life"), SharedMemoryTransport(prefix="w", folder=tmp_path)) for _ in range(2))
    pack, spare = weight_sync._copy, StagedWeights(load_model(tiny_model))

    def slowly(image: Arena, tensors: Arena) -> None:
        for name, tensor in tensors:
            time.sleep(0.002)
            image.views[name].copy_(tensor)
        pack(image, tensors)

    monkeypatch.setattr(weight_sync, "_copy", slowly)

    async def main() -> None:
        calls = LocalTrainer(trainer, sync=sender, timeline=ProcessTimeline("trainer"), in_threads=True).calls()
        before = make_manifest(named_tensors(trainer.model))
        for version in range(1, 5):
            publishing = asyncio.ensure_future(calls["publish"](version=version, canary=PACKED))
            stepping = asyncio.ensure_future(calls["step"](batch=LESSON, learning_rate=1e-2))
            published = await publishing
            await stepping
            update = published.update
            assert update.manifest == before, version
            assert spare.receive(update, partial(receiver.receive, update)) == before, version
            await calls["release"](update=update)
            before = make_manifest(named_tensors(trainer.model))
            assert before != update.manifest, "the step changed nothing"

    asyncio.run(main())
    sender.close()
