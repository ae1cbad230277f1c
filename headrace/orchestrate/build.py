"""From a recipe to the roles that carry it out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headrace.engine.native import NativeEngine
from headrace.engine.native.core import EngineCore
from headrace.envs import PromptEncoder, SingleTurn
from headrace.imports import import_name
from headrace.model.load import context_limit, load_model, load_tokenizer
from headrace.orchestrate.pipeline import Roles
from headrace.orchestrate.roles import TrainerHere
from headrace.score import RewardFunction, RewardScorer
from headrace.settings import ConfigError
from headrace.sync import MemorySync
from headrace.tasks import TaskStream, builtin_reward, open_source
from headrace.train import DeviceTrainer, resolve_loss

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.config import Recipe, TaskSettings
    from headrace.observe import Observer
    from headrace.sync import Lineage
    from headrace.types import Plain


@dataclass(frozen=True)
class UserInputs:
    """What a Python caller gave as objects; a recipe names the same things."""

    tasks: Any = None
    """Rows, a file or a Dataset, or a list of (source, weight) pairs."""
    held_out: Any = None
    reward: Any = None
    """A function, or a list of them."""


def set_threads(recipe: Recipe) -> None:
    """torch's CPU threads as the recipe says: every core by default."""
    torch.set_num_threads(recipe.threads or os.cpu_count() or 1)


def choose_device(recipe: Recipe) -> str:
    if recipe.device != "auto":
        if recipe.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device = 'cuda': torch sees no GPU; set device = 'cpu' or 'auto'")
        return recipe.device
    return "cuda" if torch.cuda.is_available() and not recipe.exact else "cpu"


def open_tasks(recipe: Recipe, given: UserInputs) -> TaskStream:
    """Training tasks from the caller or the recipe."""
    sources = _mix(given.tasks) if given.tasks is not None else [(s, s.weight) for s in recipe.tasks]
    if not sources:
        raise ConfigError("tasks: none are given; add a [[tasks]] section with a source, or pass tasks=")
    return TaskStream([(_open(source, recipe, split="train"), weight) for source, weight in sources], seed=recipe.seed)


def held_out_tasks(recipe: Recipe, given: UserInputs) -> list[dict[str, Plain]]:
    """The tasks of every evaluation: the same ones each time."""
    source: Any = given.held_out if given.held_out is not None else (recipe.evaluate.tasks or None)
    if source is None:
        return []
    sources = [source] if given.held_out is not None else list(recipe.evaluate.tasks)
    opened = [_open(each, recipe, split="held_out") for each in sources]
    limit = recipe.evaluate.limit
    lengths = [len(each) if hasattr(each, "__len__") else limit for each in opened]
    share = [min(length, -(-limit // len(opened))) for length in lengths]
    return [each.row(index) for each, count in zip(opened, share, strict=True) for index in range(count)][:limit]


def reward_functions(recipe: Recipe, given: UserInputs) -> list[tuple[RewardFunction, float]]:
    """Reward functions with their weights: the caller's, the recipe's, or the built-in task's own."""
    functions: list[Callable[..., Any]]
    if given.reward is not None:
        functions = list(given.reward) if isinstance(given.reward, list | tuple) else [given.reward]
    elif recipe.reward.functions:
        functions = [import_name(name, setting="reward.functions") for name in recipe.reward.functions]
    else:
        own = [builtin_reward(source.source) for source in recipe.tasks]
        functions = list({id(f): f for f in own if f is not None}.values())
        if not functions or None in own:
            raise ConfigError("reward: none is given; name one in reward.functions, or pass reward=")
    weights = recipe.reward.weights or (1.0,) * len(functions)
    if len(weights) != len(functions):
        raise ConfigError(f"reward.weights = {list(weights)}: there are {len(functions)} reward functions")
    rewards = [function if isinstance(function, RewardFunction) else RewardFunction(function) for function in functions]
    names = [reward.name for reward in rewards]
    for index, reward in enumerate(rewards):
        if names.count(reward.name) > 1:
            rewards[index] = RewardFunction(reward, name=f"{reward.name}_{index}")
    return list(zip(rewards, weights, strict=True))


def build_roles(recipe: Recipe, model_path: str, given: UserInputs, *, observer: Observer, lineage: Lineage) -> Roles:
    """Load the model twice, once to generate and once to train, and put everything around it."""
    resolve_loss(recipe.train.loss)
    rewards = reward_functions(recipe, given)
    tasks = open_tasks(recipe, given)
    device = choose_device(recipe)
    tokenizer = load_tokenizer(model_path)
    encoder = PromptEncoder(tokenizer)
    sync = MemorySync(lineage)
    engine_model = load_model(model_path, dtype=recipe.model.dtype, device=device, exact=recipe.exact)
    context = context_limit(engine_model, recipe.model.context)
    core = EngineCore(
        engine_model,
        name="engine-0",
        slots=recipe.engine.slots,
        context=context,
        block_size=recipe.engine.block_size,
        num_blocks=recipe.engine.kv_blocks,
        exact=recipe.exact,
    )
    trainer = DeviceTrainer(
        load_model(model_path, dtype=recipe.model.dtype, device=device, exact=recipe.exact),
        tokenizer=tokenizer,
        settings=recipe.train,
        exact=recipe.exact,
    )
    scorer = RewardScorer(
        rewards, decode=encoder.decode, attempts=recipe.reward.attempts, max_failures=recipe.reward.max_failures
    )
    return Roles(
        engine=NativeEngine(core, sync=sync, timeline=observer.timeline("engine")),
        trainer=TrainerHere(trainer, observer.timeline("trainer")),
        scorer=scorer,
        environment=SingleTurn(),
        sync=sync,
        encoder=encoder,
        tasks=tasks,
    )


def _mix(tasks: Any) -> list[tuple[Any, float]]:  # noqa: ANN401
    is_weighted = isinstance(tasks, list) and tasks and all(isinstance(t, tuple) and len(t) == 2 for t in tasks)
    return [(source, float(weight)) for source, weight in tasks] if is_weighted else [(tasks, 1.0)]


def _open(source: Any, recipe: Recipe, *, split: str) -> Any:  # noqa: ANN401
    settings: TaskSettings | None = source if hasattr(source, "source") and hasattr(source, "options") else None
    if settings is not None:
        return open_source(settings.source, seed=recipe.seed, split=split, options=settings.options)
    return open_source(source, seed=recipe.seed, split=split)
