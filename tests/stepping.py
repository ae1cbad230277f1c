"""An engine core that a test steps by hand, and what became of each request it was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from headrace.engine.native.core import EngineCore
from headrace.engine.native.plain_runner import PlainRunner
from headrace.engine.request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from headrace.engine.native.step import StepPlan
    from headrace.records import Rollout, Sampling


TOLERANCE = 1e-5


@dataclass
class Asked:
    """A request and how it ended: with a rollout, with an error, or not yet."""

    request: Request
    rollout: Rollout | None = None
    error: Exception | None = None

    @property
    def is_over(self) -> bool:
        return self.rollout is not None or self.error is not None

    @property
    def done(self) -> Rollout:
        assert self.rollout is not None, f"{self.request.rollout.id} has not ended: {self.error}"
        return self.rollout


def make_core(
    model: PreTrainedModel,
    *,
    slots: int = 8,
    context: int = 64,
    block_size: int = 8,
    max_prompt_tokens: int | None = None,
    max_sampled: int | None = None,
    **options: Any,
) -> EngineCore:
    """A core on plain torch; `max_prompt_tokens` and `max_sampled` are those of its runner."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("max_prompt_tokens", max_prompt_tokens), ("max_sampled", max_sampled)):
            if value is not None:
                patch.setattr(PlainRunner, name, value)
        return EngineCore(model, name="engine", slots=slots, context=context, block_size=block_size, **options)


def ask(core: EngineCore, rollout: Rollout, sampling: Sampling) -> Asked:
    """Submit a request and keep what comes of it. It may end once."""

    def on_done(result: Rollout) -> None:
        assert not asked.is_over, f"{rollout.id} ended twice"
        asked.rollout = result

    def on_failed(error: Exception) -> None:
        assert not asked.is_over, f"{rollout.id} ended twice"
        asked.error = error

    asked = Asked(Request(rollout, sampling, on_done=on_done, on_failed=on_failed))
    core.submit(asked.request)
    return asked


def run(core: EngineCore, *, most_steps: int = 10_000) -> list[StepPlan]:
    """Step until there is nothing to do; what each step did."""
    steps = []
    while core.has_work:
        assert len(steps) < most_steps, f"still not done after {most_steps} steps"
        steps.append(core.step())
    return steps


def prompt_rows(steps: list[StepPlan]) -> int:
    """Prompt tokens that were computed."""
    return sum(step.prompt_rows for step in steps)


def generate(core: EngineCore, rollout: Rollout, sampling: Sampling) -> Rollout:
    """One request, to its end."""
    asked = ask(core, rollout, sampling)
    run(core)
    return asked.done


def assert_same_draws(left: Rollout, right: Rollout) -> None:
    """Token for token, and logprobs as close as float32 sums in another order are."""
    np.testing.assert_array_equal(left.token_ids, right.token_ids)
    np.testing.assert_allclose(left.logprobs, right.logprobs, atol=TOLERANCE, rtol=TOLERANCE)


def assert_nothing_is_held(core: EngineCore) -> None:
    """Every block and slot is given back, each block once, and nobody waits."""
    scheduler = core.scheduler
    assert core.num_running == core.num_waiting == core.num_started == 0
    assert not core.has_work
    assert core.num_free_blocks == core.cache.num_blocks - 1
    assert sorted(scheduler._free_slots) == list(range(core.num_slots))
    pool = scheduler.pool
    assert sorted([*pool._free, *pool._idle]) == list(range(1, pool.num_blocks))
    assert pool._idle.keys() == pool._key_of.keys() | pool._keepers.keys()
    assert not scheduler._computing and not scheduler._leaders
    assert not scheduler._is_decoding.any() and not scheduler.slots.in_flight.any()
    assert not any(scheduler.pool._references)
