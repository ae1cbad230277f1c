"""A vLLM server as one engine of a run: started with the recipe's settings, or found where the recipe says."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.buffer import buffer_policy
from headrace.engine import (
    TOGETHER,
    TRANSFER,
    EngineSettings,
    FolderHandover,
    IpcHandover,
    Limits,
    NcclHandover,
    Staging,
    VllmApi,
    VllmEngine,
    VllmError,
    VllmServer,
    check_abilities,
    choose_python,
    end,
    start,
)
from headrace.launch.build import decoder_of, stop_tokens
from headrace.launch.placement import (
    CPU_CACHE_VARIABLE,
    choose_handover,
    cpu_cache_gigabytes,
    gpu_share,
    receiving_place,
    visible_to,
)
from headrace.launch.vllm_trial import try_out, try_update
from headrace.model import Head, context_limit, load_model, load_tokenizer, named_tensors
from headrace.partial import pauses_unfinished
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from headrace.config import Recipe
    from headrace.engine import Handover
    from headrace.observe import Timeline
    from headrace.sync import WeightSync

_SERVED = "policy"
"""What a server of ours calls its model."""
MOST_CANDIDATES = 4096
"""Logprobs that may come with one token: more than any cut-off in use keeps, and few enough to be sent with each."""
_CPU_STEP_TOKENS = 8192
"""Computed in one step on a CPU, where a prompt must fit into it whole."""


@dataclass(frozen=True)
class Place:
    """Which of the run's engines it is, and where it runs."""

    name: str
    index: int
    device: str
    log: Path
    """Of a server that is started for it."""
    folder: Path
    """Where it lays new weights ready, for a server that reads files."""


@dataclass(frozen=True)
class Opened:
    """An engine, what it needs to be ended, and what the launcher must know of its model."""

    engine: VllmEngine
    server: VllmServer | None
    stop_ids: tuple[int, ...]

    def end(self) -> None:
        """End the server, if it is ours, before a successor looks for room."""
        if self.server is not None:
            end(self.server.process)


async def open_engine(recipe: Recipe, model_path: str, place: Place, *, sync: WeightSync, timeline: Timeline) -> Opened:
    """One engine of the run. A server that cannot serve it is refused with what it said."""
    handover, receives_on = choose_handover(recipe), receiving_place(recipe, place.index)
    model, tokenizer = await asyncio.to_thread(_load, recipe, model_path, receives_on)
    context, vocabulary = context_limit(model, recipe.model.context), Head(model).vocabulary
    candidates = min(vocabulary, MOST_CANDIDATES)
    longest = min(context + 1, context_limit(model, 0))  # to score a rollout of full length, one token is drawn after it
    check_sampling(recipe, vocabulary=vocabulary)
    settings = recipe.engine.vllm
    server = None
    if settings.urls:
        api = VllmApi(settings.urls[place.index], token=os.environ.get(settings.token_variable, ""))
    else:
        server = await _start(
            model_path,
            server_arguments(
                recipe,
                context=longest,
                candidates=candidates,
                is_on_cpu=place.device == "cpu",
                handover=handover,
                share=_share(recipe, place, model),
            ),
            place,
            recipe,
        )
        api = server.api
    way: Handover | None = None
    try:
        about = await api.about()
        check_abilities(about, server=api.url, more=() if handover == "folder" else (TRANSFER,))
        served, longest = await api.served()
        if longest < context:
            raise ConfigError(
                f"vLLM at {api.url} takes {longest} tokens, the run up to {context}; set model.context = {longest}"
            )
        await try_out(api, served, vocabulary)
        limits = Limits(recipe.engine.slots, context, vocabulary, *await api.cache(), num_candidates=candidates)
        staging = await asyncio.to_thread(Staging, model, sync=sync)
        way = make_handover(handover, recipe, folder=place.folder, device=receives_on)
        await way.open(api, about.version)
        if server is not None:
            await try_update(api, served, way, model, version=about.version)
    except BaseException:
        if way is not None:
            await asyncio.to_thread(way.close)
        await (server.close() if server is not None else api.close())
        raise
    engine = VllmEngine(
        api,
        about,
        name=place.name,
        model=served,
        limits=limits,
        staging=staging,
        handover=way,
        timeline=timeline,
        decode=decoder_of(tokenizer) if recipe.sampling.stop else None,
        patience=settings.answer_seconds,
        tells_late=server is not None and not goes_on_over_updates(recipe),
    )
    return Opened(engine, server, stop_tokens(model.generation_config, tokenizer))


async def _start(model_path: str, arguments: list[str], place: Place, recipe: Recipe) -> VllmServer:
    settings = recipe.engine.vllm
    try:
        return await start(
            model_path,
            arguments,
            python=choose_python(settings.python),
            log=place.log,
            seconds=settings.start_seconds,
            environment=server_environment(recipe, place),
        )
    except VllmError as error:
        if "No module named 'ray'" not in str(error):
            raise
        fix = "install ray in its environment, or set engine.vllm.handover = 'folder'"
        raise ConfigError(
            f"engine.vllm.handover = 'ipc': this vLLM imports ray for it, and has none; {fix} ({error})"
        ) from error


def _load(recipe: Recipe, model_path: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load_model(model_path, dtype=recipe.model.dtype, device=device), load_tokenizer(model_path)


def _share(recipe: Recipe, place: Place, model: PreTrainedModel) -> float:
    if place.device == "cpu":
        return 0
    held = 2 * sum(tensor.nbytes for _, tensor in named_tensors(model))
    total = torch.cuda.get_device_properties(torch.device(place.device)).total_memory
    return gpu_share(recipe, place.index, held=held, total=total)


def make_handover(name: str, recipe: Recipe, *, folder: Path, device: str) -> Handover:
    """By the name of the setting; `device` is where the weights are handed over from."""
    if name == "ipc":
        return IpcHandover(torch.device(device))
    if name == "nccl":
        return NcclHandover(torch.device(device), host=recipe.sync.host, deadline=recipe.sync.deadline)
    return FolderHandover(folder)


def check_sampling(recipe: Recipe, *, vocabulary: int) -> None:
    """Which tokens could have been drawn is told by their logprobs, and those of a large vocabulary are too many to send."""
    sampling = recipe.sampling
    is_cut = sampling.top_p < 1 or sampling.min_p > 0 or sampling.top_k > 0
    if is_cut and vocabulary > MOST_CANDIDATES and not 0 < sampling.top_k <= MOST_CANDIDATES // 2:
        raise ConfigError(
            f"sampling.top_k = {sampling.top_k}: with engine.kind = 'vllm' and a vocabulary of {vocabulary}, a cut-off needs "
            f"top_k between 1 and {MOST_CANDIDATES // 2}, to know which tokens could have been drawn"
        )


def server_arguments(
    recipe: Recipe, *, context: int, candidates: int, is_on_cpu: bool, handover: str = "folder", share: float = 0
) -> list[str]:
    """What the recipe says, in vLLM's words; `share` is of the GPU's memory, 0 leaves it to vLLM."""
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
    if not goes_on_over_updates(recipe):
        arguments["--stream-interval"] = TOGETHER
    if handover != "folder":
        arguments["--weight-transfer-config"] = json.dumps({"backend": handover})
    if share and not {"gpu_memory_utilization", "kv_cache_memory_bytes"} & set(engine.vllm.arguments):
        arguments["--gpu-memory-utilization"] = share
    words = [word for name, value in arguments.items() for word in (name, str(value))]
    if is_on_cpu:  # 0.32 ends there when a prompt with a seed is computed in parts
        words += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(context, _CPU_STEP_TOKENS))]
    if is_on_cpu or not engine.graphs:
        words += ["--enforce-eager"]
    return [*words, *engine.vllm.command_line()]


def goes_on_over_updates(recipe: Recipe) -> bool:
    """Whether a call may draw with weights that came while it ran: then each token must be heard of before they come, from
    servers that do not say later which weights drew it."""
    is_idle_then = buffer_policy(recipe).takes_turns and not pauses_unfinished(recipe)
    return recipe.partial.interrupt in ("keep", "retract") and not is_idle_then


def server_environment(recipe: Recipe, place: Place) -> dict[str, str]:
    """Which GPUs it may see, or how much of the host's memory its cache takes."""
    if not place.device.startswith("cuda"):
        return {CPU_CACHE_VARIABLE: str(cpu_cache_gigabytes())}
    variables = {"CUDA_VISIBLE_DEVICES": visible_to(recipe, place.index)}
    if choose_handover(recipe) == "ipc":  # handles are pickled, and only who has its token can send it any
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return variables
