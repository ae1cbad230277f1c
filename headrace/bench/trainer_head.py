"""The LM head alone: logprobs of many rows and their gradient, against full logits in the same run.

Ours has two paths: `Head.logprobs`, whose loss comes later, and `Head.backpropagate` (judged), which calls the loss for its
derivative while it holds a chunk's logits.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.bench.harness import Row, take_turns
from headrace.bench.loads import model_shape, relative_difference
from headrace.bench.measure import MIB, peak_bytes, release, seconds_of
from headrace.bench.trainer_speed import TOLERANCE
from headrace.model import AllowedTokens, Head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

FULL = "full logits"
_ALLOWED = 50
"""Tokens that a sampling mask keeps in a row."""


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
    """Rows that the loss must see together."""
    memory_goal: str = ""
    """For memory beyond inputs and gradients ÷ that of full logits."""

    @property
    def name(self) -> str:
        return f"head, {self.rows:,} × {self.vocabulary:,} × {self.hidden:,}"


CASES: dict[str, dict[str, Any]] = {
    "": {"temperature": 1.0, "is_masked": False},
    ", temperature 0.7": {"temperature": 0.7, "is_masked": False},
    ", sampling mask": {"temperature": 1.0, "is_masked": True},
}
"""By the suffix of their rows' names."""


def measure(load: HeadLoad) -> Iterator[list[Row]]:
    """All cases."""
    for case, given in CASES.items():
        release()
        name, paths = f"{load.name}{case}", Paths(load, **given)
        paths.check(name)
        memory = {which: paths.memory(path) for which, path in paths.by_name.items()}
        contestants = {which: functools.partial(paths.seconds, path) for which, path in paths.by_name.items()}
        yield head_rows(name, take_turns(contestants, load.turns), memory, memory_goal=load.memory_goal)


def head_rows(name: str, seconds: dict[str, list[float]], memory: dict[str, int], *, memory_goal: str) -> list[Row]:
    """Medians of seconds, and bytes beyond inputs and gradients."""
    time_of = {who: 1e3 * statistics.median(turns) for who, turns in seconds.items()}
    size_of = {who: size / MIB for who, size in memory.items()}
    rows = []
    for who in list(time_of)[:-1]:
        rows += [
            Row(f"{name}{who}: forward and backward", time_of[who], "ms", peers={FULL: time_of[FULL]}),
            Row(f"{name}{who}: time ÷ full logits", time_of[who] / time_of[FULL], "ratio", goal="≤ 1"),
            Row(f"{name}{who}: memory", size_of[who], "MiB", peers={FULL: size_of[FULL]}),
            Row(f"{name}{who}: memory ÷ full logits", size_of[who] / size_of[FULL], "ratio", goal=memory_goal),
        ]
    return rows


class Paths:
    """Ways to compute the logprobs of the same random rows and their gradient."""

    def __init__(self, load: HeadLoad, *, temperature: float, is_masked: bool) -> None:
        self._load, device = load, load.device
        # Only the head of this model is used; its one narrow layer never runs.
        config = AutoConfig.for_model(**model_shape("qwen3", load.vocabulary, load.hidden, 64, 1, 1, 1, 32, 2048))
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(0)
            self.head = Head(AutoModelForCausalLM.from_config(config, dtype=getattr(torch, load.dtype)))
            torch.manual_seed(0)
            hidden = torch.randn(load.rows, load.hidden, dtype=getattr(torch, load.dtype)) * 4  # logits spread like real ones
            self._upstream = torch.randn(load.rows) / load.rows
            """The loss's gradient with respect to each logprob."""
        targets = np.random.default_rng(0).integers(load.vocabulary, size=load.rows)
        self._hidden, self._weight = hidden.requires_grad_(), self.head.weight
        self._targets = torch.from_numpy(targets).to(device)
        self._temperatures = torch.full((load.rows,), temperature, device=device)
        self._allowed = make_mask(targets, vocabulary=load.vocabulary, device=device) if is_masked else None
        self._gathered = torch.zeros(self._weight.shape, dtype=torch.float32, device=device)
        """Where the judged path accumulates the weight's gradient, as in a trainer."""
        judged = {} if is_masked else {", judged": self._judged}  # it takes no sampling mask
        self.by_name: dict[str, Callable[[], None]] = {
            "": functools.partial(self._backward, self.logprobs),
            **judged,
            FULL: functools.partial(self._backward, self.full_logprobs),
        }

    def logprobs(self) -> Tensor:
        """Logprobs from our head."""
        return self.head.logprobs(self._hidden, self._targets, self._temperatures, allowed=self._allowed)[0]

    def full_logprobs(self) -> Tensor:
        """The obvious way: float32 logits of all rows, log-softmax, and each row's target."""
        logits = F.linear(self._hidden, self._weight).float()
        if bool((self._temperatures != 1).any()):
            logits = logits / self._temperatures.unsqueeze(1)
        if self._allowed is not None:
            is_cut = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
            is_cut.scatter_(1, self._allowed.ids.view(len(logits), _ALLOWED), False)
            logits = logits.masked_fill(is_cut, float("-inf"))
        return torch.log_softmax(logits, dim=-1).gather(1, self._targets.unsqueeze(1)).squeeze(1)

    def _backward(self, logprobs: Callable[[], Tensor]) -> None:
        cast("Any", logprobs()).backward(self._upstream)

    def _judged(self) -> None:
        loss = self.head.backpropagate(
            self._hidden,
            self._targets,
            self._temperatures,
            lambda start, stop, logprobs, entropies: (self._upstream[start:stop], None),
            counts=[self._load.sequence] * (self._load.rows // self._load.sequence),
            gathered=self._gathered,
        )
        cast("Any", loss).backward()

    def check(self, name: str) -> None:
        """Raise if a path's gradient differs from that of full logits."""
        gradients = {which: self._gradients(path) for which, path in self.by_name.items()}
        wanted = gradients.pop(FULL)
        for which, found in gradients.items():
            difference = max(relative_difference({of: found[of]}, {of: wanted[of]}) for of in wanted)
            if not difference <= TOLERANCE[self._load.dtype]:
                raise RuntimeError(f"{name}{which}: the gradient differs from that of full logits by {difference:.1e}")

    def _gradients(self, path: Callable[[], None]) -> dict[str, Tensor]:
        self._drop_gradients()
        path()
        hidden, weight = self._hidden.grad, self._weight.grad
        assert hidden is not None
        return {"hidden": hidden.float(), "weight": self._gathered.clone() if weight is None else weight.float()}

    def memory(self, path: Callable[[], None]) -> int:
        """The path's peak memory without the gradients it leaves."""
        self._drop_gradients()
        peak = peak_bytes(path, self._load.device)
        gradients = (self._hidden.grad, self._weight.grad)
        return peak - sum(gradient.nbytes for gradient in gradients if gradient is not None)

    def seconds(self, path: Callable[[], None], _: int) -> float:
        """Seconds of one turn."""
        self._drop_gradients()
        return seconds_of(path, self._load.device)

    def _drop_gradients(self) -> None:
        self._hidden.grad = self._weight.grad = None
        self._gathered.zero_()


def make_mask(targets: np.ndarray, *, vocabulary: int, device: str) -> AllowedTokens:
    """Each row's target and some other tokens, sorted and distinct, as an engine records them."""
    others = np.random.default_rng(1).choice(np.arange(1, vocabulary), size=_ALLOWED - 1, replace=False)
    ids = np.sort((targets[:, None] + np.append(others, 0)) % vocabulary, axis=1)
    offsets = np.arange(len(targets) + 1) * _ALLOWED
    return AllowedTokens(offsets=torch.from_numpy(offsets).to(device), ids=torch.from_numpy(ids.ravel()).to(device))
