"""Environments run one task to its end: `run(task, client) -> Episode`. Single-turn is built in.

The client is all that an environment sees of Headrace. It alone resumes rollouts that a weight update aborted.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.envs.client import CallLimit, Client, EngineClient, PromptEncoder
    from headrace.envs.settings import EpisodeSettings
    from headrace.envs.single_turn import Environment, SingleTurn, run_episode
else:
    __getattr__ = front_door(__name__)
