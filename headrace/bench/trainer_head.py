"""The head alone: logprobs of many rows and their gradient, against full logits in the same run.

Two paths of ours: `Head.logprobs`, whose loss comes later, and `Head.backpropagate`, which asks for the loss's derivative while
a chunk's logits are there (judged).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.bench.gauge import MIB, peak_bytes, release, seconds_of
from headrace.bench.parts import say
from headrace.bench.table import Row
from headrace.bench.trainer_loads import relative_difference
from headrace.bench.trainer_speed import TOLERANCE
from headrace.model import AllowedTokens, Head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    Path = Callable[["Inputs"], None]
    """Forward and backward; gradients are left with the inputs."""

FULL = "full logits"
_KEPT = (30, 70)
"""Tokens a sampling mask leaves in a row, at least and at most: 50 on average."""


@dataclass(frozen=True)
class HeadLoad:
    """Rows of hidden states and the head they go through."""

    rows: int
    vocabulary: int
    hidden: int
    dtype: str
    device: str
    turns: int
    sequence: int
    """Rows that a judge must see together."""
    memory_goal: str = ""
    """Of the memory beyond that of inputs and gradients, as a share of what full logits take."""

    @property
    def name(self) -> str:
        return f"head, {self.rows:,} × {self.vocabulary:,} × {self.hidden:,}"


@dataclass(frozen=True)
class Inputs:
    """What both paths are given."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    temperatures: Tensor
    allowed: AllowedTokens | None
    upstream: Tensor
    """The loss's gradient with respect to each logprob."""
    gathered: Tensor
    """[vocabulary, hidden] float32: where the judged path adds the weight's gradient, as a trainer has it do."""


CASES: dict[str, dict[str, Any]] = {
    "": {"temperature": 1.0, "is_cut": False},
    ", temperature 0.7": {"temperature": 0.7, "is_cut": False},
    ", sampling mask": {"temperature": 1.0, "is_cut": True},
}
"""By what is added to the name."""


def measure(load: HeadLoad) -> Iterator[list[Row]]:
    """All cases; where full logits do not fit, with half the rows."""
    for case, given in CASES.items():
        release()
        rows: list[Row] = []
        with contextlib.suppress(torch.OutOfMemoryError):
            rows = _measure_case(load, case, **given)
        if not rows:  # not inside `except`, where the failure still holds what it had taken
            half = dataclasses.replace(load, rows=load.rows // 2)
            say(f"{load.name}{case}: full logits do not fit; {half.rows:,} rows instead")
            release()
            rows = _measure_case(half, case, **given)
        yield rows


def _measure_case(load: HeadLoad, case: str, *, temperature: float, is_cut: bool) -> list[Row]:
    head = make_head(load)
    inputs = make_inputs(load, head, temperature=temperature, is_cut=is_cut)
    paths = make_paths(load, head, is_cut=is_cut)
    _check_same(f"{load.name}{case}", paths, inputs, limit=TOLERANCE[load.dtype])
    memory = {name: _beyond_gradients(path, inputs, load.device) for name, path in paths.items()}
    seconds: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(load.turns):
        for name, path in paths.items():
            _drop_gradients(inputs)
            seconds[name].append(seconds_of(functools.partial(path, inputs), load.device))
    return head_rows(f"{load.name}{case}", seconds, memory, memory_goal=load.memory_goal)


def make_paths(load: HeadLoad, head: Head, *, is_cut: bool) -> dict[str, Path]:
    """By name, forward and backward; full logits are the last. Rows that are cut are not judged on the way."""

    def ours(given: Inputs) -> None:
        logprobs, _ = head.logprobs(given.hidden, given.targets, given.temperatures, allowed=given.allowed)
        cast("Any", logprobs).backward(given.upstream)

    def judged(given: Inputs) -> None:
        loss = head.backpropagate(
            given.hidden,
            given.targets,
            given.temperatures,
            lambda start, stop, logprobs, entropies: given.upstream[start:stop],
            counts=[load.sequence] * (load.rows // load.sequence),
            gathered=given.gathered,
        )
        cast("Any", loss).backward()

    def full(given: Inputs) -> None:
        cast("Any", full_logprobs(given)).backward(given.upstream)

    paths: dict[str, Path] = {"": ours, ", judged": judged, FULL: full}
    return {name: path for name, path in paths.items() if not (is_cut and path is judged)}


def _check_same(name: str, paths: dict[str, Path], inputs: Inputs, *, limit: float) -> None:
    """A path that gives another gradient does other work."""
    gradients = {which: _gradients(path, inputs) for which, path in paths.items()}
    wanted = gradients.pop(FULL)
    for which, found in gradients.items():
        difference = max(relative_difference({of: found[of]}, {of: wanted[of]}) for of in wanted)
        if not difference <= limit:
            raise RuntimeError(f"{name}{which}: the gradient differs from that of full logits by {difference:.1e}")


def head_rows(name: str, seconds: dict[str, list[float]], memory: dict[str, int], *, memory_goal: str) -> list[Row]:
    """Medians of seconds, and bytes beyond inputs and gradients."""
    time_of = {who: 1e3 * statistics.median(turns) for who, turns in seconds.items()}
    size_of = {who: size / MIB for who, size in memory.items()}
    say(f"{name}: " + "; ".join(f"{who or 'ours'} {time_of[who]:.1f} ms, {size_of[who]:.0f} MiB" for who in time_of))
    rows = []
    for who in list(time_of)[:-1]:
        rows += [
            Row(f"{name}{who}: forward and backward", time_of[who], "ms", peers={FULL: time_of[FULL]}),
            Row(f"{name}{who}: time ÷ full logits", time_of[who] / time_of[FULL], "ratio", goal="≤ 1"),
            Row(f"{name}{who}: memory", size_of[who], "MiB", peers={FULL: size_of[FULL]}),
            Row(f"{name}{who}: memory ÷ full logits", size_of[who] / size_of[FULL], "ratio", goal=memory_goal),
        ]
    return rows


def make_head(load: HeadLoad) -> Head:
    """Of a model that is nothing else: one narrow layer, whose output nobody computes."""
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=load.vocabulary,
        hidden_size=load.hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(), torch.device(load.device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, load.dtype))
    return Head(model)


def make_inputs(load: HeadLoad, head: Head, *, temperature: float, is_cut: bool) -> Inputs:
    """Random rows whose logits are as far apart as a model's are."""
    random, device = np.random.default_rng(0), load.device
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        hidden = torch.randn(load.rows, load.hidden, dtype=getattr(torch, load.dtype)) * 4
        upstream = torch.randn(load.rows) / load.rows
    targets = random.integers(load.vocabulary, size=load.rows)
    return Inputs(
        hidden=hidden.requires_grad_(),
        weight=head.weight,
        targets=torch.from_numpy(targets).to(device),
        temperatures=torch.full((load.rows,), temperature, device=device),
        allowed=make_mask(targets, vocabulary=load.vocabulary, device=device) if is_cut else None,
        upstream=upstream,
        gathered=torch.zeros(head.weight.shape, dtype=torch.float32, device=device),
    )


def make_mask(targets: np.ndarray, *, vocabulary: int, device: str) -> AllowedTokens:
    """For each row its target and some others, each once and in order, as an engine records them."""
    random, rows = np.random.default_rng(1), len(targets)
    least, most = (min(limit, vocabulary) for limit in _KEPT)
    counts = random.integers(least, most, size=rows, endpoint=True)
    steps = np.concatenate([[0], np.sort(random.choice(np.arange(1, vocabulary), size=most - 1, replace=False))])
    ids = (targets[:, None] + steps[None, :]) % vocabulary
    ids[np.arange(most)[None, :] >= counts[:, None]] = vocabulary  # sorted behind those that are kept
    ids.sort(axis=1)
    kept = ids[ids < vocabulary]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return AllowedTokens(offsets=torch.from_numpy(offsets).to(device), ids=torch.from_numpy(kept).to(device))


def full_logprobs(given: Inputs) -> Tensor:
    """The obvious way: logits of all rows as float32, log-softmax, and the one value of each row that is wanted."""
    logits = F.linear(given.hidden, given.weight).float()
    if bool((given.temperatures != 1).any()):
        logits = logits / given.temperatures.unsqueeze(1)
    if given.allowed is not None:
        counts = given.allowed.offsets.diff()
        rows = torch.repeat_interleave(torch.arange(len(counts), device=logits.device), counts)
        is_cut = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
        is_cut[rows, given.allowed.ids] = False
        logits = logits.masked_fill(is_cut, float("-inf"))
    return torch.log_softmax(logits, dim=-1).gather(1, given.targets.unsqueeze(1)).squeeze(1)


def _gradients(path: Path, inputs: Inputs) -> dict[str, Tensor]:
    """Of hidden states and weight."""
    _drop_gradients(inputs)
    path(inputs)
    hidden, weight = inputs.hidden.grad, inputs.weight.grad
    assert hidden is not None
    weight = inputs.gathered.clone() if weight is None else weight.float()
    return {"hidden": hidden.float(), "weight": weight}


def _beyond_gradients(path: Path, inputs: Inputs, device: str) -> int:
    _drop_gradients(inputs)
    peak = peak_bytes(lambda: path(inputs), device)
    gradients = [tensor.grad for tensor in (inputs.hidden, inputs.weight)]
    return peak - sum(gradient.nbytes for gradient in gradients if gradient is not None)


def _drop_gradients(inputs: Inputs) -> None:
    inputs.hidden.grad = inputs.weight.grad = None
    inputs.gathered.zero_()
