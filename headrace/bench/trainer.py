"""`headrace bench trainer`: how fast the trainer is, how close to the GPU's peak FLOP/s, how little memory it takes.

Peers take turns with ours in the same run, and figures are medians; a peer is timed only if it gives the same gradient. A GPU
is measured in bfloat16 with Qwen3-0.6B's shape, a CPU in float32 with a small model. Weights are random: neither time nor
memory depends on them.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench import trainer_head, trainer_speed
from headrace.bench.harness import default_device, run_parts
from headrace.bench.loads import MEDIUM, QWEN3_0_6B, write_random_model
from headrace.bench.trainer_head import HeadLoad
from headrace.bench.trainer_speed import Speed

if TYPE_CHECKING:
    from headrace.bench.harness import Part


@dataclass(frozen=True)
class Plan:
    """What to measure on a GPU or a CPU."""

    device: str
    dtype: str
    shape: dict[str, Any]
    speed: Speed
    long: Speed
    """Twice the tokens, also in one pass."""
    head: HeadLoad
    mix: Speed


def make_plan(device: str, *, quick: bool) -> Plan:
    """For a GPU or a CPU; `quick` takes fewer turns, and on a CPU a smaller model."""
    if device == "cuda":
        turns = 2 if quick else 5
        return Plan(
            device=device,
            dtype="bfloat16",
            shape=QWEN3_0_6B,
            speed=Speed.documents(16_384, 1024, turns=turns, warmups=3, has_peer=True, goal="≥ 0.45"),
            long=Speed.documents(32_768, 1024, turns=turns, warmups=3, has_peer=False),
            head=HeadLoad(32_768, 151_936, 1024, "bfloat16", device, turns=turns, sequence=1024, memory_goal="≤ 0.05"),
            mix=Speed.long_tail(128, 64, median=300, cap=4096 - 64, budget=16_384, mini_batch=4, turns=turns),
        )
    turns = 2 if quick else 3
    tokens, document = (512, 128) if quick else (4096, 256)
    rollouts, budget = (16, 512) if quick else (64, 2048)
    return Plan(
        device=device,
        dtype="float32",
        shape=MEDIUM | ({"num_hidden_layers": 2, "vocab_size": 1024} if quick else {}),
        speed=Speed.documents(tokens, document, turns=turns, warmups=1, has_peer=True),
        long=Speed.documents(2 * tokens, document, turns=turns, warmups=1, has_peer=False),
        head=HeadLoad(*((512, 8000, 64) if quick else (2048, 32_000, 256)), "float32", device, turns=turns, sequence=128),
        mix=Speed.long_tail(rollouts, 16, median=60, cap=512 - 16, budget=budget, mini_batch=8, turns=turns, goal="≥ 2.5"),
    )


def run(*, quick: bool, json_file: Path | None, only: str | None = None) -> int:
    """`--quick` takes fewer turns, and on a CPU smaller loads."""
    plan = make_plan(default_device(), quick=quick)
    how: dict[str, Any] = {"dtype": plan.dtype, "device": plan.device}
    with tempfile.TemporaryDirectory() as folder:

        @functools.cache
        def model() -> str:
            """Written by the first part that needs it."""
            return write_random_model(plan.shape, Path(folder), dtype=plan.dtype)

        parts: dict[str, Part] = {
            "speed": lambda: trainer_speed.measure(plan.speed, model(), **how),
            "long": lambda: trainer_speed.measure(plan.long, model(), **how),
            "head": lambda: trainer_head.measure(plan.head),
            "mix": lambda: trainer_speed.measure(plan.mix, model(), **how),
            "sharing": lambda: [trainer_speed.measure_sharing(plan.device, quick=quick)],
        }
        return run_parts("trainer", parts, only=only, quick=quick, json_file=json_file)
