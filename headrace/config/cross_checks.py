"""Checks that involve several rooms: settings that are valid one by one but cannot run together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.buffer import buffer_policy, check_buffer, needs_gate
from headrace.config.stream_parts import whole_batch_reasons
from headrace.engine import check_engine_kind
from headrace.envs import TOOL_TIMEOUT
from headrace.partial import check_unfinished, pauses_unfinished
from headrace.settings import ConfigError
from headrace.staleness import check_correction, check_staleness, max_untrained_groups
from headrace.sync import transport_class
from headrace.trainer import TrainSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.config.recipe import Recipe


def check_across_rooms(recipe: Recipe) -> None:
    """Raise `ConfigError` if sections contradict each other."""
    check_buffer(recipe)
    check_correction(recipe)
    check_engine_kind(recipe)
    check_unfinished(recipe)
    problem = next(_problems(recipe), None)
    if problem is not None:
        raise ConfigError(problem)
    check_staleness(recipe)


def _problems(recipe: Recipe) -> Iterator[str]:
    engine, partial, transport = recipe.engine, recipe.partial, recipe.sync.transport
    if (parts := recipe.train.stream_parts) > 1:
        yield from (f"train.stream_parts = {parts}: {why}; set it to 1" for why in whole_batch_reasons(recipe))
    try:
        TrainSettings(schedule=recipe.sft.schedule)
    except ConfigError as error:
        yield f"sft.{error}"
    seconds = recipe.environment.options.get("tool_timeout", TOOL_TIMEOUT) if recipe.environment.tools else 0.0
    if isinstance(seconds, int | float) and seconds * 4 >= recipe.deadline:
        yield (
            f"environment.options.tool_timeout = {seconds:g}: an episode without a generate call for a quarter of deadline = "
            f"{recipe.deadline:g} fails, before the tool does; set it below, or deadline higher"
        )
    if recipe.exact:
        if recipe.device == "cuda":
            yield "device = 'cuda': exact = true is a promise about the CPU; set device = 'cpu'"
        if recipe.model.dtype != "float32":
            yield f"model.dtype = '{recipe.model.dtype}': exact = true needs float32"
        if engine.block_size != 16:
            yield f"engine.block_size = {engine.block_size}: exact = true needs 16"
        if not recipe.staleness.is_gated and buffer_policy(recipe).max_batches is None:
            given = f"staleness.gate = '{recipe.staleness.gate}'"
            yield f"{given}: exact = true needs gate = 'depth' where the buffer has no bound"
    if (setting := needs_gate(recipe)) and max_untrained_groups(recipe) is None:
        yield f"{setting}: it counts the groups that the gate lets be submitted and untrained, and there is no gate"
    if engine.sleeps and not buffer_policy(recipe).takes_turns:
        yield (
            f"engine.sleep = '{engine.sleep}': engines that generate while the trainer trains cannot sleep then; set "
            f"staleness.max_lag = 0 or buffer.kind = 'synchronous', or leave it 'never'"
        )
    if engine.sleeps and pauses_unfinished(recipe) and partial.pausing.keeps_kv:
        yield (
            f"engine.sleep = '{engine.sleep}': with partial.oversample = {partial.oversample:g} rollouts are in flight then, "
            f"and would continue over a KV cache that was given back; set partial.interrupt = 'retract' or 'abort'"
        )
    if recipe.reward.overlong_buffer > recipe.sampling.max_tokens:
        given = f"reward.overlong_buffer = {recipe.reward.overlong_buffer:g}"
        yield f"{given}: is longer than a completion, sampling.max_tokens = {recipe.sampling.max_tokens}"
    for section, most in (("", recipe.sampling.max_tokens), ("evaluate.", recipe.evaluate.sampling.max_tokens)):
        if most >= recipe.model.context > 0:
            given = f"{section}sampling.max_tokens = {most}"
            yield f"{given}: leaves no room for a prompt in model.context = {recipe.model.context}"
    if 0 < recipe.evaluate.sampling.max_tokens < recipe.sampling.min_tokens:
        given = f"evaluate.sampling.max_tokens = {recipe.evaluate.sampling.max_tokens}"
        yield f"{given}: must be ≥ sampling.min_tokens = {recipe.sampling.min_tokens}, or 0 to take sampling.max_tokens"
    if transport != "auto":
        chosen, setting = transport_class(transport), f"sync.transport = '{transport}'"
        if chosen.crosses_processes == recipe.is_inline:
            yield f"{setting}: does not go with orchestrate = '{recipe.orchestrate}'; leave it auto"
        if recipe.cluster.listen and not chosen.between_hosts:
            yield f"{setting}: does not reach the hosts that may join (cluster.listen); leave it auto"
        if recipe.cluster.trainer_joins and chosen.between_hosts not in ("", transport):
            yield f"{setting}: no engine is on the host of a trainer that joins (cluster.trainer_joins); leave it auto"
        if chosen.needs_gpu and recipe.device == "cpu":
            yield f"{setting}: device = 'cpu' has no GPU memory to share; leave it auto"
    if recipe.lora.is_on and recipe.train.reference_every:
        given = f"train.reference_every = {recipe.train.reference_every}"
        yield f"{given}: with [lora] the reference is the policy without its adapter, which does not change; leave it 0"
    if recipe.lora.is_on and recipe.train.parameters:
        yield "train.parameters: with [lora] only the adapter is trained; choose its layers with lora.targets"
    if recipe.filter.max_tied < 1 and recipe.train.group_size < 2:
        yield f"filter.max_tied = {recipe.filter.max_tied:g}: a group of one is never tied; set train.group_size to 2 or more"
    if recipe.filter.max_tied < 1 and recipe.buffer.is_by_episode:
        yield f"filter.max_tied = {recipe.filter.max_tied:g}: an episode alone is never tied; set buffer.unit = 'group'"
    if recipe.sampler.is_learnable and recipe.train.group_size < 2:
        yield "sampler.kind = 'learnable': a task is judged by how siblings differ; set train.group_size to 2 or more"
    yield from _problems_with_places(recipe)


def _problems_with_places(recipe: Recipe) -> Iterator[str]:
    engine = recipe.engine
    if recipe.is_on_ray and not recipe.cluster.listen:
        yield "orchestrate = 'ray': set cluster.listen to HOST:0, with the address of this host that Ray's nodes reach"
    if recipe.cluster.trainer_joins and not recipe.cluster.listen:
        yield "cluster.trainer_joins = true: set cluster.listen to HOST:PORT, where the trainer's hosts join"
    if recipe.cluster.listen and recipe.is_inline:
        yield f"cluster.listen = {recipe.cluster.listen!r}: orchestrate = 'inline' has one engine; set it to 'local'"
    if not engine.count and (recipe.is_on_ray or recipe.is_inline or not recipe.cluster.listen):
        yield "engine.count = 0: hosts must join with engines (orchestrate = 'local', cluster.listen); set it to 1 or more"
    if engine.max_count and not recipe.is_on_ray:
        yield f"engine.max_count = {engine.max_count}: only Ray finds room for more engines; set orchestrate = 'ray'"
    if engine.count > 1 and recipe.is_inline:
        yield f"engine.count = {engine.count}: orchestrate = 'inline' has one engine; set it to 'local'"
