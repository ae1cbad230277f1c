"""Headrace trains language models with reinforcement learning while rollouts keep flowing.

import headrace
run = headrace.train(model="path/to/model", tasks=my_tasks, reward=my_reward, steps=100)
print(run.summary["bound_by"], run.checkpoint)
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import Recipe, load_recipe, make_recipe
from headrace.errors import is_ours, user_cause
from headrace.front_door import front_door
from headrace.records import Batch, Episode, Rollout, WeightUpdate
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.envs import Environment
    from headrace.launch import RunResult
else:
    __getattr__ = front_door(__name__)

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "ConfigError",
    "Environment",
    "Episode",
    "Recipe",
    "Rollout",
    "WeightUpdate",
    "load_recipe",
    "reward",
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
    environment: Any = None,  # noqa: ANN401  (an object with `run(task, client)`)
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
    `tasks` is a list of dicts with a `prompt` (text or chat messages), a JSONL or parquet file, a `datasets.Dataset`, or
    a list of files or of (source, weight) pairs of these; other columns are passed to the reward. `reward` has TRL's batch
    signature or is `f(prompt, completion, **row)`; a list is summed with `reward_weights`; a dict is the recipe's reward
    section. `held_out` tasks are evaluated, never trained. Any other section of a recipe is a keyword argument,
    `train={"learning_rate": 1e-5}`, and overrides the file `recipe` if given. `fresh` starts a new run even if the same call
    would resume an unfinished one, `resume_anyway` resumes one although its tasks or model have been edited; `quiet` prints
    nothing. Ctrl-C saves, then raises `KeyboardInterrupt`.
    """
    overrides: dict[str, Any] = dict(settings)
    if isinstance(reward, dict):
        overrides["reward"], reward = reward, None
    if reward_weights is not None:
        overrides["reward.weights"] = list(reward_weights)
    if model is not None:
        overrides["model"] = model if isinstance(model, dict) else {"path": str(model)}
    if steps is not None:
        overrides["steps"] = steps
    try:
        parsed = make_recipe(overrides) if recipe is None else load_recipe(recipe, overrides)

        from headrace.launch import Launch, UserInputs, launch

        how = Launch(
            name=Path(recipe).stem if recipe is not None else name,
            run_dir=None if run_dir is None else Path(run_dir),
            fresh=fresh,
            resume_anyway=resume_anyway,
            quiet=quiet,
        )
        inputs = UserInputs(tasks=tasks, held_out=held_out, reward=reward, environment=environment)
        return launch(parsed, inputs, how)
    except Exception as error:
        if not is_ours(error):
            raise
        raise error.with_traceback(None) from user_cause(error)  # the full traceback is in the log


def reward(function: Any = None, *, name: str = "") -> Any:  # noqa: ANN401  (a decorator, with or without arguments)
    """Give a reward function a name of its own in metrics and rollouts: `@headrace.reward(name="exact")`."""
    from headrace.score import RewardFunction

    return functools.partial(RewardFunction, name=name) if function is None else RewardFunction(function, name=name)
