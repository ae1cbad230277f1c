"""Opens a vLLM server as one engine of a run: starts it with the recipe's settings, or connects to a running one; tests it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
from typing import TYPE_CHECKING

import torch

from headrace.engine.kind import OpenedEngine
from headrace.engine.settings import EngineSettings
from headrace.engine.stop_strings import decoder_of, stop_tokens
from headrace.engine.vllm.api import VllmApi
from headrace.engine.vllm.call import TIES, TOGETHER
from headrace.engine.vllm.engine import VllmEngine
from headrace.engine.vllm.handover import AdapterHandover, FolderHandover, IpcHandover
from headrace.engine.vllm.kind import (
    CPU_CACHE_VARIABLE,
    WHOLE_GPU,
    choose_handover,
    cpu_cache_gigabytes,
    gpu_share,
    server_rank,
    visible_to,
)
from headrace.engine.vllm.nccl import NcclHandover
from headrace.engine.vllm.server import choose_python, end, start
from headrace.engine.vllm.server_checks import (
    ADAPTERS,
    TRANSFER,
    check_abilities,
    check_model,
    try_adapter,
    try_generate,
    try_update,
)
from headrace.model import Head, StagedWeights, adapter_of, context_limit, load_model, load_tokenizer, named_tensors
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

_MOST_VERSIONS = 16  # of an adapter in one batch; vLLM takes memory for each, and calls of further ones wait
_CPU_STEP_TOKENS = 8192  # computed in one step on a CPU, where a whole prompt must fit into one


async def open_engine(
    recipe: Recipe, model_path: str, place: EnginePlace, *, sync: WeightSync, timeline: Timeline
) -> OpenedEngine:
    """Raises `ConfigError` with the reason if the server cannot be used for this run."""
    settings, tokenizer = recipe.engine.vllm, load_tokenizer(model_path)
    model = await asyncio.to_thread(
        load_model, model_path, dtype=recipe.model.dtype, device=place.receives_on, lora=recipe.lora
    )
    adapter, base = adapter_of(model), str(model.name_or_path)
    context, vocabulary = context_limit(model, recipe.model.context), Head(model).vocabulary
    routers = check_model(recipe, model, vocabulary=vocabulary)
    stop_ids = stop_tokens(model.generation_config, tokenizer)
    way = "folder" if place.is_far else choose_handover(recipe, device=place.device.partition(":")[0])
    async with contextlib.AsyncExitStack() as on_failure:
        server = None
        if settings.urls:
            api = VllmApi(settings.urls[place.index], token=os.environ.get(settings.token_variable, ""))
            on_failure.push_async_callback(api.close)
        else:
            server = await _start(recipe, base, model, place, handover=way)
            api = server.api
            on_failure.push_async_callback(server.close)
        about, longest = await api.about(), await api.context()
        more = (*(() if way == "folder" else (TRANSFER,)), *(() if adapter is None else (ADAPTERS,)))
        check_abilities(about, server=api.url, more=more)
        if longest < context:
            raise ConfigError(
                f"vLLM at {api.url} takes {longest} tokens, the run up to {context}; set model.context = {longest}"
            )
        await try_generate(api, vocabulary, num_candidates=_most_candidates(recipe, vocabulary), routers=routers)
        handover = (
            make_handover(way, recipe, folder=place.folder.with_name(f"{place.prefix}-servers"), device=place.receives_on)
            if adapter is None
            else AdapterHandover(place.folder, adapter, base=base)
        )
        on_failure.push_async_callback(asyncio.to_thread, handover.close)
        await handover.open(api, about.version)
        staged = await asyncio.to_thread(StagedWeights, adapter or model, in_place=False)
        if adapter is not None:
            await try_adapter(api, handover, model, rank=server_rank(recipe))
        elif server is not None:
            await try_update(api, handover, model, version=about.version)
        engine = VllmEngine(
            api,
            about,
            name=place.name,
            slots=recipe.engine.slots,
            context=context,
            vocabulary=vocabulary,
            model=model,
            staged=staged,
            sync=sync,
            handover=handover,
            timeline=timeline,
            decode=decoder_of(tokenizer),
            end_ids=stop_ids,
            patience=settings.answer_seconds,
            tells_late=server is not None and not continues_over_updates(recipe),
            records_entropy=recipe.engine.record_entropy,
            routers=routers,
            keeps_leases=recipe.partial.leases,
        )
        on_failure.pop_all()
    return OpenedEngine(
        engine=engine,
        stop_ids=stop_ids,
        server_command=() if server is None else tuple(server.process.args),  # type: ignore[arg-type]  # a list
        close=lambda: None if server is None else end(server.process),  # frees its memory before a successor starts
    )


async def _start(recipe: Recipe, model_path: str, model: PreTrainedModel, place: EnginePlace, *, handover: str) -> VllmServer:
    """A server on this machine, for this run."""
    is_on_cpu, share = place.device == "cpu", 0.0
    if is_on_cpu:
        environment = {CPU_CACHE_VARIABLE: str(cpu_cache_gigabytes())}
    else:
        held = 2 * sum(tensor.nbytes for _, tensor in named_tensors(model))
        total = torch.cuda.get_device_properties(torch.device(place.device)).total_memory
        share = WHOLE_GPU if place.is_far else gpu_share(recipe, place.index, held=held, total=total)
        environment = {"CUDA_VISIBLE_DEVICES": visible_to(recipe, place)}
        if handover == "ipc":  # handles are pickled; only this user can reach the server's socket
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    arguments = server_arguments(
        recipe,
        context=min(context_limit(model, recipe.model.context) + 1, context_limit(model, 0)),  # one more is sampled to score
        candidates=Head(model).vocabulary,
        is_on_cpu=is_on_cpu,
        handover=handover,
        share=share,
    )
    adapter = adapter_of(model)
    if adapter is not None:  # not for the head: there 0.32's CPU build dies when it scores beside other calls
        layers = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in adapter.own}
        arguments += ["--lora-target-modules", *sorted(layers)]
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    settings = recipe.engine.vllm
    return await start(
        model_path,
        arguments,
        python=choose_python(settings.python),
        log=place.log,
        seconds=settings.start_seconds,
        environment=environment,
        prefix=place.prefix,
    )


def _most_candidates(recipe: Recipe, vocabulary: int) -> int:
    """Logprobs that a call may request with each token."""
    sampling = recipe.sampling
    is_unbounded = not sampling.top_k and (recipe.engine.record_entropy or sampling.top_p < 1 or sampling.min_p > 0)
    return vocabulary if is_unbounded else sampling.top_k + TIES


def make_handover(name: str, recipe: Recipe, *, folder: Path, device: str) -> Handover:
    """The handover of that name; `device` is where the engine's process holds the weights."""
    if name == "ipc":
        return IpcHandover(torch.device(device))
    if name == "nccl":
        return NcclHandover(torch.device(device), host=recipe.sync.host, deadline=recipe.sync.deadline)
    return FolderHandover(folder)


def server_arguments(
    recipe: Recipe, *, context: int, candidates: int, is_on_cpu: bool, handover: str = "folder", share: float = 0
) -> list[str]:
    """The recipe as vLLM's command line; `share` is of GPU memory (0: vLLM decides)."""
    engine = recipe.engine
    arguments: dict[str, object] = {
        "--dtype": recipe.model.dtype,
        "--max-model-len": context,
        "--max-num-seqs": engine.slots,
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": candidates,
        "--generation-config": "vllm",
        "--load-format": "safetensors",
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
    if recipe.lora.is_on:
        # In one batch: those in flight, and the new one, whose canary would otherwise wait until all calls of another end.
        versions = min(math.ceil(recipe.max_lag) + 2, _MOST_VERSIONS) if recipe.partial.leases else 1
        arguments |= {"--max-lora-rank": server_rank(recipe), "--max-loras": versions, "--max-cpu-loras": versions + 1}
    words = [word for name, value in arguments.items() for word in (name, str(value))] + ["--no-trust-remote-code"]
    words += ["--disable-uvicorn-access-log"]  # a line per call would fill the disk in a long run
    if recipe.lora.is_on:
        words += ["--enable-lora"]
    if engine.record_routing:
        words += ["--enable-return-routed-experts"]
    if is_on_cpu:  # vLLM 0.32 fails there when a prompt with a seed is computed in parts
        words += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(context, _CPU_STEP_TOKENS))]
    if is_on_cpu or not engine.graphs:
        words += ["--enforce-eager"]
    return [*words, *engine.vllm.command_line()]
