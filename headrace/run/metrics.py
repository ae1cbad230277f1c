"""What a run reports: the metrics of a version, and the totals of `summary.json`."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import command
from headrace.records import FinishReason
from headrace.run.batches import unique_rollouts
from headrace.score import added

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.buffer import Group
    from headrace.observe import Observer
    from headrace.run.batches import StartedBatch
    from headrace.score import Sums

_MAX_TEXT = 8000
"""Characters of a prompt or completion in a table; of a longer one, the middle is left out."""


@dataclass
class Progress:
    """Totals of the whole run, saved in checkpoints."""

    held_out_before: dict[str, float] | None = None
    """Held-out metrics before RL; None until measured."""
    held_out_after: dict[str, float] = field(default_factory=dict)
    """Held-out metrics of the newest version evaluated since."""
    held_out_version: int = 0
    """That version; 0 if there is none yet."""
    evaluating: int | None = None
    """The version of an evaluation that is due or running; a resumed run makes it again."""
    seconds_evaluating: float = 0.0
    """Spent before and after RL on the first and last evaluations."""
    trained_tokens: int = 0
    wasted_tokens: int = 0
    """As of the last checkpoint."""
    lag_sum: float = 0.0
    lag_max: int = 0
    seconds_rl: float = 0.0
    first_step: float = 0.0
    reward_first: float | None = None
    reward_last: float | None = None
    skipped_steps: int = 0
    logged: Sums = field(default_factory=dict)
    """What rewards logged since the last version."""

    def log(self, sums: Sums) -> None:
        """Add what rewards have logged, in a new dict: a checkpoint may still hold the old one."""
        self.logged = added(self.logged, sums)

    def count(self, started: StartedBatch, *, seconds: float, success_at: float) -> dict[str, Any]:
        """Add a version that took `seconds` to the totals and return its metrics."""
        groups, version = started.groups, started.version
        rewards = [episode.reward for group in groups for episode in group.episodes if episode.reward is not None]
        tokens = sum(group.facts.num_stamped for group in groups)
        lag_sum = tokens * version - sum(group.facts.version_sum for group in groups)
        most = max(0, *(version - group.span.first for group in groups if group.span is not None))
        self.seconds_rl += seconds
        self.trained_tokens += tokens
        self.lag_sum += float(lag_sum)
        self.lag_max = max(self.lag_max, most)
        self.reward_last = float(np.mean(rewards))
        self.reward_first = self.reward_last if self.reward_first is None else self.reward_first
        logged, self.logged = self.logged, {}
        return {
            **{f"logged/{name}": total / count for name, (total, count) in logged.items()},
            "reward": self.reward_last,
            "reward_std": float(np.std(rewards)),
            "tokens_per_second": tokens / max(seconds, 1e-9),
            "lag_mean": lag_sum / tokens if tokens else 0.0,
            "lag_max": most,
            "seconds": seconds,
            "tied": sum(group.is_tied for group in groups) / len(groups),
            **completion_metrics(groups),
            **turn_metrics(groups),
            **reward_metrics(groups, success_at=success_at),
            **started.term_metrics,
        }


def completion_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Sampled tokens of the rollouts, the share that `sampling.max_tokens` truncated, and the lengths of the others."""
    rollouts = [rollout for group in groups for episode in group.episodes for rollout in episode.rollouts]
    lengths = np.array([rollout.num_sampled for rollout in rollouts])
    is_truncated = np.array([rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts])
    found = {"completions/truncated": float(is_truncated.mean())}
    for kind, some in (("length", lengths), ("terminated_length", lengths[~is_truncated])):
        for name, of in (("mean", np.mean), ("min", np.min), ("max", np.max)) if len(some) else ():
            found[f"completions/{name}_{kind}"] = float(of(some))
    return found


def turn_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Answers per episode, and forks per answer after the first, whatever made them: a chat template that rewrote what came
    before, or an agent that edited it or continued one answer twice. Nothing if no episode has more than one answer."""
    episodes = [episode for group in groups for episode in group.episodes]
    turns = forks = 0
    for episode in episodes:
        for rollout in episode.rollouts:
            start = 0 if rollout.parent is None else rollout.parent[1]
            turns += sum(call.start >= start and call.finish_reason is not FinishReason.ABORT for call in rollout.calls)
            forks += rollout.parent is not None
    if turns <= len(episodes):
        return {}
    return {"turns/mean": turns / len(episodes), "turns/forked": forks / (turns - len(episodes))}


def reward_metrics(groups: Sequence[Group], *, success_at: float) -> dict[str, float]:
    """Mean and deviation of each reward function over the episodes it judged, and mean reward and success by source."""
    functions, sources = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for group in groups:
        for episode in group.episodes:
            for name, value in episode.rollouts[-1].rewards.items() if episode.rollouts else ():
                functions[f"reward/{name}"].append(value)
            if group.source and episode.reward is not None and episode.unshaped_reward is not None:
                sources[f"reward/source/{group.source}"].append(episode.reward)
                sources[f"success/source/{group.source}"].append(episode.unshaped_reward >= success_at)
    found = {name: float(np.mean(values)) for each in (functions, sources) for name, values in each.items()}
    return found | {f"{name}/std": float(np.std(values)) for name, values in functions.items()}


def rollout_rows(started: StartedBatch, *, limit: int, decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """A row for each of the first `limit` rollouts of a version, for a table. All have the same columns."""
    sources = {episode.group: group.source for group in started.groups for episode in group.episodes}
    every = [pair for batch in started.batches for pair in zip(batch.rollouts, batch.advantages, strict=True)]
    pairs = list({id(rollout): (rollout, advantages) for rollout, advantages in every}.values())[:limit]  # not once per epoch
    functions = dict.fromkeys(name for rollout, _ in pairs for name in rollout.rewards)
    rows = []
    for rollout, advantages in pairs:
        num_prompt = len(rollout) - len(rollout.completion_ids)
        trained = advantages[rollout.loss_mask]
        rows.append(
            {
                "version": started.version + 1,
                "group": rollout.group,
                "source": sources[rollout.group],
                "prompt": _shortened(decode(rollout.token_ids[:num_prompt].tolist())),
                "completion": _shortened(decode(rollout.completion_ids)),
                "reward": rollout.reward,
                **{f"reward/{name}": rollout.rewards.get(name) for name in functions},
                "advantage": float(trained.mean()) if len(trained) else 0.0,
                "tokens": rollout.num_sampled,
                "finish_reason": str(rollout.finish_reason),
            }
        )
    return rows


def _shortened(text: str) -> str:
    half = _MAX_TEXT // 2
    return text if len(text) <= _MAX_TEXT else f"{text[:half]} … {text[-half:]}"


def settled_shares(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, float]:
    """Of the rollouts that were trained or met the same end between two counts of the ledger: the share rejected as too old,
    filtered, and failed."""
    since = {state: now[state] - before[state] for state in now}
    return {state: since[state] / max(since["trained"] + since[state], 1) for state in ("rejected", "filtered", "failed")}


def trainer_metrics(seen: list[dict[str, float]], *, memory_peak: int) -> dict[str, float]:
    """Means over the optimizer steps that report a metric. The mismatch is the first step's, before the weights move, if that
    step has one."""
    later = [{name: step[name] for name in step if name not in ("mismatch", "mismatch_max")} for step in seen[1:]]
    seen = [seen[0], *later]
    names = dict.fromkeys(name for step in seen for name in step)
    metrics = {name: float(np.mean([step[name] for step in seen if name in step])) for name in names}
    return {f"train/{name}": value for name, value in (metrics | {"memory_peak": float(memory_peak)}).items()}


class NotFiniteGradient(RuntimeError):
    """The gradient was NaN or infinite in `train.max_skipped` steps in a row."""


class SkippedSteps:
    """Counts optimizer steps skipped because the gradient was not finite, and keeps their rollouts on disk. One now and then is
    an accident; `limit` in a row (0: any number) mean that loss, data or weights are broken, and end the run."""

    def __init__(self, *, limit: int, observer: Observer, in_thread: bool) -> None:
        """`in_thread`: write rollouts there, to keep the event loop free."""
        self._limit, self._observer, self._in_thread = limit, observer, in_thread
        self._in_a_row = 0

    async def check(self, started: StartedBatch) -> None:
        """Take a trained version, in order; raise if too many steps in a row were skipped."""
        was_skipped = [bool(step.get("skipped", 0.0)) for step in started.seen]
        if not any(was_skipped):
            self._in_a_row = 0
            return
        version, is_limit_reached = started.version + 1, False
        for is_skipped in was_skipped:
            self._in_a_row = self._in_a_row + 1 if is_skipped else 0
            is_limit_reached |= self._in_a_row == self._limit > 0
        offending = [parts for parts, is_skipped in zip(started.by_step, was_skipped, strict=True) if is_skipped]
        rollouts, keep = unique_rollouts([batch for parts in offending for batch in parts]), self._observer.keep_rollouts
        kept = await asyncio.to_thread(keep, version, rollouts) if self._in_thread else keep(version, rollouts)
        where = "could not be kept" if kept is None else f"are in {kept}"
        steps = f"{len(offending)} of {len(started.seen)} steps" if len(started.seen) > 1 else "the step"
        self._observer.screen.say(
            f"version {version}: the gradient is not finite, {steps} skipped, {self._in_a_row} in a row; rollouts {where}"
        )
        if is_limit_reached:
            look = f"`{command()} inspect {kept.parents[1]} --step {version}` shows them; " if kept is not None else ""
            raise NotFiniteGradient(
                f"the gradient was not finite in {self._limit} optimizer steps in a row, the last of version {version} "
                f"(train.max_skipped = {self._limit}). Weights and optimizer are as they were before the first of them. "
                f"The last rollouts {where}; {look}look for a loss that divides by zero or overflows, or lower "
                f"train.learning_rate"
            )
