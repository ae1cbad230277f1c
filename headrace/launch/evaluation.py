"""`headrace evaluate`: engines, tasks and rewards of a recipe, without training."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import load_recipe, make_recipe
from headrace.engine import engine_kind
from headrace.envs import PromptEncoder
from headrace.launch.build import check_engine
from headrace.launch.folder import saved_in
from headrace.launch.forecast import longest_prompt, max_kv_blocks
from headrace.launch.inputs import UserInputs, check_inputs, held_out_tasks, reward_functions
from headrace.launch.launcher import orchestration_of, outside_event_loop
from headrace.launch.local import LocalProcesses
from headrace.launch.placement import set_threads
from headrace.launch.process import RoleFailed
from headrace.launch.start_model import model_folder
from headrace.launch.stop import StopRequest, sigterm_as_interrupt
from headrace.lora import base_of
from headrace.model import config_limit, load_config, load_tokenizer
from headrace.observe import Observer, evaluation_table, open_screen
from headrace.run import (
    MANIFEST,
    Estimate,
    Evaluation,
    Evaluator,
    SftSettings,
    TaskScore,
    differences,
    serving,
    task_id,
)
from headrace.settings import ConfigError, to_dict
from headrace.sync import Lineage
from headrace.tasks import SamplerSettings
from headrace.user_code import then_end_tasks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.config import Recipe
    from headrace.launch.inline import Inline
    from headrace.records import Plain


@dataclass(frozen=True)
class EvaluationResult:
    """What `headrace.evaluate` returns; printed, it is the command's table."""

    model: str
    version: int | None
    """Of a run's checkpoint."""
    settings: dict[str, Any]
    """The recipe's `[evaluate]`."""
    evaluation: Evaluation
    against: str = ""
    """What it is compared with, if anything."""
    difference: dict[str, Estimate] = dataclasses.field(default_factory=dict)
    """By metric, this model minus the other, task by task."""

    def __getitem__(self, metric: str) -> Estimate:
        """`result["pass@4"].value`, `.low`, `.high`."""
        return self.evaluation.estimates[metric]

    def __str__(self) -> str:
        return evaluation_table(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `--json` writes it."""
        found = self.evaluation
        return {
            "model": self.model,
            "version": self.version,
            "settings": self.settings,
            "metrics": _plain(found.estimates),
            "sources": {source: _plain(inside) for source, inside in found.sources.items()},
            "failed": found.failed,
            "problem": found.problem,
            "against": self.against,
            "difference": _plain(self.difference),
            "tasks": [dataclasses.asdict(task) for task in found.tasks],
        }

    def compared_with(self, name: str, theirs: Sequence[TaskScore]) -> EvaluationResult:
        at = self.settings["success_at"]
        values = ([task.values(success_at=at) for task in tasks] for tasks in (self.evaluation.tasks, theirs))
        return dataclasses.replace(self, against=name, difference=differences(*values))


def evaluate(
    model: str, recipe: Recipe | None, given: UserInputs, *, overrides: Mapping[str, Any], against: str = ""
) -> EvaluationResult:
    """Evaluate a model on a recipe's held-out tasks; without a recipe, on those of the run that a checkpoint belongs to.
    `against`: another model, or the JSON file of an earlier evaluation."""
    path, version, own_recipe = find_model(model)
    if recipe is None:
        if own_recipe is None and given.held_out is None:
            raise ConfigError(f"{model!r} is no run or checkpoint of one, whose recipe could be taken; name a recipe")
        recipe = make_recipe(overrides) if own_recipe is None else load_recipe(own_recipe, overrides)
    only = {"sft": SftSettings(), "sampler": SamplerSettings(), "steps": max(1, recipe.steps)}
    recipe, given = dataclasses.replace(recipe, **only), given.settled()  # type: ignore[arg-type]
    held_out = held_out_tasks(recipe, given)
    if not held_out:
        raise ConfigError("evaluate.tasks: none are given; add an [[evaluate.tasks]] section with a source, or pass held_out=")
    # Neither the training tasks nor what they need has to be here.
    rewards = [function for function, _ in reward_functions(recipe, given)]
    given = dataclasses.replace(given, reward=rewards, tasks=[row for rows in held_out.values() for row in rows])
    check_inputs(recipe, given)
    check_engine(recipe)
    other: Sequence[TaskScore] | None = None
    if Path(against).is_file():
        other = _read_tasks(Path(against), held_out)
    elif against.endswith(".json"):
        raise ConfigError(f"against = {against!r}: there is no such file")
    elif against:
        other_path, *_ = find_model(against)
        other = _evaluate(other_path, recipe, given, held_out).tasks
    found = _evaluate(path, recipe, given, held_out)
    result = EvaluationResult(model, version, to_dict(recipe.evaluate), found)
    return result if other is None else result.compared_with(against, other)


def find_model(model: str) -> tuple[str, int | None, Path | None]:
    """(folder or name of the model, its version, the recipe of the run it comes from). Of a run it is the newest checkpoint."""
    folder = Path(model)
    run = folder if (folder / "resolved.toml").is_file() else None
    if run is not None:
        saved = saved_in(run)
        if not saved and (run / "model").is_dir():  # SFT alone
            return str(run / "model"), 0, run / "resolved.toml"
        if not saved:
            raise ConfigError(f"{model}: the run has no checkpoint yet")
        folder = saved[-1]
    if (folder / MANIFEST).is_file():
        recipe = (run or folder.absolute().parents[1]) / "resolved.toml"
        return str(folder), int(json.loads((folder / MANIFEST).read_text())["version"]), recipe if recipe.is_file() else None
    if model.startswith((".", "/", "~")) and not folder.exists():
        raise ConfigError(f"model {model!r}: the folder does not exist")
    return model, None, None


def _evaluate(path: str, recipe: Recipe, given: UserInputs, held_out: dict[str, list[dict[str, Plain]]]) -> Evaluation:
    """Load the model into engines, evaluate, and leave nothing behind."""
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, path=path))
    if base_of(path) and not recipe.lora.is_on and engine_kind(recipe.engine).has_server:
        raise ConfigError(f"{path}: it is an adapter; set [lora] as it has it, or merge it first")
    stop = StopRequest()
    kind = orchestration_of(recipe) if recipe.is_inline or recipe.engines_join else LocalProcesses

    def run() -> Evaluation:
        set_threads(recipe)
        with (
            sigterm_as_interrupt(),
            tempfile.TemporaryDirectory(prefix="headrace-evaluate-") as folder,
            model_folder(recipe, given, say=lambda _: None) as model_path,
        ):
            (Path(folder) / "logs").mkdir()
            with kind(recipe, Path(folder), trains=False) as orchestration:
                try:
                    return asyncio.run(then_end_tasks(_run(model_path, orchestration, recipe, given, held_out, stop)))
                except asyncio.CancelledError:
                    raise KeyboardInterrupt("stopped") from None
                except RoleFailed as error:
                    for log in sorted((Path(folder) / "logs").glob("engine-*.log")):  # which is removed
                        error.add_note(f"the end of {log.name}:\n{log.read_text(errors='replace')[-2000:]}")
                    raise

    return outside_event_loop(run, stop)


async def _run(
    model_path: str,
    orchestration: Inline | LocalProcesses,
    recipe: Recipe,
    given: UserInputs,
    held_out: dict[str, list[dict[str, Plain]]],
    stop: StopRequest,
) -> Evaluation:
    task = asyncio.current_task()
    assert task is not None
    screen = open_screen(steps=0, quiet=not recipe.engines_join)  # says where hosts join
    observer, most_blocks = Observer(screen=screen, elsewhere=orchestration.reporting_roles), 0
    if given.is_single_turn(recipe):
        longest = longest_prompt((), PromptEncoder(load_tokenizer(model_path, recipe.model)), held_out=held_out)
        context, count = config_limit(load_config(model_path), recipe.model.context), sum(map(len, held_out.values()))
        most_blocks = max_kv_blocks(recipe, context=context, longest_prompt=longest, num_held_out=count)
    more: dict[str, Any] = {"observer": observer, "lineage": Lineage.new(), "most_blocks": most_blocks}
    with stop.heard_by(task.cancel):
        async with orchestration.roles(model_path, given, **more) as roles, serving(roles):
            return await Evaluator(recipe, roles).run(held_out)


def _read_tasks(file: Path, held_out: Mapping[str, Sequence[dict[str, Plain]]]) -> list[TaskScore]:
    """The tasks of an earlier evaluation, which must be those of this one."""
    try:
        rows = json.loads(file.read_text())["tasks"]
        tasks = [TaskScore(**row | {name: tuple(row[name]) for name in ("rewards", "answers")}) for row in rows]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"against = {str(file)!r}: it is no file that `evaluate --json` wrote: {error}") from error
    if [task.id for task in tasks] != [task_id(row) for rows in held_out.values() for row in rows]:
        raise ConfigError(
            f"against = {str(file)!r}: it evaluated other tasks; give both evaluations the same evaluate.tasks, limit and seed"
        )
    return tasks


def _plain(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    return {name: dataclasses.asdict(each) for name, each in estimates.items()}
