"""Training speed and memory on documents of one length and on rollouts of very different lengths, beside a padded loop; what
sharing a group's prompt saves, and how full passes are."""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
import timeit
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from headrace.bench.harness import Row, say, take_turns
from headrace.bench.loads import (
    LEARNING_RATE,
    QWEN3_0_6B,
    SMALL,
    gradient_of,
    lognormal_lengths,
    make_batch,
    make_group,
    make_on_policy_batch,
    make_rollouts,
    make_trainer,
    relative_difference,
    write_random_model,
)
from headrace.bench.measure import GIB, held_bytes, peak_bytes, release, seconds_of
from headrace.bench.trainer_peers import PaddedLoop
from headrace.model import ModelShape, load_config, num_rows, plan_passes
from headrace.trainer import TrainSettings, predict_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from headrace.model import Unit
    from headrace.records import Batch
    from headrace.trainer import DeviceTrainer

PEAK_FLOPS = 989e12
"""Of an H100 or H200, dense bfloat16."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Of our gradient against transformers', by dtype of the products: bfloat16 rounding alone gives a few hundredths."""
_BUDGET = 16384
_MEAN = 500
"""Mean tokens of a completion in the long tail; prompts have half as many."""


@dataclass(frozen=True)
class Speed:
    """Rollouts to train on. A pass of ours has at most `budget` tokens, a pass of the peer `mini_batch` rollouts."""

    name: str
    lengths: Sequence[int]
    """Prompts included."""
    prompt_tokens: int
    budget: int
    turns: int
    warmups: int = 1
    """Steps that do not count: the first ones compile."""
    mini_batch: int = 0
    peers: Mapping[str, bool] = field(default_factory=dict)
    """By name: whether its mini-batches group rollouts of similar length."""
    goals: Mapping[str, str] = field(default_factory=dict)
    """For `MFU`, `passes`, `fill`, and the ratio to a peer (its name)."""

    @classmethod
    def documents(cls, tokens: int, length: int, *, turns: int, warmups: int, has_peer: bool, goal: str = "") -> Speed:
        """Documents of one length in one forward and backward pass; `goal` is for the MFU."""
        count = tokens // length
        peers = {"peers": {"transformers": False}, "mini_batch": count} if has_peer else {}
        goals = {"MFU": goal, "passes": "≤ 1"}
        return cls(f"{tokens:,} tokens of {length:,}", [length] * count, 1, tokens, turns, warmups, goals=goals, **peers)  # type: ignore[arg-type]

    @classmethod
    def long_tail(
        cls, count: int, prompt_tokens: int, *, median: int, cap: int, budget: int, mini_batch: int, turns: int, goal: str = ""
    ) -> Speed:
        """A batch like a reasoning policy's: most completions are short, a few are very long. `goal` is for the ratio to a
        padded loop over rollouts as they come."""
        lengths = lognormal_lengths(count, mean=median * float(np.exp(0.5)), sigma=1.0, cap=cap)
        return cls(
            f"long tail, {count} × ({prompt_tokens} + {median} in the middle, at most {cap})",
            [prompt_tokens + length for length in lengths],
            prompt_tokens,
            budget,
            turns,
            mini_batch=mini_batch,
            peers={"padded, as they come": False, "padded, by length": True},
            goals={"padded, as they come": goal, "fill": "≥ 0.98"},
        )


def measure(speed: Speed, folder: str, *, dtype: str, device: str) -> Iterator[list[Row]]:
    """Memory, then tokens/s in turn with the peer; one that runs out of memory or gives another gradient is dropped."""
    release()
    before = held_bytes(device)
    trainer = make_trainer(folder, dtype=dtype, device=device, micro_batch_tokens=speed.budget)
    vocabulary = int(trainer.model.config.get_text_config().vocab_size)
    rollouts = make_rollouts(speed.lengths, prompt_tokens=speed.prompt_tokens, vocabulary=vocabulary)
    advantages = np.random.default_rng(0).choice([-1.0, 1.0], size=len(rollouts)).tolist()
    batch = make_on_policy_batch(trainer, rollouts, advantages=advantages)

    def step() -> None:
        trainer.forward_backward(batch)
        trainer.optim_step(LEARNING_RATE)

    for number in range(speed.warmups):
        say(f"{speed.name}: warm-up {number}: {seconds_of(step, device):.2f} s")
    held = held_bytes(device) - before
    peak = held + peak_bytes(step, device)
    passes = plan_passes(rollouts, budget=speed.budget)
    fill = packing_fill(passes, speed.lengths, speed.budget)
    settings, shape = TrainSettings(micro_batch_tokens=speed.budget), ModelShape.of(load_config(folder))
    predicted = predict_memory(shape, settings, dtype=dtype, tokens=speed.budget, on_gpu=device != "cpu")
    yield [
        Row(f"{speed.name}: peak memory", peak / GIB, "GiB"),
        Row(f"{speed.name}: held between steps", held / GIB, "GiB"),
        Row(f"{speed.name}: predicted peak ÷ real", (predicted.total - predicted.process) / peak, "ratio"),
        Row(f"{speed.name}: passes", len(passes), "count", goal=speed.goals.get("passes", "")),
        Row(f"{speed.name}: packing fill", fill, "share", goal=speed.goals.get("fill", ""), bound=1.0),
    ]

    def turn_of(gradient: Callable[[], object], optimizer: Callable[[], object]) -> Callable[[int], tuple[float, float]]:
        return lambda _: (seconds_of(gradient, device), seconds_of(optimizer, device))

    contestants = {"ours": turn_of(lambda: trainer.forward_backward(batch), lambda: trainer.optim_step(LEARNING_RATE))}
    if speed.peers:
        loop, rows = _open_peer(speed, trainer, batch, folder, dtype=dtype, device=device)
        yield rows
        if loop is not None:
            for name, by_length in speed.peers.items():
                gradient = functools.partial(loop.forward_backward, batch, by_length=by_length)
                contestants[name] = turn_of(gradient, loop.optim_step)
    flops = flops_of(folder, speed.lengths) if device == "cuda" else None
    yield speed_rows(speed, take_turns(contestants, speed.turns, warmups=1, may_raise=torch.OutOfMemoryError), flops=flops)


def packing_fill(passes: Sequence[Sequence[Unit]], lengths: Sequence[int], budget: int) -> float:
    """Tokens ÷ capacity of all passes but the emptiest, which has the remainder whatever the packing."""
    sizes = sorted(sum(num_rows(unit, lengths) for unit in units) for units in passes)
    full = sizes[1:] or sizes
    return sum(full) / (len(full) * budget)


def _open_peer(
    speed: Speed, trainer: DeviceTrainer, batch: Batch, folder: str, *, dtype: str, device: str
) -> tuple[PaddedLoop | None, list[Row]]:
    """transformers on the same rollouts, and its rows; None if it does not fit or gives a different gradient."""
    name, before = f"{speed.name}: transformers", held_bytes(device)
    try:
        loop = PaddedLoop(folder, dtype=dtype, device=device, mini_batch=speed.mini_batch)
        difference = compare(trainer, loop, batch)
        held = held_bytes(device) - before
        peak = held + peak_bytes(lambda: loop.step(batch), device)
    except torch.OutOfMemoryError as error:
        say(f"{name}: out of memory, it is absent from the table: {str(error).splitlines()[0][:120]}")
        return None, []
    return loop if difference <= TOLERANCE[dtype] else None, [
        Row(f"{name}: gradient, relative difference", difference, "share", goal=f"≤ {TOLERANCE[dtype]:g}"),
        Row(f"{name}: peak memory", peak / GIB, "GiB"),
    ]


def compare(trainer: DeviceTrainer, loop: PaddedLoop, batch: Batch) -> float:
    """The relative difference of our gradient and the peer's on the same weights; both then take the same step."""
    trainer.forward_backward(batch)
    ours = gradient_of(trainer)
    trainer.optim_step(LEARNING_RATE)
    loop.forward_backward(batch)
    difference = relative_difference(ours, loop.gradient())
    loop.optim_step()
    return difference


def speed_rows(speed: Speed, turns: dict[str, list[tuple[float, float]]], *, flops: float | None) -> list[Row]:
    """Medians of tokens/s, padding not counted, and the MFU if the batch's `flops` are given. A turn is the seconds of the
    gradient and of the optimizer's step."""
    name, tokens = speed.name, sum(speed.lengths)
    rows = [Row(f"{name}: optimizer step", 1e3 * statistics.median(optimizer for _, optimizer in turns["ours"]), "ms")]
    for kind, num_parts in (("forward and backward", 1), ("whole step", 2)):
        rates = {who: tokens / statistics.median(sum(turn[:num_parts]) for turn in seen) for who, seen in turns.items()}
        rate = rates.pop("ours")
        rows.append(Row(f"{name}: {kind}", rate, "tokens/s", peers=rates))
        for who, theirs in rates.items():
            goal = speed.goals.get(who, "") if kind == "whole step" else ""
            rows.append(Row(f"{name}: {kind} ÷ {who}", rate / theirs, "ratio", goal=goal))
        if flops is not None:
            used = rate / tokens * flops / PEAK_FLOPS
            rows.append(Row(f"{name}: MFU, {kind}", used, "share", goal=speed.goals.get("MFU", ""), bound=1.0))
    return rows


def flops_of(folder: str, lengths: Sequence[int], *, is_frozen: bool = False) -> float:
    """6P per token and 6·L·n_h·d_h·S² per sequence of S tokens: six per weight, the tied embedding once, and causal
    attention. Frozen weights, beside an adapter, have no gradient: 4P."""
    config = load_config(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    weights = sum(parameter.numel() for parameter in model.parameters())
    attention = text.num_hidden_layers * text.num_attention_heads * head * sum(length**2 for length in lengths)
    return float((4 if is_frozen else 6) * weights * sum(lengths) + 6 * attention)


@dataclass(frozen=True)
class Case:
    """Groups of one shape, and a model to train on them."""

    model: dict[str, Any]
    dtype: str
    siblings: int
    prompt: int
    completion: int
    num_groups: int

    @property
    def bound(self) -> float:
        """G(P + R) ÷ (P + GR): rows without sharing ÷ rows with sharing."""
        own = self.siblings * self.completion
        return (self.siblings * self.prompt + own) / (self.prompt + own)

    @property
    def name(self) -> str:
        return f"{self.siblings} siblings × ({self.prompt} + {self.completion})"


_SHAPE = {**SMALL, "hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "tie_word_embeddings": False}
_ON_CPU = Case(_SHAPE, "float32", siblings=8, prompt=256, completion=64, num_groups=2)
_ON_GPU = Case(QWEN3_0_6B, "bfloat16", siblings=8, prompt=1024, completion=256, num_groups=16)


def measure_sharing(device: str, *, quick: bool) -> list[Row]:
    """The gain of sharing and its bound, the difference of the two gradients, packing fill and planning time."""
    case = _ON_CPU if device == "cpu" else _ON_GPU
    return [*_gain(case, device=device, quick=quick), *_fill(num_groups=128 if quick else 1250)]


def _gain(case: Case, *, device: str, quick: bool) -> list[Row]:
    """Forward and backward of one batch, planning and packing included, with and without sharing."""
    lengths, rollouts = (case.completion,) * case.siblings, []
    for number in range(1 if quick else case.num_groups):
        rollouts += make_group(str(number), case.prompt, lengths, vocabulary=case.model["vocab_size"], seed=number)
    batch = make_batch(rollouts, advantages=[1.0] * len(rollouts), loss="reinforce")
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_model(case.model, Path(folder), dtype="float32")
        how: dict[str, Any] = {"dtype": case.dtype, "device": device, "micro_batch_tokens": _BUDGET}
        apart, shared = (make_trainer(path, **how, share_prefixes=share) for share in (False, True))

    def seconds(trainer: DeviceTrainer) -> float:
        found = seconds_of(lambda: trainer.forward_backward(batch), device)
        trainer.optim_step(LEARNING_RATE)  # drops the gradient
        return found

    (gains,) = take_turns({"": lambda _: seconds(apart) / seconds(shared)}, 2 if quick else 8, warmups=1).values()
    gain = statistics.median(gains)
    rows = [
        Row(f"sharing, {case.name}: gain", gain, "×", bound=case.bound),
        Row(f"sharing, {case.name}: gain ÷ bound", gain / case.bound, "", goal="≥ 0.85"),
    ]
    if case.dtype == "float32":
        for trainer in (apart, shared):
            trainer.forward_backward(batch)
        difference = relative_difference(gradient_of(shared), gradient_of(apart))
        rows.append(Row("sharing: relative difference of gradients", difference, "", goal="≤ 1e-5"))
    return rows


def _fill(*, num_groups: int) -> list[Row]:
    """Pack groups whose completions have a long tail."""
    siblings, rollouts, rows = 8, [], []
    prompts = lognormal_lengths(num_groups, mean=_MEAN / 2, sigma=0.5, cap=_BUDGET // 4, seed=1)
    completions = lognormal_lengths(num_groups * siblings, mean=_MEAN, sigma=1.0, cap=_BUDGET // 2)
    for group, prompt in enumerate(prompts):
        own = completions[group * siblings : (group + 1) * siblings]
        rollouts += make_group(str(group), prompt, own, vocabulary=1000, seed=group)
    for share, what in ((False, "apart"), (True, "shared")):
        plan = functools.partial(plan_passes, rollouts, budget=_BUDGET, share=share)
        seconds = timeit.repeat(plan, number=1, repeat=5, timer=time.thread_time)  # CPU time, since the machine may be busy
        fill, title = packing_fill(plan(), list(map(len, rollouts)), _BUDGET), f"packing, {len(rollouts)} rollouts, {what}"
        rows.append(Row(f"packing, long tail, {what}: fill", 100 * fill, "%", goal="≥ 98"))
        rows.append(Row(f"{title}: planning", 1e3 * statistics.median(seconds), "ms", goal="≤ 200"))
    return rows
