"""Checks that involve several rooms: settings that are valid one by one but cannot run together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.buffer import buffer_policy, check_buffer
from headrace.engine import check_engine_kind
from headrace.partial import check_unfinished, pauses_unfinished
from headrace.settings import ConfigError
from headrace.staleness import check_correction
from headrace.sync import transport_class

if TYPE_CHECKING:
    from headrace.config.recipe import Recipe


def check_across_rooms(recipe: Recipe) -> None:
    """Raise `ConfigError` if sections contradict each other."""
    check_buffer(recipe)
    check_correction(recipe)
    check_engine_kind(recipe)
    if recipe.exact:
        _check_exact(recipe)
    check_unfinished(recipe)
    if recipe.engine.sleeps:
        _check_sleep(recipe)
    if recipe.sampling.max_tokens >= recipe.model.context > 0:
        raise ConfigError(
            f"sampling.max_tokens = {recipe.sampling.max_tokens}: leaves no room for a prompt in model.context = "
            f"{recipe.model.context}"
        )
    _check_processes(recipe)


def _check_sleep(recipe: Recipe) -> None:
    setting, partial = f"engine.sleep = '{recipe.engine.sleep}'", recipe.partial
    if not buffer_policy(recipe).takes_turns:
        raise ConfigError(
            f"{setting}: engines that generate while the trainer trains cannot sleep then; set staleness.max_lag = 0 or "
            f"buffer.kind = 'synchronous', or leave it 'never'"
        )
    if pauses_unfinished(recipe) and partial.pausing.keeps_kv:
        raise ConfigError(
            f"{setting}: with partial.oversample = {partial.oversample:g} rollouts are in flight then, and would "
            f"continue over a KV cache that was given back; set partial.interrupt = 'retract' or 'abort'"
        )


def _check_processes(recipe: Recipe) -> None:
    transport = recipe.sync.transport
    if transport != "auto":
        chosen, setting = transport_class(transport), f"sync.transport = '{transport}'"
        if chosen.crosses_processes == recipe.is_inline:
            raise ConfigError(f"{setting}: does not go with orchestrate = '{recipe.orchestrate}'; leave it auto")
        if chosen.needs_gpu and recipe.device == "cpu":
            raise ConfigError(f"{setting}: device = 'cpu' has no GPU memory to share; leave it auto")
    if recipe.engine.count > 1 and recipe.is_inline:
        raise ConfigError(f"engine.count = {recipe.engine.count}: orchestrate = 'inline' has one engine; set it to 'local'")


def _check_exact(recipe: Recipe) -> None:
    if recipe.device == "cuda":
        raise ConfigError("device = 'cuda': exact = true is a promise about the CPU; set device = 'cpu'")
    if recipe.model.dtype != "float32":
        raise ConfigError(f"model.dtype = '{recipe.model.dtype}': exact = true needs float32")
    if recipe.engine.block_size != 16:
        raise ConfigError(f"engine.block_size = {recipe.engine.block_size}: exact = true needs 16")
    if not recipe.staleness.gate and buffer_policy(recipe).max_batches is None:
        raise ConfigError("staleness.gate = false: exact = true needs the gate where the buffer has no bound")
