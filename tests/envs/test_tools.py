"""Tools: schemas, calls, replies, limits, and the environment that loops over them."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from templates import tokenizer_of
from test_turns import check_trained, client_of

from headrace.envs import CallLimit, ToolEnvironment, run_episode
from headrace.envs.turns import Conversation
from headrace.model.tiny import build_tokenizer
from headrace.records import FinishReason, InfraAbort, Source
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHAT = [{"role": "user", "content": "hi"}]
END = "<|im_end|>"


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return f"waited {seconds}"


def block(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return threading.current_thread().name


class Counter:
    """Counts."""

    made: ClassVar[list[Counter]] = []

    def __init__(self, task: dict) -> None:
        self.count, self.is_closed = task.get("start", 0), False
        Counter.made.append(self)

    def increase(self, by: int) -> dict:
        """Increase the count.

        Args:
            by: how much
        """
        self.count += by
        return {"count": self.count}

    def _hidden(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(environment: ToolEnvironment, *says: str, task: dict | None = None, name: str = "qwen2_5", **more):
    """The episode of a policy that says these things, its engine, and the messages of the last rollout."""
    client, engine = client_of(tokenizer_of(name), **more)
    engine.says = [(text, FinishReason.STOP if text.endswith(END) else FinishReason.LENGTH) for text in says]
    episode = asyncio.run(run_episode(environment, {"prompt": CHAT, **(task or {})}, client))
    assert episode.outcome is None, episode.outcome
    check_trained(episode.rollouts, engine)
    return episode, engine, client.messages(episode.rollouts[-1])


def replies(messages: list[dict]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "tool"]


def test_the_policy_calls_until_it_answers() -> None:
    episode, engine, messages = play(ToolEnvironment([add]), call("add", a=2, b=3) + END, call("add", a=4) + END, f"9{END}")
    assert replies(messages) == ["5", "5"] and messages[-1] == {"role": "assistant", "content": "9"}
    (rollout,) = episode.rollouts
    assert len(rollout.calls) == 3 and episode.environment == "tools"
    assert engine.tokenizer.decode(rollout.token_ids[rollout.source == Source.TOOL].tolist()) == "55"
    shown = engine.tokenizer.decode(rollout.token_ids.tolist())
    assert "Add two numbers." in shown and '"b": {"type": "integer"' in shown


def test_calls_of_one_answer_run_at_the_same_time() -> None:
    both = call("wait", seconds=0.4) + "\n" + call("block", seconds=0.4) + "\n" + call("wait", seconds=0.3)
    started = time.monotonic()
    _, _, messages = play(ToolEnvironment([wait, block]), both + END, f"ok{END}")
    assert time.monotonic() - started < 0.95
    assert replies(messages) == ["waited 0.4", "tool", "waited 0.3"], "in the order of the calls, plain ones in a thread"


def test_a_class_has_an_instance_for_each_episode() -> None:
    Counter.made.clear()
    environment = ToolEnvironment([Counter])
    for start in (10, 20):
        _, _, messages = play(
            environment, call("increase", by=1) + END, call("increase", by=2) + END, f"ok{END}", task={"start": start}
        )
        assert replies(messages) == [json.dumps({"count": start + 1}), json.dumps({"count": start + 3})]
    assert len(Counter.made) == 2 and all(counter.is_closed for counter in Counter.made)


def test_errors_go_back_to_the_policy() -> None:
    def broken(x: str) -> str:
        """Break.

        Args:
            x: anything
        """
        raise KeyError(x) if x != "exit" else SystemExit(3)

    async def exits() -> None:
        """Exit."""
        sys.exit(4)

    says = [call("broken", x="k"), call("broken", x="exit"), call("nothing"), call("add", c=1), call("add", a="x")]
    says += [call("exits")]
    environment = ToolEnvironment([broken, add, wait, exits], tool_timeout=0.2, max_turns=9)
    _, _, messages = play(environment, *(text + END for text in says), call("wait", seconds=5) + END, f"ok{END}")
    found = replies(messages)
    assert found[0] == "Error: KeyError: 'k'" and found[1] == "Error: SystemExit: 3"
    assert "there is no tool 'nothing'; there are broken, add, wait, exits" in found[2]
    assert "unexpected keyword argument" in found[3] and "TypeError" in found[4]
    assert found[5:] == ["Error: SystemExit: 4", "Error: it took longer than 0.2 s"]


def test_numbers_that_a_model_writes_as_text_are_read() -> None:
    text = "<tool_call>\n<function=add>\n<parameter=a>\n41\n</parameter>\n</function>\n</tool_call>"
    _, _, messages = play(
        ToolEnvironment([add]), f"x\n</think>\n\n{text}{END}", f"y\n</think>\n\nok{END}", name="qwen3_5_think"
    )
    assert replies(messages) == ["42"]


def test_long_replies_are_cut() -> None:
    def flood(n: int) -> str:
        """Flood.

        Args:
            n: how much
        """
        return "x" * n

    _, _, messages = play(ToolEnvironment([flood], max_reply=100), call("flood", n=5_000_000) + END, f"ok{END}")
    assert replies(messages) == ["x" * 100 + " … (4999900 more characters)"]


def test_limits_end_an_episode_and_it_is_scored() -> None:
    more = call("add", a=1) + END
    episode, engine, _ = play(ToolEnvironment([add], max_turns=2), more, more, more)
    assert len(episode.rollouts[0].calls) == 2 and engine.says and episode.rollouts[0].finish_reason is FinishReason.STOP
    episode, _, _ = play(ToolEnvironment([add], max_tokens=10), more, more)
    assert len(episode.rollouts[0].calls) == 1
    episode, _, _ = play(ToolEnvironment([add]), more, call("add", a=1), more)
    assert episode.rollouts[0].finish_reason is FinishReason.LENGTH and len(episode.rollouts[0].calls) == 2
    length = len(play(ToolEnvironment([add]), more, f"2{END}")[0].rollouts[0])
    episode, _, _ = play(ToolEnvironment([add]), more, f"2{END}", context=length - 10)
    assert episode.rollouts[0].finish_reason is FinishReason.LENGTH and len(episode.rollouts[0].calls) == 1
    assert episode.rollouts[0].is_sampled[-1], "the reply that did not fit is left out"


@pytest.mark.parametrize(
    ("waits", "took", "max_seconds", "answers"), [(0, 0, 0.3, 2), (0.5, 0, 0.3, 2), (0, 0.5, 0.3, 1), (0, 0, 60, 3)]
)
def test_an_episode_ends_after_its_seconds_and_is_scored(waits, took, max_seconds, answers) -> None:
    """What its first call waits for a place at the engines does not count, and what it takes there does."""

    async def main():
        client, engine = client_of(tokenizer_of("qwen2_5"), seed=1)
        engine.says = [(call("wait", seconds=0.4) + END, FinishReason.STOP)] * 3
        client.limit, engine.took = CallLimit(1), took
        await client.limit.acquire(is_first=True)
        asyncio.get_running_loop().call_later(waits, client.limit.release)
        environment = ToolEnvironment([wait], max_turns=3, max_seconds=max_seconds)
        return await run_episode(environment, {"prompt": CHAT}, client)

    episode = asyncio.run(main())
    (rollout,) = episode.rollouts
    assert len(rollout.calls) == answers and rollout.finish_reason is FinishReason.STOP and episode.outcome is None
    with pytest.raises(ConfigError, match=r"environment.options.max_seconds = -1"):
        ToolEnvironment([wait], max_seconds=-1)


async def test_what_an_answer_took_before_a_restart_does_not_count() -> None:
    """It is returned at once when the episode is resumed, with its call's times as they were."""
    rollout: Any = SimpleNamespace(calls=[SimpleNamespace(started=0.0, finished=60.0)])
    client: Any = SimpleNamespace(prompt=lambda *_: rollout, messages=lambda _: [{"role": "assistant"}])
    client.generate = lambda _: asyncio.sleep(0, rollout)
    conversation = Conversation(client, CHAT)
    await conversation.generate()
    assert conversation.seconds < 30


def test_a_text_prompt_works_without_a_template() -> None:
    client, engine = client_of(build_tokenizer())
    engine.tokenizer.chat_template = None
    engine.says = [(call("add", a=2, b=2), FinishReason.STOP), ("4", FinishReason.STOP)]
    episode = asyncio.run(run_episode(ToolEnvironment([add]), {"prompt": "2+2="}, client))
    assert client.text(episode.rollouts[0]) == call("add", a=2, b=2) + "<tool_response>\n4\n</tool_response>\n4"


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ([], "give a list"),
        ("x:y", "give a list"),
        ([lambda x: x], "has no schema: it needs type hints"),
        ([add, "tests_missing:x"], "No module named 'tests_missing'"),
        ([Counter({})], "give the class"),
        ([type("Empty", (), {})], "no public methods"),
    ],
)
def test_what_is_no_tool_is_refused(tools, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ToolEnvironment(tools)


def test_tools_need_names_of_their_own() -> None:
    with pytest.raises(ConfigError, match="two tools are named 'add'"):
        play(ToolEnvironment([add, add]))


SERVER = """
import os
from mcp.server import MCPServer

server = MCPServer("demo")

@server.tool()
def times(a: int, b: int) -> int:
    '''Multiply.'''
    return a * b

@server.tool()
def die() -> str:
    '''End.'''
    os._exit(3)

@server.tool()
def fail() -> str:
    '''Fail.'''
    raise ValueError("no luck")

server.run()
"""


async def test_tools_of_an_mcp_server(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER)
    environment = ToolEnvironment([f"mcp:{sys.executable} {tmp_path / 'server.py'}", add], tool_timeout=20.0)
    found = []
    for says in ([call("times", a=6, b=7), call("fail"), call("die")], [call("times", a=2, b=2) + call("add", a=1)]):
        client, engine = client_of(tokenizer_of("qwen2_5"))
        engine.says = [(text + END, FinishReason.STOP) for text in [*says, "ok"]]
        episode = await run_episode(environment, {"prompt": CHAT}, client)
        assert not isinstance(episode.outcome, InfraAbort), episode.outcome
        found.append(replies(client.messages(episode.rollouts[-1])))
    first, second = found
    assert (
        first[0] == "42"
        and first[1].startswith("Error: RuntimeError: Error executing tool fail")
        and first[2].startswith("Error: ")
    )
    assert second == ["4", "2"], "a server that died is started again"


async def test_an_mcp_server_that_never_answers_costs_its_episode(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text("import time\ntime.sleep(600)\n")
    environment = ToolEnvironment([f"mcp:{sys.executable} {tmp_path / 'server.py'}"], tool_timeout=1.0)
    clients = [client_of(tokenizer_of("qwen2_5"))[0] for _ in range(2)]
    async with asyncio.timeout(30):
        episodes = await asyncio.gather(*(run_episode(environment, {"prompt": CHAT}, client) for client in clients))
    for episode in episodes:
        assert isinstance(episode.outcome, InfraAbort)
        assert "did not start and list its tools within 1 s; environment.options.tool_timeout" in episode.outcome.reason


COUNTING = """
import os, sys
from mcp.server import MCPServer

server = MCPServer("demo")
list_tools = server.list_tools

async def counted(*arguments, **more):
    with open(sys.argv[1], "a") as file:
        file.write("listed ")
    return await list_tools(*arguments, **more)

server.list_tools = counted

@server.tool()
def variables() -> str:
    "Which there are."
    return " ".join(sorted(os.environ))

if len(sys.argv) > 2:
    server.run("streamable-http", port=int(sys.argv[2]))
else:
    server.run()
"""


async def ask(environment: ToolEnvironment) -> str:
    client, engine = client_of(tokenizer_of("qwen2_5"))
    engine.says = [(call("variables") + END, FinishReason.STOP), (f"ok{END}", FinishReason.STOP)]
    episode = await run_episode(environment, {"prompt": CHAT}, client)
    assert not isinstance(episode.outcome, InfraAbort), episode.outcome
    return replies(client.messages(episode.rollouts[-1]))[0]


async def test_an_mcp_server_gets_no_token_and_is_asked_for_its_tools_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(COUNTING)
    monkeypatch.setenv("HEADRACE_PUSH_TOKENS", "secret")
    monkeypatch.setenv("MY_OWN", "x")
    environment = ToolEnvironment([f"mcp:{sys.executable} {tmp_path / 'server.py'} {tmp_path / 'listed'}"])
    for _ in range(3):
        found = (await ask(environment)).split()
        assert "MY_OWN" in found and not any(name.startswith("HEADRACE_") for name in found)
    assert (tmp_path / "listed").read_text() == "listed "


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Of a server that listens."""
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(COUNTING)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(tmp_path / "server.py"), str(tmp_path / "listed"), str(port)])
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.kill()
        server.wait()


async def test_tools_of_an_mcp_server_by_its_url(url: str, tmp_path: Path) -> None:
    environment = ToolEnvironment([f"mcp:{url}"])
    for _ in range(2):
        assert "PATH" in await ask(environment)
    assert (tmp_path / "listed").read_text() == "listed "
