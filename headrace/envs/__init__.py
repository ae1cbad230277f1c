"""Environments run one task to its end through a client: `run(task, client) -> Episode`. Single-turn is built in."""

from headrace.envs.client import Client, EngineClient, PromptEncoder
from headrace.envs.single_turn import Environment, SingleTurn

__all__ = ["Client", "EngineClient", "Environment", "PromptEncoder", "SingleTurn"]
