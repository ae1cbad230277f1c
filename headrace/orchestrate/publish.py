"""New weights to the engines, between two decode steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.model.weights import make_manifest
from headrace.partial import Interrupt

if TYPE_CHECKING:
    from headrace.engine import Engine
    from headrace.orchestrate.pipeline import Run
    from headrace.orchestrate.roles import TrainerHere
    from headrace.sync import WeightSync


async def publish(run: Run) -> None:
    """Have the engine hold the trainer's weights as `run.version`."""
    interrupt = Interrupt(run.recipe.partial.interrupt)
    with run.trainer_timeline.during("publish"):
        await send_weights(run.engine, run.trainer, run.sync, version=run.version, interrupt=interrupt)


async def send_weights(
    engine: Engine, trainer: TrainerHere, sync: WeightSync, *, version: int, interrupt: Interrupt = Interrupt.KEEP
) -> None:
    """Offer, send, load, release; a failure aborts the update and leaves the engine on its old version."""
    update = sync.offer(version, make_manifest(trainer.tensors()))
    await sync.send(update, trainer.tensors())
    await engine.pause(interrupt)
    try:
        await engine.load(update)
    except BaseException:
        sync.abort(update)
        raise
    finally:
        await engine.resume()
    sync.release(update)
