"""The engines ours is measured against. What a peer cannot do is a `PeerFailed` with one line, never the benchmark's end."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from headrace.engine import append_call
from headrace.records import Call, FinishReason, Rollout, Sampling

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from headrace.bench.engine_loads import Workload

_START_SECONDS = 420.0
"""vLLM loads, compiles and captures its graphs in it."""
_ANSWER_SECONDS = 180.0


class PeerFailed(RuntimeError):
    """A peer is not there or did not do what was asked; the message is one line."""


def load_plain(folder: str, *, dtype: str, device: str) -> PreTrainedModel:
    """The model as transformers itself would run it."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return cast("PreTrainedModel", model.to(device).eval())


def padded_generate(model: PreTrainedModel, workload: Workload) -> float:
    """Seconds of `model.generate`: one batch, which runs until its longest request is done. It keeps no logprobs."""
    device = next(model.parameters()).device
    width = max(len(prompt) for prompt in workload.prompts)
    rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in workload.prompts]
    masks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts]
    longest = max(workload.lengths)
    started = time.perf_counter()
    try:
        drawn: Any = cast("Any", model).generate(
            torch.tensor(rows, device=device),
            attention_mask=torch.tensor(masks, device=device),
            generation_config=_generation(longest),
        )
        drawn = drawn.cpu()
    except Exception as error:
        raise PeerFailed(_one_line("model.generate", error)) from error
    seconds = time.perf_counter() - started
    if tuple(drawn.shape) != (len(rows), width + longest):
        raise PeerFailed(f"model.generate: {tuple(drawn.shape)} tokens where {(len(rows), width + longest)} were asked for")
    return seconds


def continuous_generate(model: PreTrainedModel, workload: Workload) -> float:
    """Seconds of `model.generate_batch`, transformers' own continuous batching; one length for all requests.

    Its warm-up is in them, as it is in every call a user makes.
    """
    (length,) = set(workload.lengths)
    before = model.config._attn_implementation
    config = ContinuousBatchingConfig(max_memory_percent=0.3)  # others hold some too
    started = time.perf_counter()
    try:
        model.set_attn_implementation("paged|sdpa")
        drawn: Any = cast("Any", model).generate_batch(
            inputs=[list(prompt) for prompt in workload.prompts],
            generation_config=_generation(length),
            continuous_batching_config=config,
        )
    except Exception as error:
        raise PeerFailed(_one_line("model.generate_batch", error)) from error
    finally:
        model.set_attn_implementation(before)
    seconds = time.perf_counter() - started
    found = sum(len(output.generated_tokens) for output in drawn.values())
    if found != workload.num_tokens:
        raise PeerFailed(f"model.generate_batch: {found} tokens where {workload.num_tokens} were asked for")
    return seconds


def _generation(length: int) -> GenerationConfig:
    """The whole distribution at temperature 1, and nothing that ends a request early."""
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=length, pad_token_id=0, eos_token_id=None
    )


class VllmPeer:
    """vLLM in its own process, loaded once. Every wait for it has a deadline."""

    def __init__(self, folder: str, *, dtype: str, context: int, slots: int, log: Path, memory: float = 0.4) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise PeerFailed("vLLM: not installed here")
        self._log = log
        arguments = {"dtype": dtype, "context": context, "slots": slots, "memory": memory}
        quiet = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        variables = {**quiet, **os.environ}
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.bench.vllm_peer", folder]
                + [f"--{name}={value}" for name, value in arguments.items()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=variables,
                start_new_session=True,  # its own children end with it
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            told = self._answer(_START_SECONDS)["settings"]
        except PeerFailed:
            self.close()
            raise
        told |= {name: variables[name] for name in quiet}
        self.settings = ", ".join(f"{name} = {value}" for name, value in told.items())
        """Every one that is not vLLM's default, and its version."""

    def generate(self, workload: Workload) -> float:
        """Seconds for a whole workload."""
        return float(self._ask(workload, wants_tokens=False)["seconds"])

    def rollouts(self, workload: Workload) -> list[Rollout]:
        """What it draws, with the logprobs it reports."""
        answer = self._ask(workload, wants_tokens=True)
        return [
            _drawn_rollout(f"vllm/{number}", prompt, token_ids, logprobs)
            for number, (prompt, token_ids, logprobs) in enumerate(
                zip(workload.prompts, answer["token_ids"], answer["logprobs"], strict=True)
            )
        ]

    def close(self) -> None:
        """End it and everything it started; its memory is free when this returns."""
        with contextlib.suppress(OSError):
            cast("Any", self._process.stdin).close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _ask(self, workload: Workload, *, wants_tokens: bool) -> dict[str, Any]:
        line = json.dumps({"prompts": workload.prompts, "lengths": workload.lengths, "wants_tokens": wants_tokens})
        try:
            stream = cast("Any", self._process.stdin)
            stream.write(line + "\n")
            stream.flush()
        except OSError as error:
            raise PeerFailed(self._last_words("it has ended")) from error
        answer = self._answer(_ANSWER_SECONDS)
        if answer["lengths"] != list(workload.lengths):
            raise PeerFailed(f"vLLM: {sum(answer['lengths'])} tokens where {workload.num_tokens} were asked for")
        return answer

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise PeerFailed(self._last_words(f"no answer within {seconds:.0f} s")) from None
        if not line:
            raise PeerFailed(self._last_words("it has ended"))
        return cast("dict[str, Any]", json.loads(line))

    def _read(self) -> None:
        """Passes lines on; an empty one says that no more will come."""
        for line in cast("Any", self._process.stdout):
            self._lines.put(line)
        self._lines.put("")

    def _last_words(self, what: str) -> str:
        said = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"vLLM: {what}{f': {said[-1][:200]}' if said else ''}"


def _drawn_rollout(identity: str, prompt: tuple[int, ...], token_ids: list[int], logprobs: list[float]) -> Rollout:
    start, stop = len(prompt), len(prompt) + len(token_ids)
    call = Call(
        start=start,
        stop=stop,
        engine="vllm",
        sampling=Sampling(max_tokens=len(token_ids)),
        finish_reason=FinishReason.LENGTH,
        started=0.0,
        finished=0.0,
    )
    return append_call(
        Rollout.from_prompt(list(prompt), id=identity),
        call,
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        versions=np.zeros(len(token_ids), dtype=np.int32),
        masks=[],
        policy="policy",
        lineage="",
    )


def _one_line(peer: str, error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{peer}: {type(error).__name__}: {first[:200]}"
