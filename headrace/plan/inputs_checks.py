"""Checks of the recipe, its tasks and its rewards that do not need torch."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from headrace.config import load_recipe
from headrace.envs import check_environment, is_single_turn
from headrace.errors import in_words
from headrace.launch import (
    UserInputs,
    check_examples,
    check_task_columns,
    held_out_sources,
    held_out_tasks,
    open_tasks,
    reward_functions,
    shared_prompts,
)
from headrace.plan.doctor import Finding, check
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace.config import Recipe
    from headrace.plan.doctor import Check, Subject

NUM_CHECKED_PROMPTS = 64
"""How many tasks are checked, as a sample of all."""


@check("recipe_path", fix="correct that setting; `headrace train --help` describes them all")
def check_recipe(subject: Subject, path: Path) -> Iterator[Finding]:
    subject.recipe = recipe = load_recipe(path, subject.overrides)
    sizes = f"{recipe.steps} versions of {recipe.train.batch} rollouts, max_lag {recipe.staleness.max_lag}"
    yield Finding("ok", f"recipe {path}: {sizes}")


@check("recipe", fix="correct the [[tasks]] section or the file; docs/rewards.md says what a task is")
def check_tasks(subject: Subject, recipe: Recipe) -> Iterator[Finding]:
    if not recipe.uses_tasks:  # SFT alone
        return
    stream = open_tasks(recipe, UserInputs())
    subject.sources, subject.rows = stream.sources, [stream.next().row for _ in range(NUM_CHECKED_PROMPTS)]
    columns = sorted({name for row in subject.rows for name in row})
    yield Finding("ok", f"tasks: columns {', '.join(columns)}")
    for name in columns:
        lacking = sum(row.get(name) is None for row in subject.rows)
        if lacking:
            what = f"tasks: column {name!r} is empty or absent in {lacking} of the first {len(subject.rows)}"
            yield Finding("warning", what, "fill it in, or make sure that the reward does not rely on it")


@check("recipe", fix="correct evaluate.tasks, or leave it out")
def check_held_out(subject: Subject, recipe: Recipe) -> Iterator[Finding]:
    if not recipe.uses_tasks:
        return
    subject.held_out_rows = held_out_tasks(recipe, UserInputs())
    subject.held_out = list(held_out_sources(recipe, UserInputs()).values())
    count = sum(map(len, subject.held_out_rows.values()))
    yield Finding("ok", f"held-out tasks: {f'{count} for every evaluation' if count else 'none, so success is not measured'}")


@check("recipe", fix="correct the [[sft.tasks]] section or its rows, or leave [sft] out")
def check_sft(subject: Subject, recipe: Recipe) -> Iterator[Finding]:
    if recipe.sft.is_on:
        sources = check_examples(recipe, UserInputs())
        yield Finding("ok", f"sft: {len(sources)} source(s) of examples, each with something to learn")


@check("recipe", fix="correct reward.functions in the recipe")
def check_reward_names(subject: Subject, recipe: Recipe) -> Iterator[Finding]:
    if not recipe.uses_tasks:
        return
    try:
        rewards = reward_functions(recipe, UserInputs())
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  (importing the user's file can raise anything)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
        where = "" if isinstance(error, SyntaxError) else f" (in {frames[-1].filename}:{frames[-1].lineno})"
        yield Finding("problem", f"reward: {in_words(error)}{where}", "correct the file that is named")
        return
    subject.rewards = rewards


@check("recipe", fix="correct the columns of the tasks")
def check_columns(subject: Subject, recipe: Recipe) -> Iterator[Finding]:
    """Reserved names, even if the rewards could not be imported, and what the rewards take."""
    rewards, subject.rewards = subject.rewards, []  # stays so if columns are missing: calling them would only repeat that
    functions = [function for function, _ in rewards]
    check_task_columns(subject.sources, functions)
    check_task_columns(subject.held_out, functions, kind="held-out ")
    subject.rewards = rewards
    for note in shared_prompts(subject.sources, subject.held_out_rows):
        yield Finding("warning", note.replace("held-out   ", "held-out tasks: "), "keep those rows out of one of the two")


@check("recipe", fix="correct the [environment] section; docs/environments.md says what it takes")
def check_episodes(subject: Subject, recipe: Recipe) -> Iterator[Finding]:
    if recipe.uses_tasks:
        check_environment(recipe.environment)
        if not is_single_turn(recipe.environment):
            yield Finding("ok", "environment: its names can be imported and take environment.options")


CHECKS: tuple[Check, ...] = (
    check_recipe,
    check_tasks,
    check_held_out,
    check_sft,
    check_reward_names,
    check_columns,
    check_episodes,
)
