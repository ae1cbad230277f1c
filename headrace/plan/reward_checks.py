"""Tries the reward on right and wrong answers, the way a run calls it: in a worker thread, with a timeout."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import logging
import math
import sys
from collections import defaultdict
from typing import TYPE_CHECKING

from headrace.envs import PromptEncoder
from headrace.launch import encode_examples
from headrace.model import tiny
from headrace.plan.doctor import Finding, check
from headrace.records import Episode, InfraAbort, Scored
from headrace.score import RewardFunction, RewardScorer, RewardWorkers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.config import Recipe
    from headrace.plan.doctor import Check, Subject
    from headrace.records import Outcome, Plain
    from headrace.score import RewardSettings

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


@check("recipe", "rows", "rewards", fix="return one number, or None, for each completion")
def check_reward(
    subject: Subject, recipe: Recipe, rows: list[dict[str, Plain]], rewards: list[tuple[RewardFunction, float]]
) -> Iterator[Finding]:
    row = next((row for row in rows if row.get("answer") is not None), rows[0])
    answers = {"empty": "", "garbage": GARBAGE}
    if row.get("answer") is not None:
        gold = str(row["answer"])
        answers = {name: form.format(gold) for name, form in WRAPPED.items()} | {"half": gold[: len(gold) // 2]} | answers
    timeout = min(recipe.reward.timeout, MOST_SECONDS)
    settings = dataclasses.replace(recipe.reward, timeout=timeout, attempts=1, max_failures=2**31, overlong_buffer=0)
    totals: defaultdict[str, float] = defaultdict(float)
    for function, weight in rewards:
        own_timeout = function.own.timeout and min(function.own.timeout, timeout)
        tried = RewardFunction(function, timeout=own_timeout, attempts=None)
        with _watched(timeout):
            outcomes = asyncio.run(_score(subject, tried, row, answers, settings))
        failed_on: defaultdict[str, list[str]] = defaultdict(list)
        for name, outcome in outcomes.items():
            if isinstance(outcome, InfraAbort):
                failed_on[outcome.reason].append(name)
        for reason, names in failed_on.items():
            shown = f"{names[0]} ({answers[names[0]]!r})" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            yield _failed(reason, shown, columns=sorted(row), is_inline=recipe.is_inline)
        if failed_on:
            return
        values = {name: outcome.reward for name, outcome in outcomes.items() if isinstance(outcome, Scored)}
        for name, value in values.items():
            totals[name] += weight * value
        best = max((name for name in WRAPPED if name in values), key=lambda name: values[name], default="gold")
        names = [name for name in outcomes if name not in WRAPPED or name == best]
        shown = ", ".join(f"{name} {values[name]:.3g}" if name in values else f"{name} none" for name in names)
        yield Finding("ok", f"reward {function.name!r}: {shown}")
    yield from _judged(totals, has_gold="gold" in answers)


async def _score(
    subject: Subject, function: RewardFunction, row: dict[str, Plain], answers: dict[str, str], settings: RewardSettings
) -> dict[str, Outcome | None]:
    """The outcome of each answer. The first is scored alone, so that a reward that hangs costs one timeout."""
    tokenizer = subject.tokenizer
    if tokenizer is None or tokenizer.eos_token_id is None:
        tokenizer = tiny.build_tokenizer()
    encoder = PromptEncoder(tokenizer)
    episodes = []
    for name, text in answers.items():
        (rollout,) = encode_examples({"prompt": "?", "answer": text}, encoder, name=name)
        episodes.append(Episode(id=name, group=name, task=row, rollouts=(rollout,)))
    workers = RewardWorkers(settings.workers, timeout=settings.timeout, num_processes=settings.processes)
    scorer = RewardScorer([(function, 1.0)], decode=lambda rollout: answers[rollout.id], settings=settings, workers=workers)
    with contextlib.closing(workers):
        scored = await scorer.score(episodes[:1])
        if not isinstance(scored[0].outcome, InfraAbort):
            scored = await scorer.score(episodes)
    return {episode.id: episode.outcome for episode in scored}


@contextlib.contextmanager
def _watched(timeout: float) -> Iterator[None]:
    """If a reward never releases the GIL, print its stack and end the doctor. The log is kept off the screen: the findings say
    the same."""
    handler, logger = logging.NullHandler(), logging.getLogger("headrace")
    logger.addHandler(handler)
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(5 * timeout + 5, file=sys.__stderr__, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        logger.removeHandler(handler)


def _failed(reason: str, shown: str, *, columns: list[str], is_inline: bool) -> Finding:
    """`shown`: the answers that it failed on. `columns`: of the row that it was called with."""
    what, _, about_threads = reason.partition("; rewards are called in threads, ")
    fix = "let it score what a policy may write, be it empty or garbage, and raise for failures of its own only"
    if shown.startswith("gold "):
        fix = f"it fails on the right answer itself, with the columns {', '.join(columns)}: mend the reward or the rows"
    if about_threads:
        fix = about_threads.partition(": ")[2]
        if is_inline:
            return Finding("warning", f'{what}; only in the one thread of orchestrate = "inline" can it', fix)
    elif "no answer within" in what:
        fix = "give what it waits for a time limit, or raise reward.timeout if it needs longer than this"
    elif what.endswith(("returned nan", "returned inf", "returned -inf")):
        fix = "return a finite number, or None where the reward does not apply"
    return Finding("problem", f"{what}, on the answer {shown}", fix)


def _judged(totals: dict[str, float], *, has_gold: bool) -> Iterator[Finding]:
    """Whether the total reward tells right answers from wrong ones. `totals`: of each answer that a reward scored."""
    golds = [value for name, value in totals.items() if name in WRAPPED]
    if has_gold and not golds:
        what = "reward: none applies to the task's own answer"
        yield Finding("problem", what, "return a number, not None, for a right answer")
    elif len(totals) > 1 and len(set(totals.values())) == 1:
        what = f"reward: is {next(iter(totals.values())):g} for everything that was tried; a constant teaches nothing"
        fix = "check that it reads the completion; if right answers look different from the answer column, try one by hand"
        yield Finding("problem" if has_gold else "warning", what, fix)
    elif golds and totals.get("garbage", -math.inf) >= max(golds):
        what = f"reward: gives garbage {totals['garbage']:g} and the task's own answer {max(golds):g}"
        yield Finding("warning", what, "make sure that right answers get more than others")


CHECKS: tuple[Check, ...] = (check_reward,)
