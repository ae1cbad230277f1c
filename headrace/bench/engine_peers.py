"""Peers of the engine benchmark: transformers in this process, and vLLM in a child process."""

from __future__ import annotations

import importlib.util
import os
import time
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from headrace.bench.child import Child, PeerFailed
from headrace.bench.harness import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

    from headrace.bench.loads import Workload

_START_SECONDS = 420.0
"""Time for vLLM to load, compile and capture its graphs."""
_ANSWER_SECONDS = 180.0
_VARIABLES = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def load_plain(folder: str, *, dtype: str, device: str) -> PreTrainedModel:
    """The model as transformers itself runs it."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", use_safetensors=True, trust_remote_code=False
    )
    return cast("PreTrainedModel", model.to(device).eval())


def padded_generate(model: PreTrainedModel, workload: Workload) -> float:
    """Seconds of `model.generate` on one batch, which runs until its longest request is done. It keeps no logprobs."""
    prompts = torch.tensor(workload.prompts, device=next(model.parameters()).device)  # all of one length
    longest = max(workload.lengths)
    started = time.perf_counter()
    try:
        output: Any = (
            cast("Any", model)
            .generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=_generation(longest))
            .cpu()
        )
    except Exception as error:
        raise PeerFailed(f"model.generate: {one_line(error)}") from error
    seconds = time.perf_counter() - started
    if output.shape[1] != prompts.shape[1] + longest:
        raise PeerFailed(f"model.generate: {output.shape[1]} tokens where {prompts.shape[1] + longest} were asked for")
    return seconds


def continuous_generate(model: PreTrainedModel, workload: Workload) -> float:
    """Seconds of transformers' continuous batching on requests of one length. Every call warms up, so that is included."""
    (length,) = set(workload.lengths)
    before = model.config._attn_implementation
    started = time.perf_counter()
    try:
        model.set_attn_implementation("paged|sdpa")
        outputs: Any = cast("Any", model).generate_batch(
            inputs=[list(prompt) for prompt in workload.prompts],
            generation_config=_generation(length),
            continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=0.3),  # the other engines share the GPU
        )
    except Exception as error:
        raise PeerFailed(f"model.generate_batch: {one_line(error)}") from error
    finally:
        model.set_attn_implementation(before)
    seconds = time.perf_counter() - started
    found = sum(len(output.generated_tokens) for output in outputs.values())
    if found != workload.num_tokens:
        raise PeerFailed(f"model.generate_batch: {found} tokens where {workload.num_tokens} were asked for")
    return seconds


def _generation(length: int) -> GenerationConfig:
    """The full distribution at temperature 1; only the length ends a request."""
    whole = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(**whole, max_new_tokens=length, pad_token_id=0, eos_token_id=None)


class VllmPeer(Child):
    """vLLM in a child process, loaded once."""

    def __init__(self, folder: str, *, dtype: str, context: int, slots: int, log: Path) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise PeerFailed("vLLM: not installed here")
        settings = {"model": folder, "dtype": dtype, "max_model_len": context, "max_num_seqs": slots}
        settings |= {"load_format": "safetensors", "trust_remote_code": False}
        super().__init__("vLLM", "headrace.bench.engine_peers:vllm_child", settings, log=log)
        told = self.hear(seconds=_START_SECONDS)
        self.settings = ", ".join(f"{name} = {value}" for name, value in told.items())
        """All that differ from vLLM's defaults, and its version."""

    def generate(self, workload: Workload) -> float:
        """Seconds for a whole workload."""
        order = {"prompts": workload.prompts, "lengths": workload.lengths}
        answer: dict[str, Any] = self.ask(order, seconds=_ANSWER_SECONDS)
        if answer["tokens"] != workload.num_tokens:
            raise PeerFailed(f"vLLM: {answer['tokens']} tokens where {workload.num_tokens} were asked for")
        return float(answer["seconds"])


def vllm_child(given: dict[str, Any], orders: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Runs in vLLM's process: answers each workload with its seconds and the number of tokens sampled."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    import vllm
    from vllm.inputs import TokensPrompt

    settings = {**given, "skip_tokenizer_init": True, "gpu_memory_utilization": 0.4, "enable_prefix_caching": False, "seed": 0}
    # No min_tokens: with ignore_eos only the length ends a request, and a minimum would cost a mask at every step.
    sampling = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "flat_logprobs": True, "detokenize": False}
    model = vllm.LLM(**settings)
    yield {"version": vllm.__version__, **settings, **sampling, **{name: os.environ[name] for name in _VARIABLES}}
    for order in orders:
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in order["prompts"]]
        parameters = [vllm.SamplingParams(max_tokens=length, **sampling) for length in order["lengths"]]
        started = time.perf_counter()
        outputs = model.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - started
        yield {"seconds": seconds, "tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}
