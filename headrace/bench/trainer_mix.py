"""Rollouts of very different lengths: packed by ours, padded by the peer, the same gradient from both."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.bench.engine_loads import lognormal_lengths
from headrace.bench.gauge import release, seconds_of
from headrace.bench.parts import say
from headrace.bench.table import Row
from headrace.bench.trainer_loads import LEARNING_RATE, make_batch, make_rollouts, make_trainer, pass_sizes
from headrace.bench.trainer_peers import PaddedLoop
from headrace.bench.trainer_speed import TOLERANCE, compare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.records import Batch
    from headrace.trainer import DeviceTrainer

PEERS = {"padded, as they come": False, "padded, by length": True}
"""By name, whether mini-batches are made of rollouts of like length."""


@dataclass(frozen=True)
class Mix:
    """A batch as a policy that thinks draws it: most completions are short, a few are very long."""

    rollouts: int
    prompt_tokens: int
    median: int
    """Of completions, before the cap."""
    cap: int
    budget: int
    """Tokens of a pass of ours."""
    mini_batch: int
    """Rollouts of a pass of the peer's."""
    most_tokens: int
    """Of a pass of the peer's, with padding; 0 is no limit."""
    turns: int
    goal: str = ""
    """Of our tokens a second ÷ the padded loop's."""

    @property
    def lengths(self) -> list[int]:
        """With the prompts, the same on every machine."""
        drawn = lognormal_lengths(self.rollouts, mean=self.median * float(np.exp(0.5)), sigma=1.0, cap=self.cap)
        return [self.prompt_tokens + length for length in drawn]

    @property
    def name(self) -> str:
        return f"long tail, {self.rollouts} × ({self.prompt_tokens} + {self.median} in the middle, at most {self.cap})"


def measure(mix: Mix, folder: str, *, vocabulary: int, dtype: str, device: str) -> Iterator[list[Row]]:
    """The peer is timed only where it gives the gradient that ours gives."""
    release()
    trainer = make_trainer(folder, dtype=dtype, device=device, micro_batch_tokens=mix.budget)
    rollouts = make_rollouts(mix.lengths, prompt_tokens=mix.prompt_tokens, vocabulary=vocabulary)
    advantages = np.random.default_rng(0).choice([-1.0, 1.0], size=len(rollouts)).tolist()
    batch = make_batch(trainer, rollouts, advantages=advantages)
    yield [fill_row(mix, pass_sizes(rollouts, budget=mix.budget))]
    loop = PaddedLoop(folder, dtype=dtype, device=device, mini_batch=mix.mini_batch, most_tokens=mix.most_tokens)
    difference, limit = compare(trainer, loop, batch), TOLERANCE[dtype]
    say(f"{mix.name}: {batch.num_tokens:,} tokens; gradients differ by {difference:.1e}")
    yield [Row(f"{mix.name}: gradient, relative difference", difference, "share", goal=f"≤ {limit:g}")]
    if difference <= limit:
        yield rate_rows(mix, batch.num_tokens, _take_turns(mix, trainer, loop, batch, device=device))


def _take_turns(mix: Mix, trainer: DeviceTrainer, loop: PaddedLoop, batch: Batch, *, device: str) -> dict[str, list[float]]:
    """Seconds of whole steps, in turn, after one of each that does not count; a peer that does not fit is left out."""

    def ours() -> None:
        trainer.forward_backward(batch)
        trainer.optim_step(LEARNING_RATE)

    def padded(by_length: bool) -> None:
        loop.forward_backward(batch, by_length=by_length)
        loop.optim_step()

    takes: dict[str, Callable[[], None]] = {"ours": ours}
    takes |= {name: (lambda by_length=by_length: padded(by_length)) for name, by_length in PEERS.items()}  # type: ignore[misc]
    seen: dict[str, list[float]] = {name: [] for name in takes}
    for number in range(mix.turns + 1):
        for name in list(seen):
            release()
            try:
                seconds = seconds_of(takes[name], device)
            except torch.OutOfMemoryError:
                say(f"{name}: out of memory; it is absent from the table")
                del seen[name]
                continue
            say(f"turn {number}, {name}: {seconds:.2f} s")
            if number:
                seen[name].append(seconds)
    return seen


def fill_row(mix: Mix, sizes: list[int]) -> Row:
    """Tokens ÷ room of all passes but the emptiest: the last has what is left over, whatever the packing."""
    full = sorted(sizes, reverse=True)[:-1] or sizes
    fill = sum(full) / (len(full) * mix.budget)
    say(f"{mix.name}: {len(sizes)} passes, {fill:.3f} full")
    return Row(f"{mix.name}: packing fill", fill, "share", goal="≥ 0.98", bound=1.0)


def rate_rows(mix: Mix, tokens: int, seen: dict[str, list[float]]) -> list[Row]:
    """Real tokens a second: no padding is counted for anybody."""
    rates = {name: tokens / statistics.median(seconds) for name, seconds in seen.items()}
    ours = rates.pop("ours")
    say(f"{mix.name}: " + ", ".join(f"{name} {rate:,.0f}" for name, rate in {"ours": ours, **rates}.items()) + " tokens/s")
    goals = {next(iter(PEERS)): mix.goal}
    return [
        Row(f"{mix.name}: trained", ours, "tokens/s", peers=rates),
        *(Row(f"{mix.name} ÷ {name}", ours / theirs, "ratio", goal=goals.get(name, "")) for name, theirs in rates.items()),
    ]
