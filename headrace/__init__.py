"""Headrace trains language models with reinforcement learning while rollouts keep flowing.

import headrace
run = headrace.train(model="path/to/model", tasks=my_tasks, reward=my_reward, steps=100)
print(run.summary["bound_by"], run.checkpoint)

`headrace.start` takes the same arguments and returns at once.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import Recipe, load_recipe, make_recipe
from headrace.errors import is_ours, without_our_frames
from headrace.front_door import front_door
from headrace.records import Batch, Episode, Rollout, WeightUpdate
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.envs import Environment, Session, agent
    from headrace.launch import EvaluationResult, Launch, RunHandle, RunResult, UserInputs
    from headrace.run import Callback
else:
    __getattr__ = front_door(__name__)

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "Callback",
    "ConfigError",
    "Environment",
    "Episode",
    "Recipe",
    "Rollout",
    "Session",
    "WeightUpdate",
    "agent",
    "evaluate",
    "load_recipe",
    "merge",
    "reward",
    "start",
    "train",
]


def train(
    model: str | Path | dict[str, Any] | None = None,
    *,
    tasks: Any = None,  # noqa: ANN401  (rows, a file, a Dataset, or (source, weight) pairs)
    reward: Any = None,  # noqa: ANN401  (one function or several, of either signature)
    reward_weights: list[float] | None = None,
    steps: int | None = None,
    held_out: Any = None,  # noqa: ANN401  (as tasks)
    environment: Any = None,  # noqa: ANN401  (an object with `run(task, client)`, its class, or a recipe's section)
    tools: Sequence[Any] | None = None,
    sampler: Any = None,  # noqa: ANN401  (a class or function, or a recipe's section)
    callbacks: Sequence[Any] = (),
    recipe: str | Path | None = None,
    run_dir: str | Path | None = None,
    name: str = "run",
    fresh: bool = False,
    resume_anyway: bool = False,
    quiet: bool = False,
    **settings: Any,  # noqa: ANN401  (sections of a recipe)
) -> RunResult:
    """Train `model` on `tasks` with `reward`, and return the result.

    `model` is a Hugging Face folder or hub name, `builtin:tiny`, or a recipe's whole model section as a dict.
    `tasks` is a list of dicts with a `prompt` (text or chat messages), a file, a dataset of the hub by name, a
    `datasets.Dataset`, a pandas DataFrame, a dict such as `{"source": rows, "columns": {…}, "map": f}` with any of these, or a
    list of names, dicts or (source, weight) pairs; other columns are passed to the reward. `reward` has TRL's batch
    signature or is `f(prompt, completion, **row)`, or a name, `"module:f"`; a list is summed with `reward_weights`; a dict is
    the recipe's reward section, whose `functions` may be functions: `reward={"functions": f, "timeout": 5, "workers": 4}`.
    `held_out` tasks are evaluated, never trained. `tools` are functions or classes that the policy may call over several turns,
    and `environment` an object or class of your own that runs a task, or a dict, the recipe's section (docs/environments.md).
    `sampler` is a class that chooses the tasks (docs/rewards.md), or a dict, the recipe's sampler section. Any other section of
    a recipe is a keyword argument, `train={"learning_rate": 1e-5}`, and overrides the file `recipe` if given. `callbacks` are
    objects with some of the methods of `headrace.Callback`. `fresh`
    starts a new run even if the same call would resume an unfinished one, `resume_anyway` resumes one although its tasks or
    model have been edited; `quiet` prints nothing. Ctrl-C saves, then raises `KeyboardInterrupt`.
    """
    given = dict(locals())
    try:
        parsed, inputs, how = _parse(given)
        from headrace.launch import launch

        return launch(parsed, inputs, how)
    except Exception as error:
        if not is_ours(error):
            raise
        raise without_our_frames(error) from error.__cause__


def start(model: str | Path | dict[str, Any] | None = None, **arguments: Any) -> RunHandle:  # noqa: ANN401
    """Start what `headrace.train` would do with the same arguments, and return a handle at once. The run goes on in a thread;
    when the program ends, it is stopped and saved. A wrong setting raises here, anything later in `RunHandle.result`."""
    bound = inspect.signature(train).bind(model, **arguments)
    bound.apply_defaults()
    try:
        parsed, inputs, how = _parse(bound.arguments)
    except Exception as error:
        if not is_ours(error):
            raise
        raise without_our_frames(error) from error.__cause__
    from headrace.launch import RunHandle

    return RunHandle(parsed, inputs, how)


def _parse(given: Mapping[str, Any]) -> tuple[Recipe, UserInputs, Launch]:
    """Recipe, inputs and options from the arguments of `train`."""
    overrides, reward = _overrides(given["settings"], given["reward"], given["reward_weights"])
    sampler, environment, model, recipe = (given[name] for name in ("sampler", "environment", "model", "recipe"))
    if isinstance(sampler, dict):
        overrides["sampler"], sampler = sampler, None
    if isinstance(environment, dict):
        overrides["environment"], environment = environment, None
    if model is not None:
        overrides["model"] = model if isinstance(model, dict) else {"path": str(model)}
    if given["steps"] is not None:
        overrides["steps"] = given["steps"]
    sft, examples = given["settings"].get("sft"), dict[str, Any]()
    if isinstance(sft, dict):  # its tasks may be rows
        overrides["sft"] = {key: value for key, value in sft.items() if key not in ("tasks", "held_out")}
        examples = {"sft": sft.get("tasks"), "sft_held_out": sft.get("held_out")}
    parsed = make_recipe(overrides) if recipe is None else load_recipe(recipe, overrides)

    from headrace.launch import Launch, UserInputs  # it imports torch: a wrong setting is reported before that

    how = Launch(
        name=Path(recipe).stem if recipe is not None else given["name"],
        run_dir=None if given["run_dir"] is None else Path(given["run_dir"]),
        fresh=given["fresh"],
        resume_anyway=given["resume_anyway"],
        quiet=given["quiet"],
        callbacks=tuple(given["callbacks"]),
    )
    as_given = {name: given[name] for name in ("tasks", "held_out", "tools")}
    return parsed, UserInputs(**as_given, **examples, reward=reward, sampler=sampler, environment=environment), how


def evaluate(
    model: str | Path | dict[str, Any],
    *,
    held_out: Any = None,  # noqa: ANN401  (as in train)
    reward: Any = None,  # noqa: ANN401  (as in train)
    reward_weights: list[float] | None = None,
    environment: Any = None,  # noqa: ANN401  (as in train)
    tools: Sequence[Any] | None = None,
    recipe: str | Path | None = None,
    against: str | Path = "",
    **settings: Any,  # noqa: ANN401  (sections of a recipe)
) -> EvaluationResult:
    """Evaluate `model` on held-out tasks, without training, and return the result; print it for a table.

    `model` is a run's folder (its newest checkpoint), one of its checkpoints, or a model as in `train`. Without a `recipe`, a
    run's own is taken; other models need `held_out` and `reward` then. Sections override it: `evaluate={"samples": 8}`.
    `against` is another model, or the JSON file of an earlier evaluation: the result then has paired differences.
    """
    overrides, reward = _overrides(settings, reward, reward_weights)
    if isinstance(environment, dict):
        overrides["environment"], environment = environment, None
    if isinstance(model, dict):
        overrides["model"], model = model, str(model.get("path", ""))
    try:
        from headrace.launch import UserInputs, evaluate as launch_evaluation

        parsed = None if recipe is None else load_recipe(recipe, overrides)
        inputs = UserInputs(held_out=held_out, reward=reward, environment=environment, tools=tools)
        return launch_evaluation(str(model), parsed, inputs, overrides=overrides, against=str(against))
    except Exception as error:
        if not is_ours(error):
            raise
        raise without_our_frames(error) from error.__cause__


def merge(model: str | Path, out: str | Path) -> Path:
    """Write what a LoRA run made as one Hugging Face folder, in float32, and return it. `model` is the run's folder (its newest
    checkpoint), one of its checkpoints, or any folder with an adapter; `out` is new or empty."""
    from headrace.launch import merge as launch_merge

    return launch_merge(str(model), Path(out))


def _overrides(settings: dict[str, Any], reward: Any, weights: list[float] | None) -> tuple[dict[str, Any], Any]:  # noqa: ANN401
    """(the recipe's sections, the reward as an object): a dict is the recipe's reward section."""
    overrides: dict[str, Any] = dict(settings)
    if isinstance(reward, dict):
        overrides["reward"], reward = dict(reward), None
        functions = overrides["reward"].get("functions", ())
        if not all(isinstance(f, str) for f in (functions if isinstance(functions, list | tuple) else [functions])):
            reward = overrides["reward"].pop("functions")
    if weights is not None:
        overrides["reward.weights"] = list(weights)
    return overrides, reward


def reward(
    function: Any = None,  # noqa: ANN401
    *,
    name: str = "",
    timeout: float | None = None,
    attempts: int | None = None,
    weight: float | None = None,
    processes: bool | None = None,
) -> Any:  # noqa: ANN401  (a decorator, with or without arguments)
    """Give a reward function a name of its own in metrics and rollouts, `@headrace.reward(name="exact")`, and settings that
    differ from the recipe's `[reward]`. `weight` is for runs without `reward.weights`; `processes=False` has it called in a
    thread even if `reward.processes` is set."""
    from headrace.score import RewardFunction

    own: dict[str, Any] = {"timeout": timeout, "attempts": attempts, "weight": weight, "processes": processes}
    own = {key: value for key, value in own.items() if value is not None}
    make: Any = functools.partial(RewardFunction, name=name, **own)
    return make if function is None else make(function)
