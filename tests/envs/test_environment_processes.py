"""Environments in processes of their own: whatever one does there costs its episode, which says so."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from agent_bench import END, Answering, check_exact, client_of
from templates import tokenizer_of
from test_turns import Scripted

from headrace.envs import EngineClient, ProcessEnvironment, PromptEncoder, processes, run_episode
from headrace.model.tiny import build_tokenizer
from headrace.records import Episode, FinishReason, InfraAbort, Invalid, Sampling, Scored, Source
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

CODE = """
import asyncio, os, signal, time
from headrace import Episode

class Moody:
    can_resume = True

    async def run(self, task, client):
        how = task["how"]
        rollout = await client.generate(client.prompt(task["prompt"]))
        if how == "raises":
            raise KeyError("lost")
        if how == "exits":
            raise SystemExit(3)
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "blocks":
            time.sleep(600)
        if how == "waits":
            await asyncio.sleep(600)
        if how == "floods":
            task = {**task, "much": "x" * 4_000_000}
        if how == "nothing":
            return None
        if how == "another":
            return Episode(id="x", group="x", task=task)
        if how == "forges":
            rollout = rollout.replace(logprobs=rollout.logprobs / 2)
        rollout = await client.generate(client.append(rollout, "+"))
        return Episode(id=client.episode, group=client.group, task={**task, "pid": os.getpid()}, rollouts=(rollout,))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "moody.py").write_text(CODE)
    build_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def environment(folder: Path, *, num: int = 1, concurrency: int = 0, name: str = "moody.py:Moody") -> ProcessEnvironment:
    build = {"model_path": str(folder / "model"), "model": {"path": str(folder / "model")}, "environment": {"name": name}}
    log = folder / "environment.log"
    return ProcessEnvironment(name, build, num=num, concurrency=concurrency, can_resume=True, log=log)


def client(number: int = 0) -> tuple[EngineClient, Scripted]:
    engine = Scripted(build_tokenizer(), context=30)
    engine.says = [("12", FinishReason.STOP), ("3", FinishReason.STOP)]
    names: dict[str, Any] = {"episode": f"g{number}/0", "group": f"g{number}", "index": 0}
    return EngineClient(engine=engine, encoder=PromptEncoder(engine.tokenizer), **names, sampling=Sampling(), seed=1), engine


@pytest.mark.long
def test_an_episode_costs_only_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_MAX_BYTES", 1 << 20)
    hosted = environment(folder, num=2)

    async def play(how: str, number: int = 0, prompt: str = "5", seconds: float = 60.0) -> Episode:
        return await run_episode(hosted, {"prompt": prompt, "how": how}, client(number)[0], timeout=seconds)

    async def main() -> None:
        serving = asyncio.ensure_future(hosted.serve())
        good = await play("plays")
        assert good.outcome is None and good.environment == "moody.py:Moody" and good.task["pid"] != os.getpid()
        (rollout,) = good.rollouts
        assert rollout.source.tolist() == [0, 1, 1, 2, 1] and (rollout.logprobs[rollout.is_sampled] == -1).all()
        assert rollout.source[3] == Source.TOOL
        for how, reason in {
            "raises": "KeyError: 'lost'",
            "exits": "SystemExit: 3",
            "nothing": "environment 'moody.py:Moody' returned a NoneType, not an Episode",
            "another": "environment 'moody.py:Moody' returned episode 'x' of group 'x', but ran 'g0/0' of 'g0'",
            "forges": "other sampled tokens than the engine's",
        }.items():
            failed = await play(how)
            assert isinstance(failed.outcome, InfraAbort) and reason in failed.outcome.reason, failed.outcome
        assert (await play("plays")).task["pid"] == good.task["pid"] and hosted.num_ended == 0
        too_long = await play("plays", prompt="7" * 50)
        assert isinstance(too_long.outcome, Invalid)
        late = await play("waits", seconds=0.3)
        assert "longer than episode.timeout" in late.outcome.reason and hosted.num_ended == 0
        flooded = await play("floods")
        assert isinstance(flooded.outcome, InfraAbort) and (await play("plays")).outcome is None, flooded.outcome
        died, well = await asyncio.gather(play("dies"), play("plays", number=1))
        assert "lost its process, which was killed by SIGKILL" in died.outcome.reason, died.outcome
        assert well.outcome is None, "the other process goes on"
        serving.cancel()
        await asyncio.wait({serving})

    asyncio.run(main())


@pytest.mark.long
@pytest.mark.parametrize("limit", [{"timeout": 1.0}, {"deadline": 4.0}])
def test_a_process_that_hangs_is_replaced(folder: Path, limit: dict[str, float]) -> None:
    hosted = environment(folder, concurrency=1)

    async def main() -> None:
        serving = asyncio.ensure_future(hosted.serve())
        first, _ = client(0)
        played = await run_episode(hosted, {"prompt": "5", "how": "plays"}, first, timeout=60.0, deadline=4.0)
        assert played.outcome is None, "its process takes longer to start than an episode may idle, which does not count"
        started = time.monotonic()
        blocked, after = client(1)[0], client(2)[0]
        episodes = await asyncio.gather(
            run_episode(hosted, {"prompt": "5", "how": "blocks"}, blocked, **limit),
            run_episode(hosted, {"prompt": "5", "how": "plays"}, after, timeout=30.0),
        )
        assert isinstance(episodes[0].outcome, InfraAbort) and episodes[1].outcome is None
        assert time.monotonic() - started < 40 and hosted.num_ended == 1
        serving.cancel()
        await asyncio.wait({serving})

    asyncio.run(main())


async def test_a_flooded_log_keeps_only_what_was_printed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_MAX_LOG", 1000)
    monkeypatch.setattr(processes, "_LOG_SECONDS", 0.01)
    hosted, log = environment(tmp_path), tmp_path / "environment.log"
    serving = asyncio.ensure_future(hosted.serve())
    with log.open("a") as file:  # as a process has it
        for number in range(3):
            file.write(f"{number}" * 2000)
            file.flush()
            while log.stat().st_size:  # noqa: ASYNC110  (a thread empties it)
                await asyncio.sleep(0.01)
        file.write("last")
    await asyncio.sleep(0.05)
    assert log.read_text() == "last" and (tmp_path / "environment.log.1").read_text() == "2" * 2000
    serving.cancel()
    await asyncio.wait({serving})


STREAMING = """
import pathlib
import headrace, openai

@headrace.agent
async def solve(session):
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        text, seen = "", pathlib.Path(session.row["prompt"])
        if seen.name == "chat":
            stream = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}], stream=True)
        else:
            stream = await client.responses.create(model="m", input="go", stream=True)
        async for event in stream:
            if seen.name == "chat":
                text += event.choices[0].delta.content or ""
            elif event.type == "response.output_text.delta":
                text += event.delta
            if text:
                seen.touch()
    return float(text == "one two three four")
"""


def wait_for(file: Path) -> None:
    ends = time.monotonic() + 120
    while not file.exists() and time.monotonic() < ends:
        time.sleep(0.01)


@pytest.mark.long
def test_an_agent_there_hears_tokens_before_its_answer_is_complete(folder: Path) -> None:
    """The engine samples its last tokens only when the agent has read its first text."""
    (folder / "streaming.py").write_text(STREAMING)
    tokenizer_of("qwen2_5").save_pretrained(folder / "model")
    hosted, engine = environment(folder, name="streaming.py:solve"), Answering(lambda text: f"one two three four{END}")

    async def main() -> None:
        serving = asyncio.ensure_future(hosted.serve())
        for interface in ("chat", "responses"):
            seen = folder / interface

            async def between(done: int, of: int, seen: Path = seen) -> None:
                if done == of - 4:
                    await asyncio.to_thread(wait_for, seen)

            engine.between = between
            episode = await run_episode(hosted, {"prompt": str(seen)}, client_of(engine, f"{interface}/0"), timeout=100.0)
            assert episode.outcome == Scored(1.0), episode.outcome
            check_exact(episode, engine)
        serving.cancel()
        await asyncio.wait({serving})

    asyncio.run(main())


@pytest.mark.long
def test_one_that_cannot_be_made_ends_the_run(folder: Path) -> None:
    hosted = environment(folder, name="moody.py:Missing")

    async def main() -> None:
        serving = asyncio.ensure_future(hosted.serve())
        try:
            with pytest.raises(ConfigError, match=r"environment.name = 'moody.py:Missing': moody.py has no 'Missing'"):
                await run_episode(hosted, {"prompt": "5", "how": "plays"}, client()[0])
        finally:
            serving.cancel()
            await asyncio.wait({serving})

    asyncio.run(main())
