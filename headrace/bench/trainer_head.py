"""The head alone: logprobs of many rows and their gradient, against full logits in the same run."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.bench.gauge import MIB, peak_bytes, release, seconds_of
from headrace.bench.parts import say
from headrace.bench.table import Row
from headrace.bench.trainer_loads import relative_difference
from headrace.bench.trainer_speed import TOLERANCE
from headrace.model.head import AllowedTokens, Head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

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
    paths: dict[str, Callable[[Inputs], Tensor]] = {
        "ours": lambda given: head.logprobs(given.hidden, given.targets, given.temperatures, allowed=given.allowed)[0],
        "full logits": full_logprobs,
    }
    seen = {name: _forward_backward(path, inputs) for name, path in paths.items()}
    difference = relative_difference(seen["ours"], seen["full logits"])
    del seen
    if difference > TOLERANCE[load.dtype]:
        raise RuntimeError(f"{load.name}{case}: logprobs and gradients differ from those of full logits by {difference:.1e}")
    memory = {name: _beyond_gradients(path, inputs, load.device) for name, path in paths.items()}
    seconds: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(load.turns):
        for name, path in paths.items():
            _drop_gradients(inputs)
            seconds[name].append(seconds_of(lambda path=path: _backward(path, inputs), load.device))  # type: ignore[misc]
    return head_rows(f"{load.name}{case}", seconds, memory)


def head_rows(name: str, seconds: dict[str, list[float]], memory: dict[str, int]) -> list[Row]:
    """Medians of seconds, and bytes beyond inputs and gradients."""
    time_of = {who: 1e3 * statistics.median(turns) for who, turns in seconds.items()}
    size_of = {who: size / MIB for who, size in memory.items()}
    ours, theirs = "ours", "full logits"
    say(f"{name}: " + "; ".join(f"{who} {time_of[who]:.1f} ms, {size_of[who]:.0f} MiB" for who in (ours, theirs)))
    return [
        Row(f"{name}: forward and backward", time_of[ours], "ms", peers={theirs: time_of[theirs]}),
        Row(f"{name}: time ÷ full logits", time_of[ours] / time_of[theirs], "ratio", goal="≤ 1"),
        Row(f"{name}: memory", size_of[ours], "MiB", peers={theirs: size_of[theirs]}),
        Row(f"{name}: memory ÷ full logits", size_of[ours] / size_of[theirs], "ratio", goal="≤ 0.05"),
    ]


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


def _forward_backward(path: Callable[[Inputs], Tensor], inputs: Inputs) -> dict[str, Tensor]:
    """Logprobs and both gradients, to be compared."""
    _drop_gradients(inputs)
    logprobs = _backward(path, inputs)
    assert inputs.hidden.grad is not None and inputs.weight.grad is not None
    return {
        "logprobs": logprobs.detach() / logprobs.detach().norm(),
        "hidden": inputs.hidden.grad / inputs.hidden.grad.float().norm(),
        "weight": inputs.weight.grad / inputs.weight.grad.float().norm(),
    }


def _backward(path: Callable[[Inputs], Tensor], inputs: Inputs) -> Tensor:
    logprobs = path(inputs)
    logprobs.backward(inputs.upstream)
    return logprobs


def _beyond_gradients(path: Callable[[Inputs], Tensor], inputs: Inputs, device: str) -> int:
    _drop_gradients(inputs)
    peak = peak_bytes(lambda: _backward(path, inputs), device)
    assert inputs.hidden.grad is not None and inputs.weight.grad is not None
    return peak - inputs.hidden.grad.nbytes - inputs.weight.grad.nbytes


def _drop_gradients(inputs: Inputs) -> None:
    inputs.hidden.grad = inputs.weight.grad = None
