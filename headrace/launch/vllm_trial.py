"""A vLLM server tried out before a run relies on it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine import Piece, VllmApi, VllmRefused, saved_form
from headrace.model import Head
from headrace.records import Sampling
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from headrace.engine import Handover
    from headrace.records import Array

_TRY_SECONDS = 120.0
_TRIED_TOKENS = 32
_SAME, _NOISE = 1e-3, 4
"""Nats by which the same weights may differ on the same prompt, beside so many times what they do by chance."""


async def try_out(api: VllmApi, served: str, vocabulary: int) -> None:
    """One token drawn, one scored: a server may be left paused, keep its interface shut, want another token, or give the
    logprobs of another distribution than it draws from, and each would show late or not at all."""
    await api.resume()
    prompt = [vocabulary // 3, vocabulary // 2, vocabulary // 5]  # the first ids may be those of padding, and say nothing
    of_two, asked = Sampling(max_tokens=1, top_k=2), min(vocabulary, 8)
    drawing = api.generate(prompt, of_two, name="try", max_tokens=1, seed=0, salt="try", num_candidates=asked, model=served)
    try:
        async with asyncio.timeout(_TRY_SECONDS):
            _check_processed(api, [piece async for piece in drawing])
            await api.prompt_logprobs(prompt, model=served, salt="try", whole=False)
    except VllmRefused as error:
        raise ConfigError(str(error)) from error
    except TimeoutError as error:
        raise ConfigError(f"vLLM at {api.url} has not drawn one token for {_TRY_SECONDS:g} s") from error


def _check_processed(api: VllmApi, pieces: list[Piece]) -> None:
    """Of a draw from the two likeliest tokens, nothing is left to the others."""
    kept = [each for piece in pieces for each in piece.kept or ()]
    if len(kept) != 1 or len(kept[0].ids) > 4 or kept[0].share < 0.999:
        raise ConfigError(
            f"vLLM at {api.url} gives the logprobs of another distribution than it draws from: it must be started with "
            f"--logprobs-mode processed_logprobs"
        )


async def try_update(api: VllmApi, served: str, way: Handover, model: PreTrainedModel, *, version: str) -> None:
    """Give a server the weights it has, which must change nothing: some builds do not run what they are given anew."""
    vocabulary = Head(model).vocabulary
    prompt = [int(token) for token in np.random.default_rng(0).integers(vocabulary // 4, vocabulary, _TRIED_TOKENS)]

    async def scored(salt: str) -> Array:
        logprobs, _ = await api.prompt_logprobs(prompt, model=served, salt=salt, whole=False)
        return logprobs

    before, again = await scored("before"), await scored("again")
    await asyncio.to_thread(lambda: way.lay_ready(saved_form(model)))
    await api.pause("keep")
    await way.hand_over(api)
    await api.resume()
    noise, distance = (float(np.abs(each - before).max()) for each in (again, await scored("after")))
    if not distance <= _SAME + _NOISE * noise:
        raise ConfigError(
            f"engine.kind = 'vllm': vLLM {version} at {api.url} computes something else once it is given anew the weights that "
            f"it has (logprobs differ by {distance:.2g}), so it cannot be trained with; 0.32's CPU build does so with mixtures "
            f"of experts; set engine.kind = 'native'"
        )
