"""What is unfinished when a batch is taken or a run stops: whether groups in flight are paused while a batch is trained, when
they are cancelled, and how much of a partial rollout can be resumed after a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.buffer import buffer_policy, is_in_submission_order
from headrace.partial.settings import Interrupt
from headrace.records import FinishReason, Source
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.config import Recipe
    from headrace.records import Rollout
    from headrace.sync import Lineage


def pauses_unfinished(recipe: Recipe) -> bool:
    """Whether rollouts in flight are paused while a batch is trained: in a synchronous run that oversamples."""
    return buffer_policy(recipe).takes_turns and recipe.partial.extra_groups(recipe.train.groups_per_batch) > 0


def engines_take_turns(recipe: Recipe) -> bool:
    """Whether engines stop while a batch is trained, and must be told to resume."""
    return pauses_unfinished(recipe) or recipe.engine.sleeps


def continues_over_updates(recipe: Recipe) -> bool:
    """Whether one generate call may sample with old and new weights. A synchronous run has none in flight when it updates, but
    one that buffers single episodes may: a lost one is replaced by a whole group."""
    is_idle = buffer_policy(recipe).takes_turns and not pauses_unfinished(recipe) and not recipe.buffer.is_by_episode
    return recipe.partial.pausing in (Interrupt.KEEP, Interrupt.RETRACT) and not is_idle


def check_unfinished(recipe: Recipe) -> None:
    """Refuse a `[partial]` that would have no effect, or not the one it promises."""
    partial, staleness, takes_turns = recipe.partial, recipe.staleness, buffer_policy(recipe).takes_turns
    if partial.leases and recipe.lora.whole:
        raise ConfigError(
            f"partial.interrupt = '{partial.interrupt}': a batch has one version of lora.whole = {list(recipe.lora.whole)}; "
            f"set it to 'keep', or leave lora.whole empty"
        )
    if partial.leases and not recipe.lora.is_on:
        raise ConfigError(
            f"partial.interrupt = '{partial.interrupt}': an engine cannot hold several versions of all weights; set lora.rank, "
            f"or another"
        )
    if partial.leases and recipe.exact:
        raise ConfigError(
            f"partial.interrupt = '{partial.interrupt}': a resumed run holds only the newest adapter, so that it would not be "
            f"bitwise the uninterrupted one, which exact = true promises; set it to 'keep'"
        )
    if partial.cancels:
        setting = f"partial.cancel = '{partial.cancel}'"
        if not staleness.rejects:
            raise ConfigError(
                f"{setting}: nothing is over age with staleness.reject = '{staleness.reject}'; set it to 'oldest'"
            )
        if recipe.buffer.is_by_episode:
            told = f"siblings are cancelled together, but buffer.unit = '{recipe.buffer.unit}' trains them apart"
            raise ConfigError(f"{setting}: {told}; leave it 'never', or set buffer.unit = 'group'")
        if recipe.exact:
            raise ConfigError(f"{setting}: what is cancelled depends on timing, which exact = true does not allow")
        if is_in_submission_order(recipe) and staleness.is_gated:
            raise ConfigError(
                f"{setting}: trained in submission order behind the gate, no group grows older than {staleness.bounded_by}; "
                f"set buffer.order = 'completion'"
            )
        if takes_turns and partial.oversample == 1:
            raise ConfigError(f"{setting}: in a synchronous run nothing is in flight when a batch is trained; leave it 'never'")
    if partial.oversample > 1:
        setting = f"partial.oversample = {partial.oversample:g}"
        if recipe.exact:
            raise ConfigError(f"{setting}: which groups are trained depends on timing, which exact = true does not allow")
        if not staleness.is_gated and not takes_turns:
            gate = f"staleness.gate = '{staleness.gate}'"
            raise ConfigError(f"{setting}: with {gate} submission is not counted by batches; set it to 'depth'")
        if is_in_submission_order(recipe):
            raise ConfigError(f"{setting}: buffer.order = 'submission' waits for the slow groups; set it to 'completion'")
        if partial.pausing.waits_for_rollouts:
            raise ConfigError(
                f"{setting}: partial.interrupt = '{partial.interrupt}' waits for the unfinished; set it to 'keep', 'retract', "
                f"'abort' or, with [lora], 'lease'"
            )
        if staleness.max_lag == 0 and staleness.rejects and not partial.cancels:
            raise ConfigError(
                f"{setting}: what continues after a batch holds tokens of an older version, and staleness.max_lag = 0 rejects "
                f"them; set max_lag to 1 with buffer.kind = 'synchronous', or give them up with partial.cancel = 'over_age'"
            )


def is_resumable(rollout: Rollout) -> bool:
    """Whether an interrupted rollout can be resumed by running its episode again from the start. Only the first generate call
    of an episode's first rollout can: before a later call, the environment may have called a tool or built a prompt from
    another rollout's text, which may come out differently the second time."""
    is_first = rollout.id == rollout.episode and rollout.parent is None
    is_cut = rollout.finish_reason is FinishReason.ABORT and rollout.num_sampled > 0
    return is_first and is_cut and bool((np.diff(rollout.is_sampled.astype(np.int8)) >= 0).all())


def is_continuation(prompt: Rollout, partial: Rollout) -> bool:
    """Whether a partial rollout is this prompt, token for token, followed by sampled tokens only."""
    start = len(prompt)
    return (
        not prompt.calls
        and len(partial) > start
        and np.array_equal(partial.token_ids[:start], prompt.token_ids)
        and np.array_equal(partial.source[:start], prompt.source)
        and bool((partial.source[start:] == Source.SAMPLED).all())
    )


def recorded_turn(prompt: Rollout, recorded: Rollout) -> Rollout | None:
    """What a generate call returned for this prompt before, out of a rollout that was recorded later; None if it was another
    prompt, token for token. An environment that can resume gets its finished turns again this way."""
    start = len(prompt)
    number = next((number for number, call in enumerate(recorded.calls) if call.start == start), None)
    same = np.array_equal(recorded.token_ids[:start], prompt.token_ids) and np.array_equal(
        recorded.source[:start], prompt.source
    )
    if number is None or not same:
        return None
    calls = recorded.calls
    while calls[number].finish_reason is FinishReason.ABORT and number + 1 < len(calls):
        if calls[number + 1].start != calls[number].stop:
            break
        number += 1  # the same turn, resumed
    stop = calls[number].stop
    if stop == len(recorded):
        return recorded
    return recorded.forked(stop, id=f"{recorded.id} cut").replace(id=recorded.id, parent=recorded.parent)


def surviving_part(rollout: Rollout, lineage: Lineage) -> Rollout | None:
    """The part of a partial rollout sampled by weights that this lineage descends from; None if there is none. It is relabelled
    with this lineage, since (this lineage, version) names the same weights for all its tokens; under the old label, the first
    token sampled past the checkpoint would get the rollout rejected."""
    versions = np.unique(rollout.versions[rollout.is_sampled]).tolist()
    dead = [version for version in versions if not lineage.contains(rollout.lineage, version)]
    if dead:
        cut = int(np.flatnonzero(np.isin(rollout.versions, dead))[0])
        if not rollout.is_sampled[:cut].any():
            return None
        rollout = rollout.forked(cut, id=f"{rollout.id} cut").replace(id=rollout.id, parent=rollout.parent)
    return rollout.replace(lineage=lineage.id)
