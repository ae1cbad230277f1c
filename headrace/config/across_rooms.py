"""The checks that need two rooms at once: settings that are right one by one and cannot run together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.engine import VllmSettings
from headrace.settings import ConfigError, to_dict

if TYPE_CHECKING:
    from headrace.config.recipe import Recipe


def check_across_rooms(recipe: Recipe) -> None:
    """Refuse a recipe whose sections are right one by one and cannot run together."""
    buffer, lag = recipe.buffer, recipe.staleness.max_lag
    if buffer.kind == "bounded" and buffer.depth < 1:
        raise ConfigError(f"buffer.depth = {buffer.depth}: a bounded buffer holds at least 1 batch")
    if buffer.kind != "bounded" and buffer.depth:
        raise ConfigError(f"buffer.depth = {buffer.depth}: only buffer.kind = 'bounded' has a depth, not '{buffer.kind}'")
    bounded = recipe.staleness.gate or recipe.staleness.reject
    if buffer.kind == "bounded" and bounded and buffer.depth > max(lag, 1):
        raise ConfigError(
            f"buffer.depth = {buffer.depth}: a batch that waits so long lags more than staleness.max_lag = {lag}; "
            f"raise max_lag to {buffer.depth} or lower the depth"
        )
    if buffer.kind in ("one_ahead", "stream") and lag == 0 and bounded:
        raise ConfigError(f"buffer.kind = '{buffer.kind}': nothing can run ahead with staleness.max_lag = 0; set it to 1")
    _check_correction(recipe)
    _check_engine(recipe)
    if recipe.exact:
        _check_exact(recipe)
    if recipe.partial.cancel == "over_age":
        _check_cancel(recipe)
    if recipe.partial.oversample > 1:
        _check_oversample(recipe)
    if recipe.engine.sleep != "never":
        _check_sleep(recipe)
    if recipe.sampling.max_tokens >= recipe.model.context > 0:
        raise ConfigError(
            f"sampling.max_tokens = {recipe.sampling.max_tokens}: leaves no room for a prompt in model.context = "
            f"{recipe.model.context}"
        )
    _check_processes(recipe)


def _check_correction(recipe: Recipe) -> None:
    """A loss that weighs by π_prox/μ itself must not be weighed by it twice, and M2PO is its mask."""
    loss, correct = recipe.train.loss, recipe.staleness.correct
    if loss in ("decoupled_ppo", "a3po") and correct not in ("none", "opsm", "m2po"):
        raise ConfigError(
            f"staleness.correct = '{correct}': train.loss = '{loss}' has the importance weight in it; leave it 'none'"
        )
    if loss == "m2po" and correct not in ("none", "m2po"):
        raise ConfigError(
            f"staleness.correct = '{correct}': train.loss = 'm2po' brings a mask, which this would replace; leave it 'none'"
        )


def _check_engine(recipe: Recipe) -> None:
    """What the chosen engine would not look at, or cannot do."""
    engine = recipe.engine
    if engine.kind == "vllm":
        if engine.sleep != "never":
            raise ConfigError(f"engine.sleep = '{engine.sleep}': vLLM's sleep is not driven yet; leave it 'never'")
        if recipe.orchestrate == "inline":
            raise ConfigError("engine.kind = 'vllm': a server is a process of its own; set orchestrate = 'local'")
        _check_vllm(recipe)
    if engine.kind == "native":
        usual = to_dict(VllmSettings())
        for name, value in to_dict(engine.vllm).items():
            if value != usual[name]:
                raise ConfigError(
                    f"engine.vllm.{name} = {value!r}: engine.kind = 'native' does not look at it; set engine.kind = 'vllm'"
                )


def _check_vllm(recipe: Recipe) -> None:
    """What a vLLM server takes, and what would have to be done with it while it stands still."""
    temperature, settings = recipe.sampling.temperature, recipe.engine.vllm
    if not 0.01 <= temperature <= 2:
        raise ConfigError(f"sampling.temperature = {temperature}: vLLM draws at temperatures from 0.01 to 2")
    if settings.start_seconds >= recipe.deadline:
        raise ConfigError(
            f"engine.vllm.start_seconds = {settings.start_seconds:g}: a run stops after deadline = {recipe.deadline:g} s "
            f"without news; raise that first"
        )
    if recipe.stops_when_whole and recipe.partial.interrupt == "keep":
        raise ConfigError(
            "partial.interrupt = 'keep': vLLM cannot score new weights while it keeps unfinished rollouts of a synchronous "
            "run paused; set it to 'abort'"
        )


def _check_cancel(recipe: Recipe) -> None:
    """It gives up what would be rejected later: where nothing could be, it cannot mean anything."""
    setting, staleness = "partial.cancel = 'over_age'", recipe.staleness
    if not staleness.reject:
        raise ConfigError(f"{setting}: nothing is over age with staleness.reject = false; set it to true")
    if recipe.exact:
        raise ConfigError(f"{setting}: what is cancelled depends on timing, which exact = true does not allow")
    if recipe.order == "submission" and staleness.gate:
        raise ConfigError(
            f"{setting}: trained in submission order behind the gate, no group grows older than staleness.max_lag = "
            f"{staleness.max_lag}; set buffer.order = 'completion'"
        )
    if recipe.buffer_kind == "synchronous" and recipe.partial.oversample == 1:
        raise ConfigError(f"{setting}: in a synchronous run nothing is in flight when a batch is trained; leave it 'never'")


def _check_sleep(recipe: Recipe) -> None:
    setting, partial = f"engine.sleep = '{recipe.engine.sleep}'", recipe.partial
    if recipe.buffer_kind != "synchronous":
        raise ConfigError(
            f"{setting}: engines that generate while the trainer trains cannot sleep then; set staleness.max_lag = 0 or "
            f"buffer.kind = 'synchronous', or leave it 'never'"
        )
    if recipe.stops_when_whole and partial.interrupt == "keep" and partial.kv == "keep":
        raise ConfigError(
            f"{setting}: with partial.oversample = {partial.oversample:g} rollouts are in flight then, and would go on "
            f"over keys and values that were given back; set partial.interrupt = 'retract' or 'abort'"
        )


def _check_oversample(recipe: Recipe) -> None:
    setting, staleness = f"partial.oversample = {recipe.partial.oversample:g}", recipe.staleness
    if recipe.exact:
        raise ConfigError(f"{setting}: which groups are trained depends on timing, which exact = true does not allow")
    if not staleness.gate and recipe.buffer_kind != "synchronous":
        raise ConfigError(f"{setting}: with staleness.gate = false submission is not counted by batches; set gate = true")
    if recipe.order == "submission":
        raise ConfigError(f"{setting}: buffer.order = 'submission' waits for the slow groups; set it to 'completion'")
    if recipe.partial.interrupt == "drain":
        raise ConfigError(
            f"{setting}: partial.interrupt = 'drain' waits for the unfinished; set it to 'keep', 'retract' or 'abort'"
        )
    if staleness.max_lag == 0 and staleness.reject and recipe.partial.cancel == "never":
        raise ConfigError(
            f"{setting}: what goes on after a batch holds tokens of an older version, and staleness.max_lag = 0 rejects "
            f"them; set max_lag to 1 with buffer.kind = 'synchronous', or give them up with partial.cancel = 'over_age'"
        )


def _check_processes(recipe: Recipe) -> None:
    is_local, transport = recipe.orchestrate == "local", recipe.sync.transport
    if transport != "auto" and (transport != "memory") != is_local:
        raise ConfigError(
            f"sync.transport = '{transport}': does not go with orchestrate = '{recipe.orchestrate}'; leave it auto"
        )
    if transport == "cuda_ipc" and recipe.device == "cpu":
        raise ConfigError("sync.transport = 'cuda_ipc': device = 'cpu' has no GPU memory to share; leave it auto")
    if recipe.engine.count > 1 and not is_local:
        raise ConfigError(f"engine.count = {recipe.engine.count}: orchestrate = 'inline' has one engine; set it to 'local'")


def _check_exact(recipe: Recipe) -> None:
    if recipe.device == "cuda":
        raise ConfigError("device = 'cuda': exact = true is a promise about the CPU; set device = 'cpu'")
    if recipe.model.dtype != "float32":
        raise ConfigError(f"model.dtype = '{recipe.model.dtype}': exact = true needs float32")
    if recipe.engine.kind != "native":
        raise ConfigError(f"engine.kind = '{recipe.engine.kind}': exact = true needs the embedded engine; set it to 'native'")
    if recipe.engine.block_size != 16:
        raise ConfigError(f"engine.block_size = {recipe.engine.block_size}: exact = true needs 16")
    if not recipe.staleness.gate and recipe.buffer_kind == "stream":
        raise ConfigError("staleness.gate = false: exact = true with a stream needs the gate to bound what waits")
