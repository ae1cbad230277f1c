"""What a run needs of a vLLM server: read from the description of its interface (OpenAPI), and tried before the run starts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine.vllm.api import MaskIncomplete, VllmRefused
from headrace.engine.vllm.handover import saved_form
from headrace.engine.vllm.score import MOST_SCORED
from headrace.model import Head, ModelError, adapter_of, find_readable_routers
from headrace.records import Sampling
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from headrace.config import Recipe
    from headrace.engine.vllm.api import ServerInfo, VllmApi
    from headrace.engine.vllm.handover import Handover
    from headrace.model import Routers
    from headrace.records import Array

_TRY_SECONDS = 120.0
_TRIED_TOKENS = 32
_UNTRAINED = "untrained"  # of the weights that a server is started with, among those handed over
_SAME, _NOISE = 1e-3, 4  # nats by which logprobs of the same weights may differ, plus this many times their noise


@dataclass(frozen=True)
class Ability:
    """Something a server must do, and how its interface shows that it can."""

    what: str
    since: str
    """The first release that can."""
    signs: tuple[str, ...]
    """Paths, and fields of messages as `message.field`."""

    def is_in(self, about: ServerInfo) -> bool:
        return about.interface.issuperset(self.signs)


NEEDED = (  # by every run
    Ability("tokens in and tokens out", "0.14", ("/inference/v1/generate",)),
    Ability("pausing with rollouts in flight (VLLM_SERVER_DEV_MODE=1 opens it)", "0.15", ("/pause",)),
    Ability("new weights from a folder (VLLM_SERVER_DEV_MODE=1 opens it)", "0.14", ("/collective_rpc",)),
    Ability("dropping the KV cache (VLLM_SERVER_DEV_MODE=1 opens it)", "0.14", ("/reset_prefix_cache",)),
    Ability("a prefix cache kept apart by version", "0.14", ("GenerateRequest.cache_salt",)),
)
NAME_VERSION = Ability(
    "the weight version of every token", "0.32", ("/update_weight_version", "GenerateTokensStreamChoice.weight_versions")
)
TRANSFER = Ability("new weights from GPU memory (VLLM_SERVER_DEV_MODE=1 opens it)", "0.21", ("/start_weight_update",))

ADAPTERS = Ability(
    "adapters loaded while it runs (VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora open it)",
    "0.14",
    ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)


def check_abilities(about: ServerInfo, *, server: str, more: tuple[Ability, ...] = ()) -> None:
    """Refuse a server that lacks what every run needs, or `more`."""
    lacking = [ability for ability in (*NEEDED, *more) if not ability.is_in(about)]
    if lacking:
        told = "; ".join(f"{ability.what} (vLLM {ability.since} can)" for ability in lacking)
        raise ConfigError(f"vLLM {about.version} at {server} cannot do what this run needs: {told}")


def check_model(recipe: Recipe, model: PreTrainedModel, *, vocabulary: int) -> Routers | None:
    """Refuse an adapter that no server gets, and to record what no server can tell of this model; returns its routers if the
    experts of tokens are recorded."""
    sampling, adapter = recipe.sampling, adapter_of(model)
    if adapter is not None and (told := adapter.beyond_linear):
        raise ConfigError(
            f"{told}: vLLM servers get adapters of linear layers only; leave it out, or set engine.kind = 'native'"
        )
    if (
        recipe.engine.record_entropy
        and vocabulary > MOST_SCORED
        and not (sampling.top_k or sampling.top_p < 1 or sampling.min_p)
    ):
        raise ConfigError(
            f"engine.record_entropy = true: for that a vLLM server must list every token that could be sampled, which are all "
            f"{vocabulary:,}, and at most {MOST_SCORED:,} are requested; set sampling.top_k, top_p or min_p, or engine.kind = "
            f"'native'"
        )
    if not recipe.engine.record_routing:
        return None
    routers = find_readable_routers(model)
    if routers is None:
        raise ModelError(
            f"engine.record_routing = true: {recipe.model.path} has no experts whose routing can be read; leave it false"
        )
    return routers


async def try_generate(api: VllmApi, vocabulary: int, *, num_candidates: int = 8, routers: Routers | None = None) -> None:
    """Sample one token, with as many candidates as the run may need, and score a prompt. A server may be paused, keep its
    interface closed, need another API token, give too few logprobs, or those of a distribution it does not sample from: each
    would otherwise show late or never."""
    await api.resume()
    prompt = [vocabulary // 3, vocabulary // 2, vocabulary // 5]  # the first ids may be padding
    of_two, asked = Sampling(max_tokens=1, top_k=2), min(vocabulary, num_candidates)
    pieces = api.generate(prompt, of_two, max_tokens=1, salt="try", num_candidates=asked)
    try:
        async with asyncio.timeout(_TRY_SECONDS):
            told = [piece async for piece in pieces]
            masks = [mask for piece in told for mask in piece.masks or ()]
            if len(masks) != 1 or masks[0] is None or len(masks[0]) > 4:  # all but the two likeliest should have no probability
                raise MaskIncomplete
            await api.prompt_logprobs(prompt, salt="try", whole=False)
    except MaskIncomplete as error:
        raise ConfigError(
            f"vLLM at {api.url} gives the logprobs of another distribution than it samples from: it must be started with "
            f"--logprobs-mode processed_logprobs"
        ) from error
    except VllmRefused as error:
        fix = f"; it must be started with --max-logprobs {asked} or more" if "max allowed" in str(error) else ""
        raise ConfigError(f"{error}{fix}") from error
    except TimeoutError as error:
        raise ConfigError(f"vLLM at {api.url} has not sampled one token for {_TRY_SECONDS:g} s") from error
    if routers is not None:
        shape = next((piece.routing.shape for piece in told if piece.routing is not None), None)
        if shape is None:
            raise ConfigError(
                f"engine.record_routing = true: vLLM at {api.url} streams no experts; it must be started with "
                f"--enable-return-routed-experts, and 0.32 can; or leave it false"
            )
        if len(shape) != 3 or shape[0] != len(prompt) or shape[1] <= routers.layers[-1] or shape[2] != routers.top_k:
            raise ConfigError(
                f"engine.record_routing = true: vLLM at {api.url} streams experts as {list(shape)} for {len(prompt)} tokens, "
                f"but the model has {routers.top_k} for each token in decoder layers up to {routers.layers[-1]}; leave it false"
            )


async def try_adapter(api: VllmApi, way: Handover, model: PreTrainedModel, *, rank: int) -> None:
    """Load the adapter as it is before training, and use it once: whether a server takes adapters, of that rank and for these
    layers, its interface does not say."""
    adapter = adapter_of(model)
    assert adapter is not None
    await asyncio.to_thread(way.prepare, dict(adapter.own), name=_UNTRAINED)
    try:
        await way.offer(api)
        await way.hand_over(api)
        await api.prompt_logprobs([0, 1], salt="try", whole=False, adapter=way.adapter)
    except VllmRefused as error:
        raise ConfigError(
            f"{error}; a server for this run needs --enable-lora, --max-lora-rank {rank}, access to that folder, and layers of "
            f"lora.targets that it supports adapters for"
        ) from error


async def try_update(api: VllmApi, way: Handover, model: PreTrainedModel, *, version: str) -> None:
    """Load the server's own weights once more, which must change nothing: some builds cannot load weights twice."""
    vocabulary = Head(model).vocabulary
    prompt = np.random.default_rng(0).integers(vocabulary // 4, vocabulary, _TRIED_TOKENS).tolist()

    async def scored(salt: str) -> Array:
        logprobs, _ = await api.prompt_logprobs(prompt, salt=salt, whole=False)
        return logprobs

    before, again = await scored("before"), await scored("again")
    await asyncio.to_thread(lambda: way.prepare(saved_form(model), name=_UNTRAINED))
    await api.pause("keep")
    await way.hand_over(api)
    await api.resume()
    noise, distance = (float(np.abs(each - before).max()) for each in (again, await scored("after")))
    if not distance <= _SAME + _NOISE * noise:
        raise ConfigError(
            f"engine.kind = 'vllm': vLLM {version} at {api.url} computes something else once the weights it has are loaded "
            f"again (logprobs differ by {distance:.2g}), so it cannot be trained with; 0.32's CPU build does so with mixtures "
            f"of experts; set engine.kind = 'native'"
        )
