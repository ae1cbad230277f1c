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
    with run.trainer_timeline.during("wait-batch"):  # a draining engine is waited for, not worked with
        await run.engine.pause(Interrupt(run.recipe.partial.interrupt))
    with run.trainer_timeline.during("publish"):
        await send_weights(run.engine, run.trainer, run.sync, version=run.version)


async def send_weights(engine: Engine, trainer: TrainerHere, sync: WeightSync, *, version: int) -> None:
    """Offer, send, load, release, to an engine that is paused or idle; it decodes again afterwards. A failure aborts the
    update and leaves the engine on its old version."""
    tensors = list(trainer.tensors())
    update = sync.offer(version, make_manifest(tensors))
    await sync.send(update, tensors)
    try:
        await engine.load(update)
    except BaseException:
        sync.abort(update)
        raise
    finally:
        await engine.resume()
    sync.release(update)
