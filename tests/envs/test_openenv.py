"""OpenEnv's own server, on loopback, as turns."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from templates import tokenizer_of
from test_turns import check_trained, client_of

from headrace.envs import OpenEnvEnvironment, run_episode
from headrace.records import FinishReason, InfraAbort
from headrace.settings import ConfigError

pytest.importorskip("openenv.core")
uvicorn = pytest.importorskip("uvicorn")

from openenv.core.env_server.http_server import create_fastapi_app  # noqa: E402
from openenv.core.env_server.interfaces import Environment  # noqa: E402
from openenv.core.env_server.types import Action, Observation, State  # noqa: E402

END, STOP = "<|im_end|>", FinishReason.STOP
TASK = {"prompt": [{"role": "user", "content": "Play."}], "options": {"secret": 7}}


class Guess(Action):
    number: int


class Hint(Observation):
    text: str = ""


class Game(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.secret = self.count = 0

    def reset(self, seed=None, episode_id=None, secret=None, **_):
        self.secret, self.count = secret if secret is not None else seed % 10, 0
        return Hint(text="Guess a digit.")

    def step(self, action, timeout_s=None, **_):
        self.count += 1
        if action.number < 0:
            raise OSError("the game broke")
        is_right = action.number == self.secret
        text = "right" if is_right else "higher" if action.number < self.secret else "lower"
        return Hint(text=text, reward=1.0 if is_right else 0.1, done=is_right)

    @property
    def state(self):
        return State(step_count=self.count)


@pytest.fixture(scope="module")
def url():
    app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=2)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


async def play(url: str, says: list[str], number: int = 0, **options):
    client, engine = client_of(tokenizer_of("qwen2_5"), seed=number)
    engine.says = [(f"{text}{END}", STOP) for text in says]
    episode = await run_episode(OpenEnvEnvironment(url, **options), TASK, client)
    return episode, client, engine


def test_a_field_is_the_action_and_a_field_the_observation(url: str) -> None:
    episode, client, engine = asyncio.run(play(url, ["3", "9", "7"], action="number", observation="text"))
    (rollout,) = episode.rollouts
    said = [message["content"] for message in client.messages(rollout)]
    assert said[-6:] == ["Play.\n\nGuess a digit.", "3", "higher", "9", "lower", "7"]
    assert rollout.rewards == {"environment": pytest.approx(1.2)}
    check_trained(episode.rollouts, engine)


def test_without_fields_both_are_json(url: str) -> None:
    says = ["three", "[3]", '{"guess": 3}', '{"number": 7}']
    episode, client, _ = asyncio.run(play(url, says))
    (rollout,) = episode.rollouts
    said = [message["content"] for message in client.messages(rollout)]
    assert '{"text": "Guess a digit."' in said[-8]
    assert all("This is not a valid action" in text for text in (said[-6], said[-4], said[-2]))
    assert rollout.rewards == {"environment": 1.0}


async def test_episodes_have_sessions_of_their_own(url: str) -> None:
    how = {"action": "number", "observation": "text"}
    first, second = await asyncio.gather(play(url, ["3", "7"], **how), play(url, ["9", "8", "7"], number=1, **how))
    assert [len(episode.rollouts[0].calls) for episode, _, _ in (first, second)] == [2, 3]


def test_a_server_that_fails_costs_the_episode(url: str) -> None:
    broken, _, _ = asyncio.run(play(url, ["-1"], action="number", observation="text"))
    assert isinstance(broken.outcome, InfraAbort) and "the game broke" in broken.outcome.reason
    gone, _, _ = asyncio.run(play("http://127.0.0.1:9", ["1"]))
    assert isinstance(gone.outcome, InfraAbort) and "127.0.0.1:9" in gone.outcome.reason
    fine, _, _ = asyncio.run(play(url, ["7"], action="number", observation="text"))  # the session has ended there
    assert fine.rollouts[0].rewards == {"environment": 1.0}


def test_mistakes_are_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"environment.options.url = 'localhost:80'"):
        OpenEnvEnvironment("localhost:80")
    with pytest.raises(ConfigError, match=r"environment.options.observation = 'screen'.*there are text"):
        asyncio.run(play(url, ["1"], observation="screen"))
