"""A vLLM server as one engine of a run: started with the recipe's settings, or found where the recipe says."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.config import EngineSettings
from headrace.engine.vllm import VllmEngine, abilities
from headrace.engine.vllm.api import VllmApi, VllmError, VllmRefused
from headrace.engine.vllm.engine import Limits
from headrace.engine.vllm.server import Server, choose_python, start
from headrace.engine.vllm.weights import Staging
from headrace.model.head import Head
from headrace.model.load import ModelError, context_limit, load_model, load_tokenizer
from headrace.orchestrate.build import decoder_of, stop_tokens
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.config import Recipe
    from headrace.observe import Timeline
    from headrace.sync import WeightSync

_SERVED = "policy"
"""What a server of ours calls its model."""
_MOST_CANDIDATES = 4096
"""Logprobs that may come with one token: more than any cut-off in use keeps, and few enough to be sent with each."""
_CPU_STEP_TOKENS = 8192
"""Computed in one step on a CPU, where a prompt must fit into it whole."""
_KV_GIGABYTES = "2"
"""On a CPU, where vLLM would take half of the memory; the variable VLLM_CPU_KVCACHE_SPACE says otherwise."""


@dataclass(frozen=True)
class Place:
    """Which of the run's engines it is, and where it runs."""

    name: str
    index: int
    device: str
    log: Path
    """Of a server that is started for it."""
    handover: Path
    """The folder where it lays new weights ready for the server."""


@dataclass(frozen=True)
class Opened:
    """An engine, what it needs to be ended, and what the launcher must know of its model."""

    engine: VllmEngine
    server: Server | None
    stop_ids: tuple[int, ...]


async def open_engine(recipe: Recipe, model_path: str, place: Place, *, sync: WeightSync, timeline: Timeline) -> Opened:
    """One engine of the run. A server that cannot serve it is refused with what it said."""
    model = load_model(model_path, dtype=recipe.model.dtype, device="cpu")
    context = context_limit(model, recipe.model.context)
    vocabulary = Head(model).vocabulary
    candidates = min(vocabulary, _MOST_CANDIDATES)
    settings = recipe.engine.vllm
    server = None
    if settings.urls:
        api = VllmApi(settings.urls[place.index], token=os.environ.get(settings.token_variable, ""))
    else:
        server = await _start(recipe, model_path, place=place, context=context, candidates=candidates)
        api = server.api
    try:
        about = await api.about()
        abilities.check(about, server=api.url)
        served, longest = await api.served()
        await _try_out(api, served)
        if longest < context:
            raise ConfigError(
                f"vLLM at {api.url} takes {longest} tokens, the run up to {context}; set model.context = {longest}"
            )
        block_size, num_blocks = await api.cache()
        limits = Limits(recipe.engine.slots, context, vocabulary, block_size, num_blocks, num_candidates=candidates)
    except BaseException:
        await (server.close() if server is not None else api.close())
        raise
    tokenizer = load_tokenizer(model_path)
    engine = VllmEngine(
        api,
        about,
        name=place.name,
        model=served,
        limits=limits,
        staging=Staging(model, sync=sync, folder=place.handover),
        timeline=timeline,
        decode=decoder_of(tokenizer) if recipe.sampling.stop else None,
        patience=settings.answer_seconds,
    )
    return Opened(engine, server, stop_tokens(model, tokenizer))


async def _try_out(api: VllmApi, served: str) -> None:
    """One token: a server may have the interface and keep it shut, or want another token."""
    try:
        await api.prompt_logprobs([0, 0], model=served, salt="try", whole=False)
    except VllmRefused as error:
        raise ConfigError(str(error)) from error


async def _start(recipe: Recipe, model_path: str, *, place: Place, context: int, candidates: int) -> Server:
    settings = recipe.engine.vllm
    arguments = server_arguments(recipe, context=context, candidates=candidates, is_on_cpu=place.device == "cpu")
    try:
        return await start(
            model_path,
            [*arguments, *settings.command_line()],
            python=choose_python(settings.python),
            log=place.log,
            seconds=settings.start_seconds,
            environment=server_environment(place.device),
        )
    except VllmError as error:
        raise ModelError(str(error)) from error


def server_arguments(recipe: Recipe, *, context: int, candidates: int, is_on_cpu: bool) -> list[str]:
    """What the recipe says, in vLLM's words."""
    engine = recipe.engine
    arguments = {
        "--served-model-name": _SERVED,
        "--dtype": recipe.model.dtype,
        "--max-model-len": context,
        "--max-num-seqs": engine.slots,
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": candidates,
        "--generation-config": "vllm",
        "--seed": recipe.seed,
    }
    if engine.block_size != EngineSettings.block_size:  # otherwise it takes what its kernels like best
        arguments["--block-size"] = engine.block_size
    if engine.kv_blocks:
        arguments["--num-gpu-blocks-override"] = engine.kv_blocks
    words = [word for name, value in arguments.items() for word in (name, str(value))]
    if is_on_cpu:  # 0.32 ends there when a prompt with a seed is computed in parts
        words += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(context, _CPU_STEP_TOKENS))]
    return [*words, "--enforce-eager"] if is_on_cpu or not engine.graphs else words


def server_environment(device: str) -> dict[str, str]:
    """Which GPU it may see, or how much of the host's memory its cache takes."""
    kind, _, number = device.partition(":")
    if kind == "cuda":
        return {"CUDA_VISIBLE_DEVICES": _visible(int(number))} if number else {}
    return {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", _KV_GIGABYTES)}


def _visible(number: int) -> str:
    """The GPU that this process calls `number`."""
    seen = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    return seen[number] if seen else str(number)
