"""Opens a vLLM server as one engine of a run: starts it with the recipe's settings, or connects to a running one; tests it."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING

import torch

from headrace.engine.kind import OpenedEngine
from headrace.engine.settings import EngineSettings
from headrace.engine.stop_strings import decoder_of, stop_tokens
from headrace.engine.vllm.abilities import TRANSFER, check_abilities
from headrace.engine.vllm.api import VllmApi, VllmError
from headrace.engine.vllm.call_queue import Limits
from headrace.engine.vllm.engine import VllmEngine
from headrace.engine.vllm.handover import FolderHandover, IpcHandover, NcclHandover, Staging
from headrace.engine.vllm.kind import CPU_CACHE_VARIABLE, choose_handover, cpu_cache_gigabytes, gpu_share, visible_to
from headrace.engine.vllm.running_call import TOGETHER
from headrace.engine.vllm.server import choose_python, end, start
from headrace.engine.vllm.try_out import try_out, try_update
from headrace.model import Head, context_limit, load_model, load_tokenizer, named_tensors
from headrace.partial import continues_over_updates
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from headrace.config import Recipe
    from headrace.engine.kind import EnginePlace
    from headrace.engine.vllm.handover import Handover
    from headrace.engine.vllm.server import VllmServer
    from headrace.observe import Timeline
    from headrace.sync import WeightSync

_SERVED = "policy"  # the model name of servers started here
MOST_CANDIDATES = 4096  # logprobs per token at most: more than usual cut-offs keep, and few enough to send with each token
_CPU_STEP_TOKENS = 8192  # computed in one step on a CPU, where a whole prompt must fit into one


async def open_engine(
    recipe: Recipe, model_path: str, place: EnginePlace, *, sync: WeightSync, timeline: Timeline
) -> OpenedEngine:
    """Raises `ConfigError` with the reason if the server cannot be used for this run."""
    settings, tokenizer = recipe.engine.vllm, load_tokenizer(model_path)
    model = await asyncio.to_thread(load_model, model_path, dtype=recipe.model.dtype, device=place.receives_on)
    context, vocabulary = context_limit(model, recipe.model.context), Head(model).vocabulary
    candidates = min(vocabulary, MOST_CANDIDATES)
    check_sampling(recipe, vocabulary=vocabulary)
    way = choose_handover(recipe, device=place.device.partition(":")[0])
    server = None
    if settings.urls:
        api = VllmApi(settings.urls[place.index], token=os.environ.get(settings.token_variable, ""))
    else:
        arguments = server_arguments(
            recipe,
            context=min(context + 1, context_limit(model, 0)),  # to score a rollout of full length, one more token is sampled
            candidates=candidates,
            is_on_cpu=place.device == "cpu",
            handover=way,
            share=_share(recipe, place, model),
        )
        server = await _start(recipe, model_path, arguments, place, handover=way)
        api = server.api
    handover: Handover | None = None
    try:
        about = await api.about()
        check_abilities(about, server=api.url, more=() if way == "folder" else (TRANSFER,))
        served, longest = await api.served()
        if longest < context:
            raise ConfigError(
                f"vLLM at {api.url} takes {longest} tokens, the run up to {context}; set model.context = {longest}"
            )
        await try_out(api, served, vocabulary)
        limits = Limits(recipe.engine.slots, context, vocabulary, *await api.cache(), num_candidates=candidates)
        staging = await asyncio.to_thread(Staging, model, sync=sync)
        handover = make_handover(way, recipe, folder=place.folder, device=place.receives_on)
        await handover.open(api, about.version)
        if server is not None:
            await try_update(api, served, handover, model, version=about.version)
    except BaseException:
        if handover is not None:
            await asyncio.to_thread(handover.close)
        await (server.close() if server is not None else api.close())
        raise
    engine = VllmEngine(
        api,
        about,
        name=place.name,
        model=served,
        limits=limits,
        staging=staging,
        handover=handover,
        timeline=timeline,
        decode=decoder_of(tokenizer) if recipe.sampling.stop else None,
        patience=settings.answer_seconds,
        tells_late=server is not None and not continues_over_updates(recipe),
    )
    return OpenedEngine(
        engine=engine,
        stop_ids=stop_tokens(model.generation_config, tokenizer),
        server_command=() if server is None else tuple(server.process.args),  # type: ignore[arg-type]  # a list
        close=lambda: None if server is None else end(server.process),  # frees its memory before a successor starts
    )


async def _start(recipe: Recipe, model_path: str, arguments: list[str], place: EnginePlace, *, handover: str) -> VllmServer:
    if place.device == "cpu":
        environment = {CPU_CACHE_VARIABLE: str(cpu_cache_gigabytes())}
    else:
        environment = {"CUDA_VISIBLE_DEVICES": visible_to(recipe, place.index)}
        if handover == "ipc":  # handles are pickled; only a holder of the server's token can send it any
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    settings = recipe.engine.vllm
    try:
        return await start(
            model_path,
            arguments,
            python=choose_python(settings.python),
            log=place.log,
            seconds=settings.start_seconds,
            environment=environment,
        )
    except VllmError as error:
        if "No module named 'ray'" not in str(error):
            raise
        fix = "install ray in its environment, or set engine.vllm.handover = 'folder'"
        raise ConfigError(
            f"engine.vllm.handover = 'ipc': this vLLM imports ray for it, and has none; {fix} ({error})"
        ) from error


def _share(recipe: Recipe, place: EnginePlace, model: PreTrainedModel) -> float:
    """The server's share of GPU memory; 0 on a CPU."""
    if place.device == "cpu":
        return 0
    held = 2 * sum(tensor.nbytes for _, tensor in named_tensors(model))
    total = torch.cuda.get_device_properties(torch.device(place.device)).total_memory
    return gpu_share(recipe, place.index, held=held, total=total)


def make_handover(name: str, recipe: Recipe, *, folder: Path, device: str) -> Handover:
    """The handover of that name; `device` is where the engine's process holds the weights."""
    if name == "ipc":
        return IpcHandover(torch.device(device))
    if name == "nccl":
        return NcclHandover(torch.device(device), host=recipe.sync.host, deadline=recipe.sync.deadline)
    return FolderHandover(folder)


def check_sampling(recipe: Recipe, *, vocabulary: int) -> None:
    """A sampling mask is read off the logprobs that come with each token, and a large vocabulary has too many to send."""
    sampling = recipe.sampling
    is_cut = sampling.top_p < 1 or sampling.min_p > 0 or sampling.top_k > 0
    if is_cut and vocabulary > MOST_CANDIDATES and not 0 < sampling.top_k <= MOST_CANDIDATES // 2:
        raise ConfigError(
            f"sampling.top_k = {sampling.top_k}: with engine.kind = 'vllm' and a vocabulary of {vocabulary}, a cut-off needs "
            f"top_k between 1 and {MOST_CANDIDATES // 2}, to know which tokens could have been sampled"
        )


def server_arguments(
    recipe: Recipe, *, context: int, candidates: int, is_on_cpu: bool, handover: str = "folder", share: float = 0
) -> list[str]:
    """The recipe as vLLM's command line; `share` is of GPU memory (0: vLLM decides)."""
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
    if engine.block_size != EngineSettings.block_size:  # otherwise vLLM takes what its kernels prefer
        arguments["--block-size"] = engine.block_size
    if engine.kv_blocks:
        arguments["--num-gpu-blocks-override"] = engine.kv_blocks
    if not continues_over_updates(recipe):
        arguments["--stream-interval"] = TOGETHER
    if handover != "folder":
        arguments["--weight-transfer-config"] = json.dumps({"backend": handover})
    if share and not {"gpu_memory_utilization", "kv_cache_memory_bytes"} & set(engine.vllm.arguments):
        arguments["--gpu-memory-utilization"] = share
    words = [word for name, value in arguments.items() for word in (name, str(value))]
    if is_on_cpu:  # vLLM 0.32 fails there when a prompt with a seed is computed in parts
        words += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(context, _CPU_STEP_TOKENS))]
    if is_on_cpu or not engine.graphs:
        words += ["--enforce-eager"]
    return [*words, *engine.vllm.command_line()]
