"""Tries the reward on right and wrong answers, the way a run calls it: in a worker thread, with a timeout."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import logging
import sys
from typing import TYPE_CHECKING

from headrace.envs import PromptEncoder
from headrace.launch import demonstration
from headrace.model import tiny
from headrace.plan.doctor.finding import Finding, of_recipe
from headrace.records import Episode, InfraAbort, Scored
from headrace.score import RewardError, RewardScorer, RewardWorkers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.config import Recipe
    from headrace.plan.doctor.finding import Check, Subject
    from headrace.records import Outcome, Plain
    from headrace.score import RewardFunction, RewardSettings

MOST_SECONDS = 10.0
"""The longest a call may take, even if `reward.timeout` is longer."""
GARBAGE = "~ qzx 42 }{ lorem ipsum"
WRAPPED = {
    "gold": "{}",
    "gold in \\boxed": "\\boxed{{{}}}",
    "gold in <answer>": "<answer>{}</answer>",
    "gold after ####": "#### {}",
}
"""Forms in which rewards often expect an answer; the best score counts."""


@of_recipe
def check_reward(subject: Subject, recipe: Recipe) -> Iterator[Finding]:
    if not subject.rows or not subject.rewards:
        return
    row = next((row for row in subject.rows if row.get("answer") is not None), subject.rows[0])
    answers = _answers(row)
    timeout = min(recipe.reward.timeout, MOST_SECONDS)
    settings = dataclasses.replace(recipe.reward, timeout=timeout, attempts=1, max_failures=2**31)
    totals: dict[str, float] = {}
    for function, weight in subject.rewards:
        outcomes = _try(subject, function, row, answers, settings)
        if isinstance(outcomes, Finding):
            yield outcomes
            return
        yield from _failures(function, answers, outcomes, is_inline=recipe.is_inline)
        if any(isinstance(outcome, InfraAbort) for outcome in outcomes.values()):
            return
        for name, outcome in outcomes.items():
            if isinstance(outcome, Scored):
                totals[name] = totals.get(name, 0.0) + weight * outcome.reward
        yield Finding("ok", f"reward {function.name!r}: {_values(outcomes)}")
    yield from _judged(totals, has_gold="gold" in answers)


def _answers(row: dict[str, Plain]) -> dict[str, str]:
    answers = {"empty": "", "garbage": GARBAGE}
    if row.get("answer") is not None:
        gold = str(row["answer"])
        answers = {name: form.format(gold) for name, form in WRAPPED.items()} | {"half": gold[: len(gold) // 2]} | answers
    return answers


def _try(
    subject: Subject, function: RewardFunction, row: dict[str, Plain], answers: dict[str, str], settings: RewardSettings
) -> dict[str, Outcome | None] | Finding:
    """The outcome of each answer. The first is scored alone, so that a reward that hangs costs one timeout."""
    usable = subject.tokenizer is not None and subject.tokenizer.eos_token_id is not None
    encoder = PromptEncoder(subject.tokenizer if usable and subject.tokenizer is not None else tiny.build_tokenizer())
    episodes = []
    for name, text in answers.items():
        rollout = demonstration({"prompt": "?", "answer": text}, encoder, name=name)
        episodes.append(Episode(id=name, group=name, task=row, rollouts=(rollout,)))
    workers = RewardWorkers(settings.workers, timeout=settings.timeout)
    scorer = RewardScorer([(function, 1.0)], decode=lambda rollout: answers[rollout.id], settings=settings, workers=workers)

    async def ask() -> list[Episode]:
        first = await scorer.score(episodes[:1])
        return first if isinstance(first[0].outcome, InfraAbort) else await scorer.score(episodes)

    try:
        with _ended_if_stuck(settings.timeout), _quiet():
            judged = asyncio.run(ask())
    except RewardError as error:
        what, _, fix = str(error).partition("; ")
        return Finding("problem", what, fix or "return one number, or None, for each completion")
    finally:
        workers.close()
    return {episode.id: episode.outcome for episode in judged}


@contextlib.contextmanager
def _ended_if_stuck(timeout: float) -> Iterator[None]:
    """If a reward never releases the GIL, print its stack and end the doctor."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(5 * timeout + 5, file=sys.__stderr__, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the log off the screen: the findings say the same."""
    handler, logger = logging.NullHandler(), logging.getLogger("headrace")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _failures(
    function: RewardFunction, answers: dict[str, str], outcomes: dict[str, Outcome | None], *, is_inline: bool
) -> Iterator[Finding]:
    """One finding per reason, naming the answers the reward failed on."""
    reasons: dict[str, list[str]] = {}
    for name, outcome in outcomes.items():
        if isinstance(outcome, InfraAbort):
            reasons.setdefault(outcome.reason, []).append(name)
    for reason, names in reasons.items():
        what, _, advice = reason.partition("; rewards are called in threads, ")
        shown = f"{names[0]} ({answers[names[0]]!r})" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        if advice:
            fix = advice.partition(": ")[2]
            if is_inline:
                yield Finding("warning", f'{what}; only in the one thread of orchestrate = "inline" can it', fix)
                continue
        elif "no answer within" in what:
            fix = "give what it waits for a time limit, or raise reward.timeout if it needs longer than this"
        elif what.endswith(("returned nan", "returned inf", "returned -inf")):
            fix = "return a finite number, or None where the reward does not apply"
        else:
            fix = "let it score what a policy may write, be it empty or garbage, and raise for failures of its own only"
        yield Finding("problem", f"{what}, on the answer {shown}", fix)


def _judged(judged: dict[str, float], *, has_gold: bool) -> Iterator[Finding]:
    """Whether the total reward tells right answers from wrong ones. `judged`: the total of each answer that a reward scored."""
    golds = [value for name, value in judged.items() if name in WRAPPED]
    if has_gold and not golds:
        what = "reward: none applies to the task's own answer"
        yield Finding("problem", what, "return a number, not None, for a right answer")
    elif len(judged) > 1 and len(set(judged.values())) == 1:
        what = f"reward: is {next(iter(judged.values())):g} for everything that was tried; a constant teaches nothing"
        fix = "check that it reads the completion; if right answers look different from the answer column, try one by hand"
        yield Finding("problem" if has_gold else "warning", what, fix)
    elif golds and "garbage" in judged and judged["garbage"] >= max(golds):
        what = f"reward: gives garbage {judged['garbage']:g} and the task's own answer {max(golds):g}"
        yield Finding("warning", what, "make sure that right answers get more than others")


def _values(outcomes: dict[str, Outcome | None]) -> str:
    """Each answer with its reward; of the right answer's forms only the best."""
    values = {name: outcome.reward for name, outcome in outcomes.items() if isinstance(outcome, Scored)}
    best = max((name for name in WRAPPED if name in values), key=lambda name: values[name], default="gold")
    shown = [name for name in outcomes if name not in WRAPPED or name == best]
    return ", ".join(f"{name} {values[name]:.3g}" if name in values else f"{name} none" for name in shown)


CHECKS: tuple[Check, ...] = (check_reward,)
