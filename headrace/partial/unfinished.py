"""Groups still in flight when a batch is taken: whether they are paused while it is trained, and when they are cancelled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.buffer import buffer_policy, is_in_submission_order
from headrace.partial.interrupt import Interrupt
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.config import Recipe


def pauses_unfinished(recipe: Recipe) -> bool:
    """Whether rollouts in flight are paused while a batch is trained: in a synchronous run that oversamples."""
    return buffer_policy(recipe).takes_turns and recipe.partial.extra_groups(recipe.train.groups_per_batch) > 0


def engines_take_turns(recipe: Recipe) -> bool:
    """Whether engines stop while a batch is trained, and must be told to resume."""
    return pauses_unfinished(recipe) or recipe.engine.sleeps


def continues_over_updates(recipe: Recipe) -> bool:
    """Whether one generate call may sample with old and new weights."""
    is_idle = buffer_policy(recipe).takes_turns and not pauses_unfinished(recipe)
    return recipe.partial.pausing in (Interrupt.KEEP, Interrupt.RETRACT) and not is_idle


def is_over_age(oldest: int, *, next_version: int, max_lag: int) -> bool:
    """Whether a token of version `oldest` is too old for every batch to come. `next_version` is the first version for which no
    batch has been taken. A group in flight is trained at that version or later, so its lag is at least `next_version - oldest`:
    if over age, it is sure to be rejected (`staleness.reject`); otherwise it may still be trained."""
    return next_version - oldest > max_lag


def check_unfinished(recipe: Recipe) -> None:
    """Refuse a `[partial]` that would have no effect, or not the one it promises."""
    if recipe.partial.cancels:
        _check_cancel(recipe)
    if recipe.partial.oversample > 1:
        _check_oversample(recipe)


def _check_cancel(recipe: Recipe) -> None:
    setting, staleness = f"partial.cancel = '{recipe.partial.cancel}'", recipe.staleness
    if not staleness.reject:
        raise ConfigError(f"{setting}: nothing is over age with staleness.reject = false; set it to true")
    if recipe.exact:
        raise ConfigError(f"{setting}: what is cancelled depends on timing, which exact = true does not allow")
    if is_in_submission_order(recipe) and staleness.gate:
        raise ConfigError(
            f"{setting}: trained in submission order behind the gate, no group grows older than staleness.max_lag = "
            f"{staleness.max_lag}; set buffer.order = 'completion'"
        )
    if buffer_policy(recipe).takes_turns and recipe.partial.oversample == 1:
        raise ConfigError(f"{setting}: in a synchronous run nothing is in flight when a batch is trained; leave it 'never'")


def _check_oversample(recipe: Recipe) -> None:
    setting, staleness = f"partial.oversample = {recipe.partial.oversample:g}", recipe.staleness
    if recipe.exact:
        raise ConfigError(f"{setting}: which groups are trained depends on timing, which exact = true does not allow")
    if not staleness.gate and not buffer_policy(recipe).takes_turns:
        raise ConfigError(f"{setting}: with staleness.gate = false submission is not counted by batches; set gate = true")
    if is_in_submission_order(recipe):
        raise ConfigError(f"{setting}: buffer.order = 'submission' waits for the slow groups; set it to 'completion'")
    if recipe.partial.pausing.waits_for_rollouts:
        raise ConfigError(
            f"{setting}: partial.interrupt = '{recipe.partial.interrupt}' waits for the unfinished; set it to 'keep', "
            f"'retract' or 'abort'"
        )
    if staleness.max_lag == 0 and staleness.reject and not recipe.partial.cancels:
        raise ConfigError(
            f"{setting}: what continues after a batch holds tokens of an older version, and staleness.max_lag = 0 rejects "
            f"them; set max_lag to 1 with buffer.kind = 'synchronous', or give them up with partial.cancel = 'over_age'"
        )
