"""Every setting of a run: one frozen section per room, the recipe made of them, and the checks that need two rooms at once."""

from __future__ import annotations

from headrace.config.generation import (
    EngineSettings,
    ModelSettings,
    RewardSettings,
    SamplingSettings,
    TaskSettings,
    WarmupSettings,
)
from headrace.config.recipe import Recipe, load_recipe, make_recipe, parse_recipe
from headrace.config.training import (
    BufferSettings,
    CheckpointSettings,
    EvaluateSettings,
    ObserveSettings,
    PartialSettings,
    StalenessSettings,
    SyncSettings,
    TrainSettings,
)
from headrace.config.vllm import VllmSettings

__all__ = [
    "BufferSettings",
    "CheckpointSettings",
    "EngineSettings",
    "EvaluateSettings",
    "ModelSettings",
    "ObserveSettings",
    "PartialSettings",
    "Recipe",
    "RewardSettings",
    "SamplingSettings",
    "StalenessSettings",
    "SyncSettings",
    "TaskSettings",
    "TrainSettings",
    "VllmSettings",
    "WarmupSettings",
    "load_recipe",
    "make_recipe",
    "parse_recipe",
]
