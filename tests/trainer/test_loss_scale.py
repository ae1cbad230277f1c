"""float16: gradients near float32's because the loss is scaled, overflows that are not failures, and a whole run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from helpers import small_run
from test_trainer import make_batch, nudge, rollouts

from headrace.engine.native.core import EngineCore
from headrace.model.load import load_model, load_tokenizer
from headrace.observe.sinks import read_metrics
from headrace.trainer import DeviceTrainer, TrainSettings
from headrace.trainer.loss_scale import _GROWS_AFTER, _TOLERATED, LossScale

if TYPE_CHECKING:
    from pathlib import Path


def make(model_path: str, dtype: torch.dtype = torch.float16, **settings) -> DeviceTrainer:
    model = load_model(model_path)
    nudge(model)
    tokenizer = load_tokenizer(model_path)
    return DeviceTrainer(model, tokenizer=tokenizer, settings=TrainSettings(**settings), dtype=dtype)


def gradient(trainer: DeviceTrainer) -> torch.Tensor:
    scale = trainer.optimizer.loss_scale
    flat = torch.cat([trainer.optimizer.gradient(name).flatten() for name in sorted(trainer.optimizer.names)])
    return flat if scale is None else flat / scale.value


def masters(trainer: DeviceTrainer) -> torch.Tensor:
    return torch.cat([trainer.optimizer.master(name).flatten() for name in sorted(trainer.optimizer.names)])


def test_the_scale_halves_on_an_overflow_and_grows_after_many_clean_steps() -> None:
    scale = LossScale()
    assert scale.adapt(is_finite=False) and scale.value == 2.0**15
    assert not any(scale.adapt(is_finite=True) for _ in range(_GROWS_AFTER)) and scale.value == 2.0**16
    assert [scale.adapt(is_finite=False) for _ in range(_TOLERATED + 2)] == [True] * _TOLERATED + [False] * 2
    assert not scale.adapt(is_finite=True) and scale.adapt(is_finite=False)  # in a row, that is
    for _ in range(40):
        scale.adapt(is_finite=False)
    assert scale.value == 1
    other = LossScale()
    other.load(scale.state())
    assert other == scale


@pytest.mark.parametrize("loss", ["grpo", "ppo"])
def test_gradients_that_would_underflow_are_near_float32s(tiny_model: str, loss: str) -> None:
    """Weights of a large batch, 1e-4 of those here: unscaled, most of the gradient would be 0. `ppo` has a value head, and
    takes the other path through the head."""
    items = [item.replace(columns={**item.columns, "values": 0 * item.logprobs, "returns": 0 * item.logprobs + 1e-3})
             for item in rollouts(tiny_model, 6)]  # fmt: skip
    batch = make_batch(items, loss=loss)
    batch = make_batch(items, loss=loss, weights=tuple(1e-4 * weights for weights in batch.weights))
    exact, scaled, plain = make(tiny_model, torch.float32, loss=loss), make(tiny_model, loss=loss), make(tiny_model, loss=loss)
    plain.optimizer.loss_scale = None
    for trainer in (exact, scaled, plain):
        trainer.forward_backward(batch)
    wanted = gradient(exact)
    assert float((gradient(scaled) - wanted).norm() / wanted.norm()) < 0.02
    assert float((gradient(plain) - wanted).norm() / wanted.norm()) > 0.1
    assert scaled.optim_step(1e-3)["grad_norm"] == pytest.approx(exact.optim_step(1e-3)["grad_norm"], rel=0.01)


def test_an_overflow_changes_nothing_is_no_failure_and_is_cured(tiny_model: str, tmp_path: Path) -> None:
    trainer, batch = make(tiny_model), make_batch(rollouts(tiny_model, 4))
    assert trainer.optimizer.loss_scale is not None
    trainer.optimizer.loss_scale.value = 2.0**22
    before, seen = masters(trainer), []
    while not seen or seen[-1]["overflowed"]:
        assert torch.equal(masters(trainer), before)
        trainer.forward_backward(batch)
        seen.append(trainer.optim_step(1e-3))
    assert 1 < len(seen) <= _TOLERATED and not any(step["skipped"] for step in seen)
    assert [step["loss_scale"] for step in seen] == [2.0 ** (22 - index) for index in range(len(seen))]
    assert not torch.equal(masters(trainer), before)
    trainer.save(tmp_path / "saved")
    resumed = make(tiny_model)
    resumed.load(tmp_path / "saved")
    assert resumed.optimizer.loss_scale == trainer.optimizer.loss_scale
    for each in (trainer, resumed):
        each.forward_backward(batch)
        each.optim_step(1e-3)
    assert torch.equal(masters(trainer), masters(resumed))


def test_a_loss_that_is_not_a_number_is_a_failure_at_once(tiny_model: str) -> None:
    trainer = make(tiny_model)
    with torch.no_grad():
        trainer.model.lm_head.weight[3] = float("nan")
    trainer.forward_backward(make_batch(rollouts(tiny_model, 4)))
    seen = trainer.optim_step(1e-3)
    assert seen["skipped"] == 1 and seen["overflowed"] == 0 and seen["grad_norm"] == -1
    assert trainer.optimizer.loss_scale == LossScale()


def test_the_engine_samples_with_the_trainers_logprobs(tiny_model: str) -> None:
    """Closer than bfloat16's: three more bits."""
    core = EngineCore(load_model(tiny_model, dtype="float16"), name="e", slots=8, context=64)
    assert core.cache.keys[0].dtype == torch.float16
    trainer = DeviceTrainer(
        load_model(tiny_model), tokenizer=load_tokenizer(tiny_model), settings=TrainSettings(), dtype=torch.float16
    )
    items = rollouts(tiny_model, 6, dtype="float16")
    trainer_metrics = trainer.forward_backward(make_batch(items))
    assert 0 < trainer_metrics["mismatch"] < 2e-3


@pytest.mark.long
@pytest.mark.parametrize("orchestrate", ["inline", "local"])
def test_a_run_in_float16(tmp_path: Path, orchestrate: str) -> None:
    sync = {"payload": "delta"}
    result = small_run(tmp_path / "run", steps=4, model={"dtype": "float16"}, orchestrate=orchestrate, sync=sync)
    rows = read_metrics(result.folder / "metrics.jsonl")
    assert result.summary["status"] == "finished" and len(rows) == 4
    assert all(row["train/loss_scale"] >= 2.0**8 and row.get("train/mismatch", 0) < 0.01 for row in rows)
