"""Measures the native engine: whole loads, decode steps against memory bandwidth, scheduling, and time to first token."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from transformers import Qwen3ForCausalLM

from headrace.bench.loads import Workload
from headrace.bench.measure import seconds_of
from headrace.engine import EngineCore, HeldAdapter, Request
from headrace.model import ModelSettings, build_config, build_tokenizer, load_model, prepare
from headrace.records import Rollout, Sampling

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel


@dataclass(frozen=True)
class StepRecord:
    seconds: float
    """Since the end of the previous step, or since the first submission."""
    prompt_rows: int
    decode_rows: int
    cached_tokens: int
    """Prompt and sampled tokens of all requests before the step: what a step that decodes all of them must read."""


@dataclass(frozen=True)
class Turn:
    """One load, from its first submission to its last result."""

    seconds: float
    rollouts: tuple[Rollout, ...]
    """In the order of the workload."""
    steps: tuple[StepRecord, ...]

    @property
    def tokens_per_second(self) -> float:
        return sum(rollout.num_sampled for rollout in self.rollouts) / self.seconds


def generate(core: EngineCore, workload: Workload, *, seed: int, versions: Sequence[HeldAdapter | None] = (None,)) -> Turn:
    """Submit a whole workload and step until every request has all its tokens. Requests take turns with the versions of the
    adapter, if the model has one."""
    done: dict[str, Rollout] = {}

    def on_done(rollout: Rollout) -> None:
        done[rollout.id] = rollout

    held = itertools.cycle(versions)
    requests = [Request(*request, on_done=on_done, held=next(held)) for request in workload.requests(seed=seed)]
    prompt_tokens = sum(len(prompt) for prompt in workload.prompts)
    steps: list[StepRecord] = []
    sampled_before = core.num_sampled
    started = before = time.perf_counter()
    for request in requests:
        core.submit(request)
    while core.has_work:
        cached = prompt_tokens + core.num_sampled - sampled_before
        step = core.step()
        now = time.perf_counter()
        steps.append(StepRecord(now - before, step.prompt_rows, step.decode_rows, cached))
        before = now
    seconds = time.perf_counter() - started
    rollouts = tuple(done[request.rollout.id] for request in requests)
    lengths = tuple(rollout.num_sampled for rollout in rollouts)
    assert lengths == workload.lengths, f"{lengths} tokens were sampled where {workload.lengths} were asked for"
    return Turn(seconds, rollouts, tuple(steps))


def bytes_read(model: PreTrainedModel) -> tuple[int, int]:
    """(bytes of the weights, bytes per cached token) that a decode step must read. Untied input embeddings are looked up, not
    read whole, so they do not count."""
    config: Any = model.config.get_text_config()
    parameters = list(model.parameters())
    weights = sum(parameter.nbytes for parameter in parameters)
    inputs: Any = model.get_input_embeddings()
    outputs: Any = model.get_output_embeddings()
    if inputs.weight is not outputs.weight:
        weights -= int(inputs.weight.nbytes)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    return weights, values * parameters[0].element_size()


def copy_bandwidth(device: str, *, times: int = 10, repetitions: int = 5) -> float:
    """Bytes per second, reads plus writes, of a copy kernel; the driver's memcpy has a different speed."""
    source = torch.ones((1 << 27 if device == "cpu" else 2 << 30) // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(times):
            torch.add(source, 0, out=target)

    seconds = [seconds_of(copy, device) for _ in range(repetitions + 1)]  # the first warms up
    return 2 * source.nbytes * times / statistics.median(seconds[1:])


def scheduling_cost(*, requests: int, repetitions: int, slots: int = 256, tokens: int = 8) -> float:
    """Microseconds of this thread per request with the forward pass stubbed out: submission, admission, bookkeeping of every
    step, sampling from a vocabulary of a hundred, and building the finished rollout."""
    model = prepare(Qwen3ForCausalLM(build_config(ModelSettings(), build_tokenizer())), name="builtin:tiny")
    core = EngineCore(model, name="bench", slots=slots, context=64, num_blocks=slots * 4 + 1)
    width = int(model.config.hidden_size)

    def forward(input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=torch.zeros(*input_ids.shape, width))

    core.model.base_model.forward = forward
    seen = []
    for repetition in range(repetitions + 1):  # the first warms up
        waiting = [
            Rollout.from_prompt([2 + number % 90, 3, 4, 5], id=f"{repetition}/{number}")
            for number in range(requests if repetition else slots)
        ]
        sampling = Sampling(max_tokens=tokens)
        done: list[Rollout] = []
        started = time.thread_time()
        for number, rollout in enumerate(waiting):
            core.submit(Request(rollout, sampling.with_seed(number), on_done=done.append))
        while core.has_work:
            core.step()
        seen.append((time.thread_time() - started) / len(waiting) * 1e6)
        assert len(done) == len(waiting) and all(rollout.num_sampled == tokens for rollout in done)
    return statistics.median(seen[1:])


def first_token(given: dict[str, Any], orders: Iterator[Any]) -> Iterator[int]:
    """Runs in a child process: load a model and sample one token. The parent measures the time."""
    model = load_model(given["folder"], dtype=given["dtype"], device=given["device"])
    core = EngineCore(model, name="bench", slots=given["slots"], context=given["context"])
    turn = generate(core, Workload(prompts=((1, 2, 3, 4),), lengths=(1,)), seed=0)
    yield int(turn.rollouts[0].token_ids[-1])
