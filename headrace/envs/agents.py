"""Any agent as an environment: it gets the address of an OpenAI-compatible endpoint and a key for its episode, and whatever it
asks there becomes the episode's rollouts (`agent_rollouts`). `agent` makes one of a function, `program.py` of a command."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import inspect
import math
import numbers
import secrets
import time
from typing import TYPE_CHECKING, Any, ClassVar, cast, overload

from headrace.engine import ApiError
from headrace.envs.agent_rollouts import AgentRollouts
from headrace.envs.endpoint import Endpoint
from headrace.records import Episode, Scored
from headrace.settings import ConfigError
from headrace.user_code import UserThread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace.envs.agent_rollouts import AgentCall, Reply, Tell
    from headrace.envs.client import Client
    from headrace.records import Plain


class Session:
    """An agent's episode: what it works on, where it finds the model, and its reward."""

    def __init__(self, client: Client, row: dict[str, Plain], *, base_url: str) -> None:
        self.row = row
        """The task."""
        self.base_url = base_url
        """For any OpenAI client."""
        self.api_key = secrets.token_urlsafe(32)
        """Opens this episode, as long as it runs, and nothing else."""
        self.rewards: dict[str, float] = {}
        self.rollouts = AgentRollouts(client)
        self._calls: set[asyncio.Task[Reply]] = set()
        self._kept: set[asyncio.Task[Reply]] = set()
        self._is_over = False

    def reward(self, reward: float | dict[str, float]) -> None:
        """Sets the episode's reward, a number or several by name, which are summed. The last one of a name stands."""
        found: Any = reward if isinstance(reward, dict) else {"reward": reward}
        for name, value in found.items():
            is_number = isinstance(name, str) and isinstance(value, numbers.Real) and math.isfinite(value)
            if not is_number:
                raise ValueError(f"reward {name!r} = {value!r}: must be a finite number, or a dict of them by name")
        self.rewards |= {name: float(value) for name, value in found.items()}

    async def call(self, call: AgentCall, tell: Tell | None = None) -> Reply:
        """The endpoint's request. Ends with the episode; cancelling it cancels the call at the engine. `tell` gets pieces of
        the answer as they are generated."""
        if self._is_over:
            raise _ended()
        task = asyncio.ensure_future(self.rollouts.reply(call, tell))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # so that asyncio does not report it
        self._calls.add(task)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            self._calls.discard(task)
        if task.cancelled():
            raise _ended()
        return task.result()

    def keep(self, call: asyncio.Task[Reply]) -> None:
        """The agent may have read the start of a call's answer: if it leaves, the call goes on to its end."""
        self._kept.add(call)
        call.add_done_callback(self._kept.discard)
        call.add_done_callback(lambda call: call.cancelled() or call.exception())  # so that asyncio does not report it

    async def finish_kept(self) -> None:
        """Waits for the calls that the agent has left so."""
        if self._kept:
            await asyncio.wait(self._kept)

    def close(self) -> None:
        """The episode is over: calls in flight end, later ones are refused."""
        self._is_over = True
        for task in self._calls:
            task.cancel()


def _ended() -> ApiError:
    return ApiError(401, "the episode of this key has ended", code="invalid_api_key")


class AgentEnvironment(abc.ABC):
    """Runs an agent on each task. All episodes of an event loop, those of evaluations too, share one endpoint."""

    _endpoint: ClassVar[Endpoint | None] = None

    def __init__(self, name: str) -> None:
        self.name = name

    @abc.abstractmethod
    async def act(self, session: Session) -> object:
        """Let the agent work on the session's task; returns its reward, or None if that is given otherwise."""

    async def run(self, task: dict[str, Plain], client: Client) -> Episode:
        started, endpoint = time.time(), AgentEnvironment._endpoint
        if endpoint is None or not endpoint.is_open:
            endpoint = AgentEnvironment._endpoint = Endpoint()
        session = Session(client, task, base_url=endpoint.base_url)
        with endpoint.admits(session):
            try:
                reward = await self.act(session)
                await session.finish_kept()
            except Exception:
                if not session.rollouts.is_truncated and session.rollouts.refusal is None:
                    raise  # else the policy has used up its tokens, and is scored, or could not answer
                reward = None
        return self._episode(session, reward, id=client.episode, group=client.group, started=started)

    def _episode(self, session: Session, reward: Any, **names: Any) -> Episode:  # noqa: ANN401
        rollouts, refusal = session.rollouts.finished, session.rollouts.refusal
        if refusal is not None and (isinstance(refusal, ConfigError) or not rollouts):
            raise refusal
        if not rollouts:
            raise RuntimeError(f"the agent {self.name!r} has ended, and the model has not answered it once")
        if reward is not None:
            try:
                session.reward(reward)
            except ValueError as error:
                raise ConfigError(f"agent {self.name!r} returned a {error}, or None") from error
        outcome = None
        if session.rewards:
            outcome = Scored(sum(session.rewards.values()))
            rollouts = tuple(rollout.replace(outcome=outcome, rewards=dict(session.rewards)) for rollout in rollouts)
        names |= {"task": session.row, "rollouts": rollouts, "outcome": outcome}
        return Episode(environment=self.name, finished=time.time(), **names)


class FunctionAgent(AgentEnvironment):
    """A function of a `Session`. A plain one is called in a thread of its own."""

    def __init__(self, function: Callable[[Session], Any], *, can_resume: bool = False) -> None:
        if not callable(function) or isinstance(function, type):
            raise ConfigError(f"headrace.agent({function!r}): must be a function of a session, `async def solve(session)`")
        super().__init__(getattr(function, "__qualname__", type(function).__qualname__))
        self._function = function
        functools.update_wrapper(cast("Any", self), function)  # its name and its code are the function's
        self.can_resume = can_resume

    async def act(self, session: Session) -> object:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(session)
        with contextlib.closing(UserThread(f"agent {self.name}")) as thread:
            result = await thread.call(self._function, session)
        return await cast("Awaitable[object]", result) if inspect.isawaitable(result) else result


@overload
def agent(function: Callable[[Session], Any], *, can_resume: bool = False) -> FunctionAgent: ...
@overload
def agent(*, can_resume: bool = False) -> Callable[[Callable[[Session], Any]], FunctionAgent]: ...
def agent(function: Callable[[Session], Any] | None = None, *, can_resume: bool = False) -> Any:
    """An environment that runs a function on each task: `headrace.train(environment=headrace.agent(solve), …)`.

    The function gets a session: `session.row` is the task, `session.base_url` and `session.api_key` are for any OpenAI client.
    What it returns is the reward: a number, several by name, or None for the run's own reward functions. `can_resume`, as in
    `@headrace.agent(can_resume=True)`, declares that the same answers lead it to the same calls. See docs/agents.md.
    """
    made = functools.partial(FunctionAgent, can_resume=can_resume)
    return made if function is None else made(function)
