"""The roles of a run around a stub engine and a stub trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.envs import PromptEncoder, SingleTurn
from headrace.launch import UserInputs, open_tasks
from headrace.model import build_tokenizer
from headrace.run import POLICY, Roles, make_canary
from headrace.score import RewardFunction, RewardScorer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.bench.stubs import StubTrainer
    from headrace.config import Recipe


def make_roles(
    recipe: Recipe, engine: Any, trainer: StubTrainer, *, reward: Callable[..., float], prompts: Sequence[str], **more: Any
) -> Roles:
    """Of single-turn tasks with these prompts. `more`: other fields of `Roles`."""
    encoder = PromptEncoder(build_tokenizer())
    given = {
        "engine": engine,
        "trainers": {POLICY: trainer},
        "scorer": RewardScorer([(RewardFunction(reward), 1.0)], decode=encoder.decode, settings=recipe.reward),
        "environment": SingleTurn(),
        "encoder": encoder,
        "tasks": open_tasks(recipe, UserInputs(tasks=[{"prompt": prompt} for prompt in prompts])),
        "canary": make_canary(encoder.encode("canary")),
        "stop_ids": (1,),
        "services": (),
    }
    return Roles(**{**given, **more})
