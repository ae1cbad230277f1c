"""The model RL starts from: as given, built in, or fine-tuned by SFT. The last two are cached."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.utils import logging as transformers_logging

from headrace import __version__
from headrace.launch.inputs import UserInputs, fingerprint_inputs
from headrace.launch.model_cache import cache_folder, use_model
from headrace.launch.placement import choose_device
from headrace.launch.sft import optimizer_settings, run_sft
from headrace.leftovers import FOLDER_LOCK
from headrace.lora import base_of, round_weights
from headrace.model import load_plain, load_tokenizer, tiny
from headrace.settings import ConfigError, identity, to_dict

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from headrace.config import Recipe
    from headrace.launch.stop import StopRequest

_NUM_KEPT = 16
"""Models kept in the cache, besides those in use."""


@contextlib.contextmanager
def model_folder(
    recipe: Recipe, given: UserInputs, *, say: Callable[[str], None], stop: StopRequest | None = None, keep: Path | None = None
) -> Iterator[str]:
    """The folder of the model RL starts from. A cached one is not removed before the block ends. `stop` ends SFT at once,
    since it has nothing to save: `asyncio.CancelledError`. `keep`: where a model made here is copied, for checkpoints that are
    nothing without it; if it is there already, it is the model."""
    is_builtin = recipe.model.path.startswith("builtin:")
    if is_builtin and recipe.model.path != tiny.NAME:
        raise ConfigError(f"model.path = {recipe.model.path!r}: the built-in model is {tiny.NAME!r}")
    if keep is not None and keep.is_dir():
        say(f"model      kept in {keep}")
        yield str(keep)
        return
    rounded = keep if recipe.lora.is_quantized and not base_of(recipe.model.path) else None
    if not is_builtin and not recipe.sft.is_on:
        is_rounded = rounded is not None and _round_model(recipe.model.path, rounded, recipe, say)
        yield str(rounded) if is_rounded else recipe.model.path
        return
    target = cache_folder() / "warmup" / _key(recipe, given)
    if target.is_dir():
        say(f"model      cached in {target}")
    with use_model(target, lambda folder: _make(folder, recipe, given, say, stop), keep=_NUM_KEPT):
        is_rounded = rounded is not None and _round_model(str(target), rounded, recipe, say)
        if keep is not None and not is_rounded:
            copy_model(target, keep)
        yield str(keep or target)


def _round_model(path: str, target: Path, recipe: Recipe, say: Callable[[str], None]) -> bool:
    """Write a model with its weights rounded to what `lora.quantize` can hold; `target` is whole or not there. False, and
    nothing written, if they were such numbers already."""
    transformers_logging.disable_progress_bar()
    model = load_plain(path, dtype=recipe.model.dtype)
    is_changed = round_weights(model, recipe.lora, device=choose_device(recipe))
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # for the trainer: this process needs no more of it
    if not is_changed:
        return False
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    load_tokenizer(path).save_pretrained(temporary)
    temporary.rename(target)
    say(f"model      rounded to {recipe.lora.quantize} in {target}")
    return True


def copy_model(cached: Path, target: Path) -> None:
    """Copy a model out of the cache; `target` is whole or not there."""
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(cached, temporary, ignore=shutil.ignore_patterns(FOLDER_LOCK))
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


def _make(target: Path, recipe: Recipe, given: UserInputs, say: Callable[[str], None], stop: StopRequest | None) -> None:
    """Build and fine-tune a model in this folder."""
    is_builtin = recipe.model.path == tiny.NAME
    transformers_logging.disable_progress_bar()
    if is_builtin:
        tiny.build_folder(target, recipe.model, seed=recipe.seed)
    if recipe.sft.is_on:
        start = str(target) if is_builtin else recipe.model.path
        asyncio.run(_stoppable(run_sft(recipe, start, given, target, say=say), stop))


async def _stoppable(work: Coroutine[Any, Any, None], stop: StopRequest | None) -> None:
    task = asyncio.ensure_future(work)
    with contextlib.nullcontext() if stop is None else stop.cancels(task, at=1):
        await task


def _key(recipe: Recipe, given: UserInputs) -> str:
    """A hash of everything that decides the weights."""
    settings, inputs, sampling, sft = to_dict(recipe), fingerprint_inputs(recipe, given), recipe.sampling, recipe.sft
    has_examples = bool(sft.tasks) or given.sft is not None
    uses_tasks = sft.is_on and (sft.until_success > 0 or not has_examples)  # to judge success on, or to learn from
    read = ("model.", "sft", "tasks", "reward", "environment") if uses_tasks else ("model.", "sft")
    parts = {
        **{name: settings[name] for name in ("model", "sft", "seed", "exact")},
        "inputs": [content for key, (_, content) in inputs.items() if key.startswith(read)],
        "optimizer": identity(optimizer_settings(recipe), is_exact=recipe.exact),
        "versions": [torch.__version__, transformers.__version__, __version__],
    }
    if uses_tasks:
        parts |= {
            "tasks": settings["tasks"],
            "reward": [recipe.reward.weights, recipe.reward.options],
            "success_at": recipe.evaluate.success_at,
            "sampling": [sampling.max_tokens, sampling.min_tokens, sampling.stop],
        }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
