"""Turns groups into batches: advantages, and the token weights that implement the recipe's mean (`train.loss_mean`).

Some advantages, weights and masks need columns that only the trainer can compute: `columns_first` names them, and
`make_batches` takes groups that have them. It sees all groups of a version, so that batch statistics do not depend on the
number of optimizer steps; of a batch that comes in parts (`train.stream_parts`), where there are none, it sees one part.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.algorithms import (
    ADVANTAGES,
    COMPUTED,
    ENTROPY,
    REFERENCE,
    RETURNS,
    REWARDS,
    TEACHER,
    VALUES,
    batch_advantages,
    gae,
    needed_columns,
    next_entropy_weight,
    next_kl_weight,
    normalised,
    sum_of_normalised,
    token_rewards,
    turn_advantages,
    turn_gae,
    turns_of,
    unwanted,
)
from headrace.records import Batch, FinishReason
from headrace.settings import ConfigError
from headrace.staleness import corrections_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence

    from headrace.algorithms import FilterSettings
    from headrace.buffer import Group
    from headrace.config import Recipe
    from headrace.records import Array, Episode, Rollout
    from headrace.trainer import Published


@dataclass
class StepParts:
    """An optimizer step whose groups may leave the buffer in parts. Weights are made before the rest is there: all parts are
    divided by what the first with a trained token lets expect, and the last says what makes up for the difference."""

    num_groups: int
    """Of the whole step."""
    num_made: int = 0
    """Parts."""
    divisor: float = 0.0
    """Tokens, or what else the recipe's mean counts: as many as expected."""
    counted: int = 0
    """As many as there are so far."""

    def add(self, count: int, *, num_groups: int) -> None:
        """Another part is made, of so many groups with so many tokens."""
        if not self.counted:
            self.divisor = max(count, 1) * self.num_groups / num_groups
        self.num_made += 1
        self.counted += count


@dataclass(eq=False)
class StartedBatch:
    """The groups taken from the buffer to train one version, until its metrics are written."""

    version: int
    """The version trained from; the result is `version + 1`."""
    groups: list[Group]
    steps_before: int
    """Optimizer steps the trainer had made before."""
    left: list[int] = field(default_factory=list)
    """How many groups each part has that is still to leave the buffer."""
    step: StepParts = field(default_factory=lambda: StepParts(0))
    """The one that the next part belongs to."""
    is_waiting: bool = False
    """The trainer is done with all parts sent so far and waits for the groups of the next."""
    scored: list[Group] = field(default_factory=list)
    """The groups with the columns that the trainer computed first."""
    batches: list[Batch] = field(default_factory=list)
    """One for each optimizer step, or part of one."""
    following: TermWeights | None = None
    """The weights of KL and entropy bonus before the next version."""
    term_metrics: dict[str, float] = field(default_factory=dict)
    steps: list[Awaitable[dict[str, float]]] = field(default_factory=list)
    has_failed: bool = False
    """One of them has."""
    """Metrics of each of `batches`; empty until they are sent to the trainer."""
    publishing: Awaitable[Published] | None = None
    """The publication of the next version, if it was requested together with the steps."""
    answers: list[dict[str, float]] = field(default_factory=list)
    """The metrics of each, once it is trained."""
    filtered: list[float] = field(default_factory=list)
    """Mean rewards of the groups that `[filter]` dropped since the batch before."""
    settled: dict[str, float] = field(default_factory=dict)
    """The shares of rollouts rejected, filtered and failed since the version before."""
    metrics: dict[str, Any] | None = None
    """Of the version, once any evaluation that the trainer waits for is done."""
    _one_by_one: asyncio.Lock = field(default_factory=asyncio.Lock)

    def filter_metrics(self, settings: FilterSettings) -> dict[str, float]:
        """`groups_unwanted`: trained nevertheless, because `filter.max_draws` was reached."""
        if not settings.is_on:
            return {}
        rewards = [group.unshaped_rewards for group in self.groups]
        return {
            "groups_drawn": len(rewards) + len(self.filtered),
            "groups_filtered": len(self.filtered),
            "groups_unwanted": len(unwanted(rewards, settings, batch=len(rewards))),
            "reward_drawn": float(np.mean([*self.filtered, *(sum(each) / len(each) for each in rewards)])),
        }

    async def make_steps(self) -> None:
        """Wait until the trainer is done with what was sent so far; one in this process does it now."""
        async with self._one_by_one:
            while len(self.answers) < len(self.steps):
                try:
                    self.answers.append(await self.steps[len(self.answers)])
                except Exception:
                    self.has_failed = True
                    raise

    def drop_steps(self) -> None:
        """Nobody will wait for them; one in this process has not begun."""
        for step in self.steps[len(self.answers) :]:
            if isinstance(step, Coroutine):
                step.close()

    @property
    def seen(self) -> list[dict[str, float]]:
        """The metrics of each optimizer step that is trained: those of its last part, which cover all."""
        return [seen for batch, seen in zip(self.batches, self.answers, strict=False) if batch.is_last]

    @property
    def by_step(self) -> list[list[Batch]]:
        """The parts of each optimizer step."""
        ends = [place for place, batch in enumerate(self.batches, start=1) if batch.is_last]
        return [self.batches[start:stop] for start, stop in itertools.pairwise([0, *ends])]

    @property
    def may_be_given_up(self) -> bool:
        """Parts are still to come, and no step was made: the weights are those of the version before."""
        return bool(self.left) and not any(batch.is_last for batch in self.batches)

    @property
    def rollouts(self) -> list[Rollout]:
        """Each once, however many epochs train it."""
        return unique_rollouts(self.batches)


class TermWeights(NamedTuple):
    """Of the KL to the reference, and of the entropy bonus."""

    kl: float
    entropy: float


def unique_rollouts(batches: Sequence[Batch]) -> list[Rollout]:
    return list({id(rollout): rollout for batch in batches for rollout in batch.rollouts}.values())


def part_sizes(count: int, recipe: Recipe) -> list[int]:
    """How many of a batch's `count` groups are in each part: all in one, or one part after the other."""
    parts = recipe.stream_parts
    return [len(range(part, count, parts)) for part in range(parts)]


def _num_steps(groups: Sequence[Group], recipe: Recipe) -> int:
    """Mini-batches that groups are split into which left the buffer together."""
    return 1 if recipe.stream_parts > 1 else min(recipe.train.mini_batches, len(groups))


def columns_first(groups: Sequence[Group], recipe: Recipe) -> list[str]:
    """Columns the trainer computes before a version's first step: those that advantages, weights and masks are made from; if
    several steps will move the weights, all of the policy's own that a loss or correction uses; and over several epochs those
    of frozen models too, so that each is computed once."""
    train, made_from = recipe.train, ADVANTAGES[recipe.train.advantage].made_from
    needed = needed_columns(train.loss, corrections_of(recipe), train.kl_in_loss)
    wanted = {
        made_from: bool(made_from),
        REFERENCE: train.kl_in_reward or train.kl_target > 0,
        ENTROPY: train.entropy_quantile < 1,
    }
    if train.epochs * _num_steps(groups, recipe) > 1:
        fixed = () if train.epochs > 1 else (REFERENCE, TEACHER)  # the same at every step
        wanted |= {name: True for name in needed if name in COMPUTED and name not in fixed}
    rollouts = _rollouts(groups)
    return [name for name, is_wanted in wanted.items() if is_wanted and not all(name in r.columns for r in rollouts)]


def batch_to_score(groups: Sequence[Group], recipe: Recipe, *, version: int) -> Batch:
    """All rollouts of a version, to compute their columns."""
    rollouts = _rollouts(groups)
    zeros = np.zeros(sum(map(len, rollouts)), dtype=np.float32)
    return Batch.from_columns(rollouts, advantages=zeros, weights=zeros, loss=recipe.train.loss, version=version)


def with_column(groups: Sequence[Group], name: str, values: Sequence[Array]) -> list[Group]:
    """Add a column to every rollout; `values` are in the order of `batch_to_score`."""
    remaining = iter(values)
    return [
        dataclasses.replace(
            group,
            episodes=tuple(
                episode.replace(rollouts=tuple(_with_columns(r, {name: next(remaining)}) for r in episode.rollouts))
                for episode in group.episodes
            ),
        )
        for group in groups
    ]


def adapt_weights(groups: Sequence[Group], recipe: Recipe, weights: TermWeights) -> tuple[TermWeights, TermWeights]:
    """(The weights to train these groups with, the weights before the next version); those that do not adapt are the recipe's,
    which a callback may have changed."""
    train, rollouts = recipe.train, _rollouts(groups)
    used = TermWeights(weights.kl if train.kl_target else train.kl, weights.entropy if train.entropy_target else train.entropy)
    following, is_adaptive = used, train.entropy_target or train.kl_target
    logprobs = _on_masks(rollouts, [rollout.logprobs for rollout in rollouts]) if is_adaptive else ()
    if train.entropy_target and len(logprobs):
        entropy = -float(np.mean(logprobs))
        used = used._replace(entropy=weights.entropy if entropy <= train.entropy_target else 0.0)
        adapted = next_entropy_weight(weights.entropy, entropy=entropy, target=train.entropy_target, step=train.entropy_step)
        following = following._replace(entropy=adapted)
    if train.kl_target and len(logprobs):
        kl, share = _mean_kl(rollouts), len(rollouts) / train.kl_horizon
        following = following._replace(kl=next_kl_weight(weights.kl, kl=kl, target=train.kl_target, share=share))
    return used, following


def make_batches(
    groups: Sequence[Group],
    recipe: Recipe,
    *,
    version: int,
    weights: TermWeights | None = None,
    reward_weights: Mapping[str, float] | None = None,
    step: StepParts | None = None,
    ends_step: bool = True,
    ends_version: bool = True,
) -> list[Batch]:
    """One batch per optimizer step that this version makes of these groups, or one if they are a part of `step`. Each epoch
    trains every group, and from the second on in other mini-batches, shuffled under the seed. `reward_weights` are those of the
    reward functions, by name, for `train.normalize_each_reward`; 1 where none is given. `ends_step`, `ends_version`: no other
    groups follow."""
    train = recipe.train
    weights = weights or TermWeights(train.kl, train.entropy)
    settings: dict[str, Any] = {
        "loss": train.loss,
        "constants": train.constants,
        "corrections": corrections_of(recipe),
        "kl": train.kl_in_loss,
        "kl_weight": weights.kl if train.kl_in_loss != "none" else 0.0,
        "entropy_weight": weights.entropy,
        "version": version,
    }
    if train.normalize_each_reward:
        rewards = [sum_of_normalised(list(map(_parts, group.episodes)), weights=reward_weights or {}) for group in groups]
    else:
        rewards = [np.array([episode.reward or 0.0 for episode in group.episodes]) for group in groups]
    pairs, batches = _with_advantages(groups, rewards, recipe, kl_weight=weights.kl), []
    if train.mask_truncated:  # after the advantages, so that its reward and KL count for its siblings
        pairs = [_masked_if_truncated(*pair) for pair in pairs]
    if train.entropy_quantile < 1:
        trained = [rollout for rollout, _ in pairs]
        entropies = _on_masks(trained, [rollout.columns[ENTROPY] for rollout in trained])
        floor = np.quantile(entropies, 1 - train.entropy_quantile, method="higher") if len(entropies) else 0.0
        settings["entropy_floor"] = max(0.0, float(floor))
    remaining, parts = iter(pairs), _num_steps(groups, recipe)
    by_group = [[next(remaining) for episode in group.episodes for _ in episode.rollouts] for group in groups]
    for epoch in range(train.epochs):
        if epoch and parts > 1:
            order = np.random.default_rng([recipe.seed, version, epoch]).permutation(len(groups))
            by_group = [by_group[place] for place in order]
        batches += [_make_batch(by_group[part::parts], recipe, settings, step, is_last=ends_step) for part in range(parts)]
    if ends_version and train.reference_every and batches and (version + 1) % train.reference_every == 0:
        batches[-1] = dataclasses.replace(batches[-1], reference_mix=train.reference_mix)
    return batches


def term_metrics(groups: Sequence[Group], weights: TermWeights, recipe: Recipe, *, version: int) -> dict[str, float]:
    """What a version reports of its terms. A KL in the loss is reported by the loss."""
    train, metrics = recipe.train, {}
    if train.kl:
        metrics["train/kl_weight"] = weights.kl
    if train.kl_in_reward:
        metrics["train/reference_kl"] = _mean_kl(_rollouts(groups))
    if train.entropy or train.entropy_target:
        metrics["train/entropy_weight"] = weights.entropy
    if train.reference_every:
        metrics["train/reference_version"] = float(version - version % train.reference_every)
    return metrics


def _make_batch(
    groups: Sequence[list[tuple[Rollout, Array | float]]],
    recipe: Recipe,
    settings: dict[str, Any],
    step: StepParts | None,
    *,
    is_last: bool,
) -> Batch:
    rollouts = [rollout for group in groups for rollout, _ in group]
    lengths = np.array([rollout.token_ids.size for rollout in rollouts], dtype=np.int64)
    mask = np.concatenate([np.zeros(0, dtype=bool), *(rollout.loss_mask for rollout in rollouts)])
    values = [values for group in groups for _, values in group]
    is_per_token = bool(values) and isinstance(values[0], np.ndarray)
    advantages = np.concatenate(values) if is_per_token else _spread(np.array(values), lengths, mask)
    step = step or StepParts(len(groups))
    step.add(_num_counted(groups, mask, recipe), num_groups=len(groups))
    weights = _spread(_scales(lengths, mask, recipe, divisor=step.divisor), lengths, mask)
    for column in (advantages, weights):
        column.flags.writeable = False  # else the batch would copy it
    return Batch.from_columns(
        rollouts,
        advantages=advantages,
        weights=weights,
        part=step.num_made - 1,
        is_last=is_last,
        gradient_scale=step.divisor / max(step.counted, 1) if is_last else 1.0,
        **settings,
    )


def _spread(values: Array, lengths: Array, mask: Array) -> Array:
    """[tokens] float32: each rollout's value at its trained tokens, 0 elsewhere."""
    spread = np.repeat(values.astype(np.float32), lengths)
    spread[~mask] = 0
    return spread


def _with_advantages(
    groups: Sequence[Group], rewards: Sequence[Array], recipe: Recipe, *, kl_weight: float
) -> Sequence[tuple[Rollout, Array | float]]:
    """Each rollout, with the columns its loss needs, and its advantages: [T] float32, or one number for all it trains. With
    a KL in the reward, each token's own share of it counts for itself and the tokens before, or all of the episode's for each
    of its tokens."""
    train, traits = recipe.train, ADVANTAGES[recipe.train.advantage]
    episodes = [episode for group in groups for episode in group.episodes]
    if traits.made_from == TEACHER:  # log π_T − log μ: how much likelier the sampled token is under the teacher
        return [
            (each, np.where(each.loss_mask, each.columns[TEACHER] - each.logprobs, np.float32(0))) for each in _rollouts(groups)
        ]
    if traits.learns_values or (train.kl_in_reward and traits.kl_is_per_token):
        return _with_token_advantages(episodes, rewards, recipe, kl_weight=kl_weight)
    if train.kl_in_reward:
        costs = [[kl_weight * sum(map(_sampled_kl, e.rollouts)) for e in group.episodes] for group in groups]
        rewards = [of_group - np.array(cost) for of_group, cost in zip(rewards, costs, strict=True)]
    if traits.is_per_turn:
        how: dict[str, Any] = {"scale": train.scale, "discount": train.discount}
        made = [turn_advantages(group.episodes, own, **how) for group, own in zip(groups, rewards, strict=True)]
        return list(zip(_rollouts(groups), itertools.chain.from_iterable(made), strict=True))
    values = np.concatenate([np.zeros(0), *batch_advantages(rewards, baseline=train.advantage, scale=train.scale)]).tolist()
    return [(rollout, value) for episode, value in zip(episodes, values, strict=True) for rollout in episode.rollouts]


def _with_token_advantages(
    episodes: Sequence[Episode], rewards: Sequence[Array], recipe: Recipe, *, kl_weight: float
) -> list[tuple[Rollout, Array]]:
    """From the rewards of single tokens: by `gae`, over tokens or turns, or without values the reward to come less the mean;
    ÷ the version's std."""
    train, traits = recipe.train, ADVANTAGES[recipe.train.advantage]
    learns_values, how = traits.learns_values, {"discount": train.discount, "trace": train.gae_lambda}
    rollouts, made = [], []
    for episode, reward in zip(episodes, np.concatenate([np.zeros(0), *rewards]).tolist(), strict=True):
        for rollout in episode.rollouts:
            mask, own = rollout.loss_mask, token_rewards(rollout, reward)
            of_tokens = own[mask]
            if train.kl_in_reward:
                of_tokens = of_tokens - kl_weight * (rollout.logprobs[mask] - rollout.columns[REFERENCE][mask])
            if learns_values:
                values = rollout.columns[VALUES][mask]
                if traits.is_per_turn:
                    found, returns = turn_gae(of_tokens, values, turns_of(rollout)[mask], **how)
                else:
                    found, returns = gae(of_tokens, values, **how)
                rollout = _with_columns(rollout, {REWARDS: own, RETURNS: _placed(returns, rollout)})
            else:
                found, _ = gae(of_tokens, np.zeros_like(of_tokens), discount=1.0, trace=1.0)
            rollouts.append(rollout)
            made.append(found)
    every = np.concatenate([np.zeros(0), *made])
    if train.scale != "none":
        every = normalised(every)
    elif not learns_values and len(every):
        every = every - every.mean()
    scaled = np.split(every, np.cumsum([len(part) for part in made]))
    return [(rollout, _placed(part, rollout)) for rollout, part in zip(rollouts, scaled, strict=False)]


def _parts(episode: Episode) -> Mapping[str, float]:
    """The rewards of an episode by the name of their function."""
    parts = episode.rollouts[-1].rewards if episode.rollouts else {}
    if not parts:
        problem = f"episode {episode.id!r} has no rewards by name, only their sum"
        raise ConfigError(f"train.normalize_each_reward = true: {problem}; set it to false, or have the environment set them")
    return parts


def _masked_if_truncated(rollout: Rollout, advantages: Array | float) -> tuple[Rollout, Array | float]:
    """Nothing to train in a rollout that was cut off at its length limit."""
    if rollout.finish_reason is not FinishReason.LENGTH:
        return rollout, advantages
    return rollout.replace(loss_mask=np.zeros_like(rollout.loss_mask)), advantages * 0


def _rollouts(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for episode in group.episodes for rollout in episode.rollouts]


def _on_masks(rollouts: Sequence[Rollout], arrays: Sequence[Array]) -> Array:
    """The values of all trained tokens."""
    parts = [array[rollout.loss_mask] for rollout, array in zip(rollouts, arrays, strict=True)]
    joined: Array = np.concatenate([np.zeros(0, dtype=np.float64), *parts])
    return joined


def _mean_kl(rollouts: Sequence[Rollout]) -> float:
    """The mean of log μ − log π_ref over the trained tokens."""
    return sum(map(_sampled_kl, rollouts)) / max(sum(int(np.count_nonzero(rollout.loss_mask)) for rollout in rollouts), 1)


def _sampled_kl(rollout: Rollout) -> float:
    """Σ log μ − log π_ref over the trained tokens."""
    return float((rollout.logprobs - rollout.columns[REFERENCE])[rollout.loss_mask].sum(dtype=np.float64))


def _num_counted(groups: Sequence[list[tuple[Rollout, Array | float]]], mask: Array, recipe: Recipe) -> int:
    """How many tokens, rollouts or groups share the weight of a step."""
    if recipe.train.mean_over == "token":
        return int(np.count_nonzero(mask))
    return len(groups) if recipe.train.mean_over == "constant" else sum(map(len, groups))


def _scales(lengths: Array, mask: Array, recipe: Recipe, *, divisor: float) -> Array:
    """[rollouts]: the weight of its trained tokens. Over a step they sum to 1; to the mean number of tokens with `sum`; to less
    than 1 with `constant`, or if sequences count equally and some have no trained token."""
    train, count = recipe.train, len(lengths)
    if train.mean_over == "constant":
        return np.full(count, train.mini_batches / (train.batch * recipe.sampling.max_tokens))
    if train.mean_over != "sequence":
        return np.full(count, 1 / divisor)
    trained, stops = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(mask)]), np.cumsum(lengths)
    scales: Array = 1 / (divisor * np.maximum(trained[stops] - trained[stops - lengths], 1))
    return scales


def _placed(values: Array, rollout: Rollout) -> Array:
    """[T] float32: `values` at the trained tokens, 0 elsewhere."""
    result = np.zeros(len(rollout), dtype=np.float32)
    result[rollout.loss_mask] = values
    return result


def _with_columns(rollout: Rollout, columns: dict[str, Array]) -> Rollout:
    return rollout.replace(columns={**rollout.columns, **columns})
