"""Training speed on documents of one length and on rollouts of very different lengths, beside a padded loop."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from headrace.bench.harness import Row, say, take_turns
from headrace.bench.loads import (
    LEARNING_RATE,
    gradient_of,
    lognormal_lengths,
    make_on_policy_batch,
    make_rollouts,
    make_trainer,
    relative_difference,
)
from headrace.bench.measure import GIB, held_bytes, peak_bytes, release, seconds_of
from headrace.bench.trainer_peers import PaddedLoop
from headrace.model import ModelShape, load_config, num_rows, plan_passes
from headrace.trainer import TrainSettings, predict_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.records import Batch
    from headrace.trainer import DeviceTrainer

PEAK_FLOPS = 989e12
"""Of an H100 or H200, dense bfloat16."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Of our gradient against transformers', by dtype of the products: bfloat16 rounding alone gives a few hundredths."""
PEERS = {"padded, as they come": False, "padded, by length": True}
"""By name: whether mini-batches group rollouts of similar length."""


@dataclass(frozen=True)
class Speed:
    """Documents trained in one forward and backward pass."""

    tokens: int
    document: int
    turns: int
    warmups: int
    """Steps that do not count: the first ones compile."""
    has_peer: bool
    goal: str = ""
    """For the MFU."""

    @property
    def name(self) -> str:
        return f"{self.tokens:,} tokens of {self.document:,}"


@dataclass(frozen=True)
class Turn:
    """Seconds of one step."""

    gradient: float
    optimizer: float


def measure_speed(speed: Speed, folder: str, *, dtype: str, device: str) -> Iterator[list[Row]]:
    """Memory, then tokens/s in turn with the peer."""
    release()
    before = held_bytes(device)
    trainer = make_trainer(folder, dtype=dtype, device=device, micro_batch_tokens=speed.tokens)
    vocabulary = int(trainer.model.config.get_text_config().vocab_size)
    documents = make_rollouts([speed.document] * (speed.tokens // speed.document), prompt_tokens=1, vocabulary=vocabulary)
    batch = make_on_policy_batch(trainer, documents, advantages=[1.0] * len(documents))
    step = functools.partial(_step, trainer, batch)
    passes = trainer.num_passes
    for number in range(speed.warmups):
        say(f"{speed.name}: warm-up {number}: {seconds_of(step, device):.2f} s")
    passes = (trainer.num_passes - passes) // speed.warmups
    held = held_bytes(device) - before
    peak = held + peak_bytes(step, device)
    predicted = predicted_peak(folder, tokens=speed.tokens, dtype=dtype, device=device)
    yield [
        Row(f"{speed.name}: peak memory", peak / GIB, "GiB"),
        Row(f"{speed.name}: held between steps", held / GIB, "GiB"),
        Row(f"{speed.name}: predicted peak ÷ real", predicted / peak, "ratio"),
        Row(f"{speed.name}: passes", passes, "count", goal="≤ 1"),
    ]

    def turn_of(gradient: Callable[[], object], optimizer: Callable[[], object]) -> Callable[[int], Turn]:
        return lambda _: Turn(seconds_of(gradient, device), seconds_of(optimizer, device))

    ours = turn_of(lambda: trainer.forward_backward(batch), lambda: trainer.optim_step(LEARNING_RATE))
    contestants = {"ours": ours}
    if speed.has_peer:
        loop, rows = _open_peer(speed, trainer, batch, folder, dtype=dtype, device=device)
        yield rows
        if loop is not None:
            contestants["transformers"] = turn_of(functools.partial(loop.forward_backward, batch), loop.optim_step)
    flops = flops_per_token(folder, document=speed.document) if device == "cuda" else None
    yield speed_rows(speed, take_turns(contestants, speed.turns), flops_per_token=flops)


def _step(trainer: DeviceTrainer, batch: Batch) -> None:
    trainer.forward_backward(batch)
    trainer.optim_step(LEARNING_RATE)


def predicted_peak(folder: str, *, tokens: int, dtype: str, device: str) -> int:
    """Bytes that the trainer's memory model predicts for a step, without the bare process."""
    settings, shape = TrainSettings(micro_batch_tokens=tokens), ModelShape.of(load_config(folder))
    found = predict_memory(shape, settings, dtype=dtype, tokens=tokens, on_gpu=device != "cpu")
    return int(found.total - found.process)


def _open_peer(
    speed: Speed, trainer: DeviceTrainer, batch: Batch, folder: str, *, dtype: str, device: str
) -> tuple[PaddedLoop | None, list[Row]]:
    """transformers on the same documents, and its rows; None if it does not fit or gives a different gradient."""
    name, before = f"{speed.name}: transformers", held_bytes(device)
    try:
        loop = PaddedLoop(folder, dtype=dtype, device=device, mini_batch=len(batch.rollouts))
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


def speed_rows(speed: Speed, turns: dict[str, list[Turn]], *, flops_per_token: float | None) -> list[Row]:
    """Medians of tokens/s, and the MFU if `flops_per_token` is given."""
    name, ours = speed.name, turns["ours"]
    kinds: dict[str, Callable[[Turn], float]] = {
        "forward and backward": lambda turn: turn.gradient,
        "whole step": lambda turn: turn.gradient + turn.optimizer,
    }
    rows = [Row(f"{name}: optimizer step", 1e3 * statistics.median(turn.optimizer for turn in ours), "ms")]
    for kind, pick in kinds.items():
        rates = {who: speed.tokens / statistics.median(map(pick, seen)) for who, seen in turns.items()}
        rate = rates.pop("ours")
        rows.append(Row(f"{name}: {kind}", rate, "tokens/s", peers=rates))
        rows += [Row(f"{name}: {kind} ÷ {who}", rate / theirs, "ratio") for who, theirs in rates.items()]
        if flops_per_token is not None:
            rows.append(Row(f"{name}: MFU, {kind}", rate * flops_per_token / PEAK_FLOPS, "share", goal=speed.goal, bound=1.0))
    return rows


def flops_per_token(folder: str, *, document: int) -> float:
    """6P + 6·L·n_h·d_h·S: six per weight, the tied embedding once, and causal attention over S tokens."""
    config = load_config(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    weights = sum(parameter.numel() for parameter in model.parameters())
    return float(6 * weights + 6 * text.num_hidden_layers * text.num_attention_heads * head * document)


@dataclass(frozen=True)
class Mix:
    """A batch like a reasoning policy's: most completions are short, a few are very long. A pass of ours has at most `budget`
    tokens; a pass of the peer has `mini_batch` rollouts and at most `most_tokens` tokens with padding (0: no limit)."""

    rollouts: int
    prompt_tokens: int
    median: int
    """Completion tokens, before the cap."""
    cap: int
    budget: int
    mini_batch: int
    most_tokens: int
    turns: int
    goal: str = ""
    """For our tokens/s ÷ the padded loop's."""

    @property
    def lengths(self) -> list[int]:
        """Prompts included; the same on every machine."""
        mean = self.median * float(np.exp(0.5))
        return [self.prompt_tokens + n for n in lognormal_lengths(self.rollouts, mean=mean, sigma=1.0, cap=self.cap)]

    @property
    def name(self) -> str:
        return f"long tail, {self.rollouts} × ({self.prompt_tokens} + {self.median} in the middle, at most {self.cap})"


def measure_mix(mix: Mix, folder: str, *, dtype: str, device: str) -> Iterator[list[Row]]:
    """Packed by ours, padded by the peer in two orders; a peer that runs out of memory is dropped."""
    release()
    trainer = make_trainer(folder, dtype=dtype, device=device, micro_batch_tokens=mix.budget)
    vocabulary = int(trainer.model.config.get_text_config().vocab_size)
    rollouts = make_rollouts(mix.lengths, prompt_tokens=mix.prompt_tokens, vocabulary=vocabulary)
    advantages = np.random.default_rng(0).choice([-1.0, 1.0], size=len(rollouts)).tolist()
    batch = make_on_policy_batch(trainer, rollouts, advantages=advantages)
    lengths = list(map(len, rollouts))
    passes = plan_passes(rollouts, budget=mix.budget)
    yield [fill_row(mix, [sum(num_rows(unit, lengths) for unit in units) for units in passes])]
    loop = PaddedLoop(folder, dtype=dtype, device=device, mini_batch=mix.mini_batch, most_tokens=mix.most_tokens)
    difference, limit = compare(trainer, loop, batch), TOLERANCE[dtype]
    yield [Row(f"{mix.name}: gradient, relative difference", difference, "share", goal=f"≤ {limit:g}")]
    if difference > limit:
        return

    def seconds(step: Callable[[], None]) -> Callable[[int], float]:
        def take(_: int) -> float:
            release()
            return seconds_of(step, device)

        return take

    contestants = {"ours": seconds(functools.partial(_step, trainer, batch))}
    for name, by_length in PEERS.items():
        contestants[name] = seconds(functools.partial(loop.step, batch, by_length=by_length))
    seen = take_turns(contestants, mix.turns, warmups=1, may_raise=torch.OutOfMemoryError)
    yield rate_rows(mix, batch.num_tokens, seen)


def fill_row(mix: Mix, sizes: list[int]) -> Row:
    """Tokens ÷ capacity of all passes but the emptiest, which has the remainder whatever the packing."""
    full = sorted(sizes, reverse=True)[:-1] or sizes
    fill = sum(full) / (len(full) * mix.budget)
    return Row(f"{mix.name}: packing fill", fill, "share", goal="≥ 0.98", bound=1.0)


def rate_rows(mix: Mix, tokens: int, seen: dict[str, list[float]]) -> list[Row]:
    """Tokens/s, padding not counted."""
    rates = {name: tokens / statistics.median(seconds) for name, seconds in seen.items()}
    ours = rates.pop("ours")
    goals = {next(iter(PEERS)): mix.goal}
    return [
        Row(f"{mix.name}: trained", ours, "tokens/s", peers=rates),
        *(Row(f"{mix.name} ÷ {name}", ours / theirs, "ratio", goal=goals.get(name, "")) for name, theirs in rates.items()),
    ]
