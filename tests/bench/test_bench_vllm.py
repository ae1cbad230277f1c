"""The benchmark of the vLLM engine: what it checks of an update, that it runs, and what it says without vLLM."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from vllm_server import MISSING, VARIABLES, vllm_python

from headrace.bench import vllm
from headrace.bench.loads import finished
from headrace.bench.vllm_update import (
    IN_ORDER,
    LOAD,
    STILL,
    SWAP,
    USUAL,
    RolloutsEndedEarly,
    are_in_order,
    ended_early,
    update_in_flight,
)
from headrace.cli import main
from headrace.engine.native.core import EngineCore
from headrace.engine.native.engine import NativeEngine
from headrace.model.load import load_model
from headrace.model.weights import named_tensors
from headrace.observe import ProcessTimeline
from headrace.records import FinishReason, Rollout, Sampling
from headrace.sync import Lineage, MemoryTransport, WeightSync

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from transformers import PreTrainedModel

    from headrace.engine import Engine
    from headrace.records import WeightUpdate


def drawn(*versions: int, finish_reason: FinishReason = FinishReason.ABORT) -> Rollout:
    """One that was sampled by these versions after a prompt of one token."""
    prompt = Rollout.from_prompt([0], id="a")
    return finished(prompt, np.arange(1, 1 + len(versions)), version=versions, reason=finish_reason)


@pytest.mark.parametrize(
    ("versions", "is_right"),
    [
        ((3, 3, 4, 4), True),
        ((3, 3, 3, 4), True),
        ((3, 4, 4, 4), False),  # the second was drawn before the update
        ((3, 3, 3, 3), False),  # the last was drawn after it
        ((3, 3, 2, 4), False),
        ((3, 3, 5, 5), False),
        ((3, 3, 4), False),  # it did not go on
    ],
)
def test_versions_in_order(versions: tuple[int, ...], is_right: bool) -> None:
    assert are_in_order(drawn(*versions), old=3, new=4, before=2, after=3) is is_right


def test_a_rollout_that_had_no_time_to_go_on_is_no_wrong_one() -> None:
    aborted, whole = drawn(3, 3, 4), drawn(3, 3, 4, finish_reason=FinishReason.LENGTH)
    assert ended_early(whole, after=3) and not ended_early(whole, after=2) and not ended_early(aborted, after=3)


def with_side(tiny_model: str, check: Callable[[vllm.Side, PreTrainedModel], Awaitable[None]]) -> None:
    """Run a check on a native engine of four slots and on the model whose weights it is sent."""

    async def main() -> None:
        sync, timeline = WeightSync(Lineage("life"), MemoryTransport()), ProcessTimeline("engine")
        engine = NativeEngine(EngineCore(load_model(tiny_model), name="e", slots=4, context=2048), sync=sync, timeline=timeline)
        engine.start()
        try:
            await check(vllm.Side(engine, sync, timeline), load_model(tiny_model))
        finally:
            engine.close()

    asyncio.run(main())


def rollouts_of(engine: Engine, num_tokens: int) -> asyncio.Future[list[Rollout]]:
    sampling = [Sampling(max_tokens=num_tokens, seed=number, stop_ids=()) for number in range(4)]
    return asyncio.gather(*(engine.generate(Rollout.from_prompt([7, 8], id=f"{each.seed}"), each) for each in sampling))


def test_an_update_is_seen_with_rollouts_in_flight(tiny_model: str) -> None:
    async def check(side: vllm.Side, model: PreTrainedModel) -> None:
        update = side.sync.offer(1, named_tensors(model))
        seen = await update_in_flight(side.engine, update, rollouts_of(side.engine, 2000), timeline=side.timeline)
        assert seen[IN_ORDER] == 1 and 0 < seen[SWAP] <= seen[LOAD] and seen[USUAL] > 0 and seen[STILL] > 0

    with_side(tiny_model, check)


def test_an_update_that_outlasts_its_rollouts_is_retried_with_the_next_version(tiny_model: str, monkeypatch) -> None:
    tried = []

    async def at_first_too_late(engine: Engine, update: WeightUpdate, rolling: Any, *, timeline: Any) -> dict[str, float]:
        tried.append(update.version)
        if len(tried) == 1:
            rolling.cancel()
            try:
                return await update_in_flight(engine, update, rollouts_of(engine, 4), timeline=timeline)
            finally:
                await engine.load(update)
        return await update_in_flight(engine, update, rolling, timeline=timeline)

    async def check(side: vllm.Side, model: PreTrainedModel) -> None:
        plan = replace(vllm.make_plan("cpu", quick=True, has_model=False), context=2048)
        assert (await vllm._update(plan, side, model))[IN_ORDER] == 1 and tried == [1, 2]
        monkeypatch.setattr(vllm, "_ATTEMPTS", 1)
        tried.clear()
        with pytest.raises(RolloutsEndedEarly, match="too slow for it, or too busy"):
            await vllm._update(plan, side, model)

    monkeypatch.setattr(vllm, "update_in_flight", at_first_too_late)
    with_side(tiny_model, check)


def test_without_vllm_one_line_says_what_to_do(monkeypatch, capsys) -> None:
    monkeypatch.setenv("HEADRACE_VLLM_PYTHON", "/nowhere/python")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "vllm", "--quick"])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.count("\n") == 1 and "/nowhere/python" in told and "HEADRACE_VLLM_PYTHON" in told


@pytest.mark.long
@pytest.mark.skipif(vllm_python() is None, reason=MISSING)
def test_both_engines_are_measured(monkeypatch, tmp_path) -> None:
    for name, value in {**VARIABLES, "HEADRACE_VLLM_PYTHON": vllm_python() or sys.executable}.items():
        if name != "PYTHONPATH":
            monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "vllm", "--quick", "--json", str(tmp_path / "figures.json")])
    rows = {row["name"]: row for row in json.loads((tmp_path / "figures.json").read_text())["rows"]}
    assert ended.value.code == 0
    assert (
        rows["vLLM: rollouts with versions in order"]["value"] == rows["native: rollouts with versions in order"]["value"] == 1
    )
    for name in ("mean |Δ logprob| against the trainer", "max |Δ logprob| against the trainer"):
        assert 0 < rows[name]["value"] < 1e-4 and 0 < rows[name]["peers"]["native"] < 1e-4
    assert rows["KL against the trainer, native ÷ vLLM"]["value"] > 0
    timed = [row for row in rows.values() if row["unit"] in ("ms", "tokens/s")]
    assert len(timed) == 5 and all(row["value"] > 0 and row["peers"]["native"] > 0 for row in timed)
