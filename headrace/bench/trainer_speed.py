"""How fast documents of one length are trained, how much of the GPU's arithmetic that is, and how much memory it takes."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.bench.gauge import GIB, held_bytes, peak_bytes, release, seconds_of
from headrace.bench.parts import say
from headrace.bench.table import Row
from headrace.bench.trainer_loads import (
    LEARNING_RATE,
    gradient_of,
    make_batch,
    make_rollouts,
    make_trainer,
    predicted_peak,
    relative_difference,
)
from headrace.bench.trainer_peers import PaddedLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.records import Batch
    from headrace.trainer import DeviceTrainer

    Verbs = tuple[Callable[[], object], Callable[[], object]]
    """Gradient and optimizer step."""
PEAK_FLOPS = 989e12
"""Of one H100 or H200, dense bfloat16."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Of our gradient against transformers', by what products are made in: rounding alone leaves some hundredths in bfloat16."""


@dataclass(frozen=True)
class Speed:
    """What is trained in one forward and backward pass."""

    tokens: int
    document: int
    turns: int
    warmups: int
    """Steps before the first that is timed: the first ones compile."""
    has_peer: bool
    goal: str = ""
    """Of the share of the GPU's arithmetic."""

    @property
    def name(self) -> str:
        return f"{self.tokens:,} tokens of {self.document:,}"


@dataclass(frozen=True)
class Turn:
    """Seconds of one step."""

    gradient: float
    optimizer: float

    @property
    def both(self) -> float:
        return self.gradient + self.optimizer


def measure(speed: Speed, folder: str, *, dtype: str, device: str) -> Iterator[list[Row]]:
    """Rows of one size; the peer's memory is measured apart, its time in turn with ours."""
    release()
    before = held_bytes(device)
    trainer = make_trainer(folder, dtype=dtype, device=device, micro_batch_tokens=speed.tokens)
    vocabulary = int(AutoConfig.from_pretrained(folder).get_text_config().vocab_size)
    documents = make_rollouts([speed.document] * (speed.tokens // speed.document), prompt_tokens=1, vocabulary=vocabulary)
    batch = make_batch(trainer, documents, advantages=[1.0] * len(documents))
    passes = trainer.num_passes

    def step() -> None:
        trainer.forward_backward(batch)
        trainer.optim_step(LEARNING_RATE)

    for number in range(speed.warmups):
        say(f"{speed.name}: warm-up {number}: {seconds_of(step, device):.2f} s")
    passes = (trainer.num_passes - passes) // speed.warmups
    held = held_bytes(device) - before
    peak = held + peak_bytes(step, device)
    yield [
        *_memory_rows(speed, held, peak, folder, dtype=dtype, device=device),
        Row(f"{speed.name}: passes", passes, "count", goal="≤ 1"),
    ]
    rivals: dict[str, Verbs] = {"ours": (lambda: trainer.forward_backward(batch), lambda: trainer.optim_step(LEARNING_RATE))}
    peer = _open_peer(speed, trainer, batch, folder, dtype=dtype, device=device) if speed.has_peer else None
    if peer is not None:
        yield peer.rows
        if peer.loop is not None:
            rivals["transformers"] = (functools.partial(peer.loop.forward_backward, batch), peer.loop.optim_step)
    turns: dict[str, list[Turn]] = {who: [] for who in rivals}
    for _ in range(speed.turns):
        for who, (gradient, optimizer) in rivals.items():
            turns[who].append(Turn(seconds_of(gradient, device), seconds_of(optimizer, device)))
    flops = flops_per_token(folder, document=speed.document) if device == "cuda" else None
    yield speed_rows(speed, turns, flops_per_token=flops)


@dataclass(frozen=True)
class _Peer:
    loop: PaddedLoop | None
    """None where it does other work than ours."""
    rows: list[Row]


def _open_peer(speed: Speed, trainer: DeviceTrainer, batch: Batch, folder: str, *, dtype: str, device: str) -> _Peer | None:
    """transformers on the same documents, once it is shown to give the same gradient; nothing where it does not fit."""
    name, before = f"{speed.name}: transformers", held_bytes(device)
    try:
        loop = PaddedLoop(folder, dtype=dtype, device=device, mini_batch=len(batch.rollouts))
        difference = compare(trainer, loop, batch)
        held = held_bytes(device) - before

        def step() -> None:
            loop.forward_backward(batch)
            loop.optim_step()

        peak = held + peak_bytes(step, device)
    except torch.OutOfMemoryError as error:
        say(f"{name}: out of memory, it is absent from the table: {str(error).splitlines()[0][:120]}")
        return None
    rows = [
        Row(f"{name}: gradient, relative difference", difference, "share", goal=f"≤ {TOLERANCE[dtype]:g}"),
        Row(f"{name}: peak memory", peak / GIB, "GiB"),
    ]
    say(f"{name}: gradient differs by {difference:.1e}, peak {peak / GIB:.1f} GiB")
    return _Peer(loop if difference <= TOLERANCE[dtype] else None, rows)


def compare(trainer: DeviceTrainer, loop: PaddedLoop, batch: Batch) -> float:
    """How far our gradient is from the peer's, on the same weights; then both take the same step."""
    trainer.forward_backward(batch)
    ours = gradient_of(trainer)
    trainer.optim_step(LEARNING_RATE)
    loop.forward_backward(batch)
    difference = relative_difference(ours, loop.gradient())
    loop.optim_step()
    return difference


def speed_rows(speed: Speed, turns: dict[str, list[Turn]], *, flops_per_token: float | None) -> list[Row]:
    """Medians of the turns: tokens a second, and the share of the GPU's arithmetic where `flops_per_token` are known."""
    name, ours = speed.name, turns["ours"]
    kinds: dict[str, Callable[[Turn], float]] = {
        "forward and backward": lambda turn: turn.gradient,
        "whole step": lambda turn: turn.both,
    }
    rows = [Row(f"{name}: optimizer step", 1e3 * statistics.median(turn.optimizer for turn in ours), "ms")]
    for kind, pick in kinds.items():
        rates = {who: speed.tokens / statistics.median(map(pick, seen)) for who, seen in turns.items()}
        rate = rates.pop("ours")
        rows.append(Row(f"{name}: {kind}", rate, "tokens/s", peers=rates))
        rows += [Row(f"{name}: {kind} ÷ {who}", rate / theirs, "ratio") for who, theirs in rates.items()]
        if flops_per_token is not None:
            rows.append(Row(f"{name}: MFU, {kind}", rate * flops_per_token / PEAK_FLOPS, "share", goal=speed.goal, bound=1.0))
        said = ", ".join(f"{who} {theirs:,.0f}" for who, theirs in rates.items())
        say(f"{name}: {kind} {rate:,.0f} tokens/s{', ' if said else ''}{said}")
    return rows


def flops_per_token(folder: str, *, document: int) -> float:
    """6P + 6·L·n_h·d_h·S: six for each weight, the tied embedding once, and causal attention over S tokens."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    weights = sum(parameter.numel() for parameter in model.parameters())
    return float(6 * weights + 6 * text.num_hidden_layers * text.num_attention_heads * head * document)


def _memory_rows(speed: Speed, held: int, peak: int, folder: str, *, dtype: str, device: str) -> list[Row]:
    say(f"{speed.name}: peak {peak / GIB:.2f} GiB, of which {held / GIB:.2f} are held between steps")
    rows = [
        Row(f"{speed.name}: peak memory", peak / GIB, "GiB"),
        Row(f"{speed.name}: held between steps", held / GIB, "GiB"),
    ]
    predicted = predicted_peak(folder, tokens=speed.tokens, dtype=dtype, device=device)
    if predicted is not None:
        rows.append(Row(f"{speed.name}: predicted peak ÷ real", predicted / peak, "ratio"))
    return rows
