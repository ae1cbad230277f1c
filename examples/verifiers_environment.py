"""An environment of verifiers 0.4, trained as it is: its tasks and reward, a user that gives hints, and an agent that answers.

The policy guesses a digit and is told "higher" or "lower", turn by turn. verifiers runs the episode; the classes below know
nothing of Headrace, and could be a package of their own. Needs `pip install headrace[verifiers]`.

    python examples/verifiers_environment.py
"""

from __future__ import annotations

from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

import headrace
from headrace.envs import VerifiersEnvironment

__all__ = ["Agent", "Digits", "Hints"]  # where verifiers looks for them
CLIENT = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="-")  # making one takes longer than an episode: share it


class Secret(vf.TaskData):
    secret: int


class Guess(vf.Task[Secret, vf.State, vf.TaskConfig]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        """1 for the right digit, less for each turn it took; a wrong guess at the end earns what it is near."""
        last, turns = str(trace.last_reply)[:1], int(trace.num_turns)
        if not last.isdigit():
            return -0.5 / turns
        distance = abs(int(last) - int(self.data.secret))
        return 0.3 * (1 - distance / 9) if distance else 1.1 - 0.1 * turns


class Digits(vf.Taskset[Guess, vf.TasksetConfig]):
    def load(self) -> list[Guess]:
        return [Guess(Secret(idx=secret, prompt="0-9?", secret=secret), self.config.task) for secret in range(10)]


class HintsConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class Hints(vf.Env[HintsConfig]):
    async def run(self, task: Any, agents: vf.Agents) -> None:  # noqa: ANN401
        async with agents.agent.interaction(task) as talk:
            said = (await talk.turn()).last_reply[:1]
            for _ in range(2):
                if not said.isdigit() or int(said) == task.data.secret:
                    break
                said = (await talk.turn("higher" if int(said) < task.data.secret else "lower")).last_reply[:1]


class Agent(vf.Harness[vf.HarnessConfig]):
    SUPPORTS_RESUME, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any) -> Any:  # noqa: ANN401
        _, prompt = self.resolve_prompt(data)
        messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
        client = CLIENT.with_options(base_url=endpoint, api_key=secret)
        await client.chat.completions.create(model=ctx.model, messages=list(messages), max_tokens=2)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def main(**settings: Any) -> Any:  # noqa: ANN401
    environment = VerifiersEnvironment("verifiers_environment")
    model = {"path": "builtin:tiny", "hidden_size": 64, "num_layers": 2, "context": 96}
    train = {"batch": 48, "group_size": 8, "learning_rate": 3e-3}
    defaults: Any = {"steps": 40, "model": model, "train": train, "sampling": {"max_tokens": 2}, "staleness": {"max_lag": 1}}
    return headrace.train(tasks=environment.rows(), environment=environment, **defaults | settings)


if __name__ == "__main__":
    summary = main().summary
    print(f"reward {summary['reward_first']:.2f} -> {summary['reward_last']:.2f}")
