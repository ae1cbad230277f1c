"""Environments run one task to its end: `run(task, client) -> Episode`. Single-turn and tools over several turns are built in.

The client is all that an environment sees of Headrace. It alone resumes rollouts that a weight update aborted.

Agents need no client: `agents` (a function) and `program` (a command) give them a URL and a key, `endpoint` answers there,
`agent_responses` reads OpenAI's second interface, `agent_rollouts` makes rollouts of what they ask, and `answer_stream` tells
an answer while it is generated.

Environments of other processes that push scored groups: `pushed` has the run's places for them, `push_server` answers them,
and `scored_groups` reads what they push and knows what was sampled for them.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.envs.adapters import list_adapters
    from headrace.envs.agents import Session, agent
    from headrace.envs.client import CallLimit, Client, EngineClient
    from headrace.envs.encoder import PromptEncoder
    from headrace.envs.gymnasium_adapter import GymnasiumEnvironment
    from headrace.envs.hosting import HostedEnvironment, can_resume, check_environment, is_single_turn, make_environment
    from headrace.envs.openenv_adapter import OpenEnvEnvironment
    from headrace.envs.processes import REFUSALS, ProcessEnvironment
    from headrace.envs.program import ProgramAgent
    from headrace.envs.pushed import PushedEnvironment
    from headrace.envs.settings import TOOL_TIMEOUT, EnvironmentSettings, EpisodeSettings
    from headrace.envs.single_turn import Environment, SingleTurn, run_episode
    from headrace.envs.steps import ENVIRONMENT, StepEnvironment
    from headrace.envs.tools import MCP, ToolEnvironment
    from headrace.envs.trl_adapter import TrlEnvironment
    from headrace.envs.turns import Conversation, TemplateError
    from headrace.envs.verifiers_adapter import LoadedVerifiersEnvironment, VerifiersEnvironment
else:
    __getattr__ = front_door(__name__)
