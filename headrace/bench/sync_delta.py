"""How small and how fast the delta between two versions is, for `headrace bench sync`.

The versions are a trainer's: float32 weights, stepped by AdamW with real gradients and moments, in bfloat16 as engines hold
them. The learning rate decides how many weights a step changes, so there is a case for each of several rates. The goals apply
to one more case, at the rate that changes about 1 % of the weights.

A model saved in bfloat16 starts with every weight in the middle of its rounding interval: its first steps change fewer weights
than later ones.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from headrace.bench.harness import Row, take_turns
from headrace.bench.loads import SMALL, SMOLLM2_135M, finished, make_batch, make_trainer, write_random_model
from headrace.bench.measure import TEXTS, timed
from headrace.model import load_tokenizer, named_tensors, served_dtype
from headrace.records import Rollout
from headrace.sync import delta
from headrace.trainer import TrainSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


LEARNING_RATES = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5)


@dataclass(frozen=True)
class Case:
    """One step and its delta."""

    learning_rate: float
    num_changed: int
    changed: float
    """Share of the weights."""
    full_bytes: int
    num_bytes: int
    seconds: dict[str, float]
    """Of encoding it, applying it, and copying all weights with as many threads."""


def measure(*, model: str | None, quick: bool, device: str = "cpu") -> list[Row]:
    """The model in a folder, or a random one in SmolLM2-135M's shape; `quick` takes a small one and fewer turns."""
    steps = _Steps(model, SMALL if quick else SMOLLM2_135M, device=device)
    for _ in range(2 if quick else 6):  # until the optimizer's moments cover several gradients
        steps.step(TrainSettings().learning_rate)
    turns = 3 if quick else 11
    cases = [_measure_case(steps, rate, turns) for rate in (LEARNING_RATES[1::2] if quick else LEARNING_RATES)]
    judged = _measure_case(steps, _rate_for(cases, 0.01), turns)
    goals = {} if quick else {"ratio": "≥ 120", **({"speed": "≥ 0.25"} if device == "cpu" else {})}
    return [row for case in cases for row in _rows(steps.name, case, {})] + _rows(steps.name, judged, goals)


def _rows(name: str, case: Case, goals: dict[str, str]) -> list[Row]:
    title, seconds = f"delta of {name}, lr {case.learning_rate:.2g}", case.seconds
    share = seconds["copy"] / (seconds["encode"] + seconds["apply"])
    speed = {what: case.full_bytes / 1e9 / spent for what, spent in seconds.items()}
    return [
        Row(f"{title}: weights changed", 100 * case.changed, "%"),
        Row(f"{title}: full ÷ delta", case.full_bytes / case.num_bytes, "×", goals.get("ratio", "")),
        Row(f"{title}: size per changed weight", 8 * case.num_bytes / max(case.num_changed, 1), "bits"),
        Row(f"{title}: encode", speed["encode"], "GB/s", peers={"copy": speed["copy"]}),
        Row(f"{title}: apply", speed["apply"], "GB/s", peers={"copy": speed["copy"]}),
        Row(f"{title}: both, share of a copy's speed", share, "share", goals.get("speed", "")),
    ]


def _rate_for(cases: Sequence[Case], share: float) -> float:
    """The learning rate that changes this share of the weights, by log-log interpolation."""
    rates = np.log([case.learning_rate for case in cases])
    shares = np.log([max(case.changed, 1e-9) for case in cases])
    return float(np.exp(np.interp(np.log(share), shares, rates)))


def _measure_case(steps: _Steps, learning_rate: float, turns: int) -> Case:
    """Take one step, then time its delta and a plain copy in turn."""
    base = steps.wire()
    steps.step(learning_rate)
    now = steps.wire()
    pairs = list(zip(base, now, strict=True))
    held = [flat.clone() for flat in base]
    blob = delta.encode(pairs)
    actions = {
        "copy": lambda: [kept.copy_(flat) for kept, flat in zip(held, base, strict=True)],
        "encode": lambda: delta.encode(pairs),
        "apply": lambda: delta.apply(blob, held),
    }
    seen = take_turns({name: timed(action, steps.device) for name, action in actions.items()}, turns)
    if not all(torch.equal(kept.view(torch.uint8), flat.view(torch.uint8)) for kept, flat in zip(held, now, strict=True)):
        raise RuntimeError(f"the delta of a step at learning rate {learning_rate:g} does not give the weights after it")
    num_changed = sum(int(torch.count_nonzero(old != new)) for old, new in pairs)
    return Case(
        learning_rate,
        num_changed,
        num_changed / sum(flat.numel() for flat in now),
        full_bytes=sum(flat.nbytes for flat in now),
        num_bytes=len(blob),
        seconds={name: statistics.median(seconds) for name, seconds in seen.items()},
    )


class _Steps:
    """A trainer of float32 weights, and what it would publish."""

    def __init__(self, model: str | None, shape: dict[str, Any], *, device: str = "cpu") -> None:
        """Trains the model in a folder on text, or else a random one of this shape on random tokens."""
        random = np.random.default_rng(0)
        with tempfile.TemporaryDirectory() as folder:
            if model is None:
                write_random_model(shape, Path(folder), dtype="float32")
                texts = list(random.integers(1, shape["vocab_size"], (8, 48), dtype=np.int32))
            else:
                tokenizer = cast("Any", load_tokenizer(model))
                texts = [np.array(tokenizer(text)["input_ids"], dtype=np.int32) for text in TEXTS]
            self._trainer = make_trainer(model or folder, dtype="float32", device=device)
        self._model, self._random, self.device = self._trainer.model, random, device
        self._rollouts: list[Rollout] = []
        for number, text in enumerate(texts):  # the second half of each counts as sampled
            prompt, rest = np.split(text, [len(text) // 2])
            self._rollouts.append(finished(Rollout.from_prompt(prompt, id=str(number)), rest, logprobs=0.0))
        count = sum(tensor.numel() for _, tensor in named_tensors(self._model))
        name, place = "the model given" if model else "a random model", ", on the GPU" if device != "cpu" else ""
        self.name = f"{name}, {count / 1e6:.3g}M weights{place}"

    def step(self, learning_rate: float) -> None:
        """A policy-gradient step on the second half of each text, with advantages normalized as in a group."""
        advantages = self._random.normal(size=len(self._rollouts))
        advantages = (advantages - advantages.mean()) / advantages.std()
        self._trainer.forward_backward(make_batch(self._rollouts, advantages=advantages, loss="reinforce"))
        self._trainer.optim_step(learning_rate)

    def wire(self) -> list[Tensor]:
        """The weights as a bfloat16 engine holds them, one flat tensor per dtype."""
        flats: dict[torch.dtype, list[Tensor]] = {}
        for name, tensor in named_tensors(self._model):
            dtype = served_dtype(self._model, name, tensor, torch.bfloat16)
            flats.setdefault(dtype, []).append(tensor.to(dtype).reshape(-1))
        return [torch.cat(parts) for parts in flats.values()]
