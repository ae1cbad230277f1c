"""Tests a vLLM server before a run relies on it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine.vllm.api import Piece, VllmApi, VllmRefused
from headrace.engine.vllm.handover import saved_form
from headrace.model import Head
from headrace.records import Sampling
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from headrace.engine.vllm.handover import Handover
    from headrace.records import Array

_TRY_SECONDS = 120.0
_TRIED_TOKENS = 32
_SAME, _NOISE = 1e-3, 4  # nats by which logprobs of the same weights may differ, plus this many times their noise


async def try_out(api: VllmApi, served: str, vocabulary: int) -> None:
    """Sample one token and score a prompt. A server may be paused, keep its interface closed, need another API token, or return
    logprobs of a distribution it does not sample from: each would otherwise show late or never."""
    await api.resume()
    prompt = [vocabulary // 3, vocabulary // 2, vocabulary // 5]  # the first ids may be padding
    of_two, asked = Sampling(max_tokens=1, top_k=2), min(vocabulary, 8)
    sampling = api.generate(prompt, of_two, name="try", max_tokens=1, seed=0, salt="try", num_candidates=asked, model=served)
    try:
        async with asyncio.timeout(_TRY_SECONDS):
            _check_processed(api, [piece async for piece in sampling])
            await api.prompt_logprobs(prompt, model=served, salt="try", whole=False)
    except VllmRefused as error:
        raise ConfigError(str(error)) from error
    except TimeoutError as error:
        raise ConfigError(f"vLLM at {api.url} has not sampled one token for {_TRY_SECONDS:g} s") from error


def _check_processed(api: VllmApi, pieces: list[Piece]) -> None:
    """With top_k = 2, all tokens but the two likeliest have no probability."""
    found = [each for piece in pieces for each in piece.candidates or ()]
    if len(found) != 1 or len(found[0].ids) > 4 or found[0].share < 0.999:
        raise ConfigError(
            f"vLLM at {api.url} gives the logprobs of another distribution than it samples from: it must be started with "
            f"--logprobs-mode processed_logprobs"
        )


async def try_update(api: VllmApi, served: str, way: Handover, model: PreTrainedModel, *, version: str) -> None:
    """Load the server's own weights once more, which must change nothing: some builds cannot load weights twice."""
    vocabulary = Head(model).vocabulary
    prompt = [int(token) for token in np.random.default_rng(0).integers(vocabulary // 4, vocabulary, _TRIED_TOKENS)]

    async def scored(salt: str) -> Array:
        logprobs, _ = await api.prompt_logprobs(prompt, model=served, salt=salt, whole=False)
        return logprobs

    before, again = await scored("before"), await scored("again")
    await asyncio.to_thread(lambda: way.prepare(saved_form(model)))
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
