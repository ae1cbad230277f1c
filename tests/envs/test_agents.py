"""Agents behind a base URL, driven by the real openai client: what they call becomes rollouts, token for token."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

import openai
import pytest
from agent_bench import END, Answering, check_exact, client_of, run, text_of

import headrace
from headrace.envs import agent_rollouts, can_resume, run_episode
from headrace.observe.inspect import render
from headrace.records import FinishReason, InfraAbort, Invalid, Scored
from headrace.settings import ConfigError
from headrace.user_code import then_end_tasks

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        "strict": True,
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b":   3}}\n</tool_call>'


def opened(session) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def ask(session, *messages, **more) -> Any:
    async with opened(session) as client:
        answer = await client.chat.completions.create(model="any-name", messages=list(messages), **more)
        return answer.choices[0].message


def calculator(text: str) -> str:
    """Calls the tool once, then answers with what it said."""
    if "<tool_response>" in text:
        return f"It is  {text.rpartition('<tool_response>')[2].split()[0]}.{END}"
    return f"Let me see.\n{CALL}{END}"


@headrace.agent
async def with_tool(session) -> float:
    """The loop that everyone writes: call, answer the calls, until there are none."""
    async with opened(session) as client:
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, user(session.row["prompt"])]
        for _ in range(5):
            answer = await client.chat.completions.create(model="m", messages=messages, tools=[ADD], temperature=0.3)
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                assert answer.choices[0].finish_reason == "stop"
                return float(message.content.split()[-1].rstrip(".") == "5")
            assert answer.choices[0].finish_reason == "tool_calls"
            for call in message.tool_calls:
                numbers = json.loads(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])})
    return 0.0


def test_an_unmodified_loop_with_a_tool_is_one_rollout() -> None:
    engine = Answering(calculator)
    episode = run(with_tool, engine)
    assert episode.outcome == Scored(1.0) and episode.rollouts[0].rewards == {"reward": 1.0}
    (rollout,) = episode.rollouts
    assert rollout.parent is None and len(rollout.calls) == 2 and episode.environment == "with_tool"
    check_exact(episode, engine)
    text = text_of(rollout, engine)
    assert CALL + END + "\n<|im_start|>user\n<tool_response>\n5\n</tool_response>" in text, "as the policy wrote it"
    assert '"name": "add"' in text.partition("<|im_start|>user")[0], "the template shows the tool"


def test_a_sub_agent_with_another_system_prompt_is_a_rollout_of_its_own() -> None:
    engine = Answering(lambda text: ("sub" if "You help" in text else "main") + END)

    @headrace.agent
    async def delegating(session) -> None:
        first = [{"role": "system", "content": "You lead."}, user("go")]
        said = await ask(session, *first)
        helped = await ask(session, {"role": "system", "content": "You help."}, user(said.content))
        await ask(session, *first, said, user(helped.content))

    episode = run(delegating, engine)
    check_exact(episode, engine)
    assert [len(rollout.calls) for rollout in episode.rollouts] == [1, 2], "the conversation that answered last comes last"
    assert [rollout.parent for rollout in episode.rollouts] == [None, None] and episode.outcome is None
    assert sorted(rollout.id for rollout in episode.rollouts) == ["g0/0", "g0/0.1"]


def test_parallel_calls_that_continue_one_answer_fork_it() -> None:
    engine = Answering(lambda text: f"{len(text)}{END}")

    @headrace.agent
    async def branching(session) -> None:
        said = await ask(session, user("go"))
        history = [user("go"), said]
        await asyncio.gather(*(ask(session, *history, user(f"way {number}")) for number in range(3)))

    episode = run(branching, engine)
    check_exact(episode, engine)
    parents = [rollout.parent for rollout in episode.rollouts]
    first = next(rollout for rollout in episode.rollouts if rollout.parent is None)
    fork = next(rollout for rollout in episode.rollouts if rollout.parent is not None)
    assert f"forked from g0/0 at token {first.calls[0].stop}" in render(fork, str), "headrace inspect shows it"
    assert parents.count(None) == 1 and all(parent in (None, (first.id, first.calls[0].stop)) for parent in parents)
    ways = sorted(text_of(rollout, engine).partition("way ")[2][:1] for rollout in episode.rollouts)
    assert ways == ["0", "1", "2"]


def test_the_same_prompt_twice_is_two_rollouts() -> None:
    engine = Answering(lambda text: f"yes{END}")

    @headrace.agent
    async def voting(session) -> None:
        await asyncio.gather(ask(session, user("go")), ask(session, user("go")))

    episode = run(voting, engine)
    check_exact(episode, engine)
    assert [rollout.parent for rollout in episode.rollouts] == [None, None]


@pytest.mark.parametrize("is_edited", [False, True])
def test_a_call_compares_its_messages_with_those_of_one_earlier_answer(
    is_edited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with those of each, which would take longer with every turn squared."""
    engine = Answering(lambda text: f"<think>\nhm\n</think>\n\nyes{END}", template="qwen3", context=4096)
    compared, is_same = [], agent_rollouts._is_same
    monkeypatch.setattr(agent_rollouts, "_is_same", lambda *both: compared.append(both) or is_same(*both))
    turns, counts = 40, []

    @headrace.agent
    async def talking(session) -> None:
        history: list[Any] = [user("go")]
        for turn in range(turns):
            said = (await ask(session, *history)).model_dump()
            counts.append(len(compared))
            compared.clear()
            history += [{**said, "reasoning_content": f"no {turn}"} if is_edited else said, user(f"and {turn}")]

    run(talking, engine)
    assert len(counts) == turns and sum(counts) > 0
    assert all(count <= 2 * turn for turn, count in enumerate(counts))


def test_numbers_that_another_language_writes_without_a_point_are_the_same() -> None:
    engine = Answering(lambda text: CALL.replace("2", "2.0") + END)

    @headrace.agent
    async def in_javascript(session) -> None:
        said = (await ask(session, user("go"), tools=[ADD])).model_dump()
        (call,) = said["tool_calls"]
        assert call["function"]["arguments"] == '{"a": 2.0, "b": 3}'
        call["function"]["arguments"] = '{"b":3,"a":2}'
        await ask(session, user("go"), said, {"role": "tool", "tool_call_id": call["id"], "content": "5"}, tools=[ADD])

    (rollout,) = run(in_javascript, engine).rollouts
    assert len(rollout.calls) == 2


@pytest.mark.parametrize("edits", ["reply", "answer", "first"])
def test_a_history_that_the_agent_rewrote_is_a_fork(edits: str) -> None:
    engine = Answering(lambda text: f"answer {text.count('assistant')} of some length{END}")

    @headrace.agent
    async def forgetful(session) -> None:
        messages = [user("go"), await ask(session, user("go")), user("and?")]
        messages += [await ask(session, *messages), user("more?")]
        changed: Any = {
            "reply": [*messages[:2], user("or?")],
            "answer": [messages[0], {"role": "assistant", "content": "answer 1 cut"}, *messages[2:]],
            "first": [user("stop"), *messages[1:]],
        }[edits]
        await ask(session, *changed)

    episode = run(forgetful, engine)
    check_exact(episode, engine)
    old, new = episode.rollouts
    assert len(old.calls) == 2 and old.parent is None
    if edits == "reply":  # all that was sampled and kept is there as it was sampled
        assert new.parent == (old.id, old.calls[0].stop) and "or?" in text_of(new, engine)
    elif edits == "answer":  # the tokens that both have
        assert new.parent[0] == old.id and old.calls[0].start < new.parent[1] < old.calls[0].stop
    else:
        assert new.parent is None


def test_thinking_stays_in_the_rollout_though_agents_leave_it_out() -> None:
    engine = Answering(lambda text: f"<think>\nhm\n</think>\n\n{CALL}{END}", template="qwen3")

    @headrace.agent
    async def thoughtless(session) -> None:
        said = await ask(session, user("go"), tools=[ADD])
        assert said.reasoning_content == "hm" and said.content is None
        kept = {"role": "assistant", "content": None, "tool_calls": [call.model_dump() for call in said.tool_calls]}
        reply = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "5"}
        await ask(session, user("go"), kept, reply, tools=[ADD])
        await ask(session, user("go"), kept, reply, kept, user("again"), tools=[ADD])

    episode = run(thoughtless, engine)
    check_exact(episode, engine)
    first, last = episode.rollouts
    assert len(first.calls) == 2 and text_of(first, engine).count("hm") == 2, "a tool's reply leaves the thinking"
    assert last.parent[0] == first.id, "another question makes the template drop it"


def test_streams_add_up_and_go_on() -> None:
    engine = Answering(calculator)

    @headrace.agent
    async def streaming(session) -> None:
        async with opened(session) as client:
            how: Any = {"model": "m", "tools": [ADD], "stream": True, "stream_options": {"include_usage": True}}
            chunks = [chunk async for chunk in await client.chat.completions.create(messages=[user("go")], **how)]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            calls = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
            assert text == "Let me see." and chunks[-2].choices[0].finish_reason == "tool_calls"
            assert chunks[-1].usage.completion_tokens == len(engine.sampled)
            said = {"role": "assistant", "content": text, "tool_calls": [call.model_dump(exclude={"index"}) for call in calls]}
            await ask(session, user("go"), said, {"role": "tool", "tool_call_id": calls[0].id, "content": "5"}, tools=[ADD])

    episode = run(streaming, engine)
    check_exact(episode, engine)
    assert len(episode.rollouts) == 1


def test_a_stream_tells_what_is_sampled_before_the_last_token_is() -> None:
    """And a tool call comes whole, at the end."""
    engine = Answering(lambda text: f"one two three <b> four\n{CALL}{END}")
    seen: list[tuple[int, int, str]] = []  # (tokens sampled, of how many, text)

    async def between(done: int, of: int) -> None:
        seen.append((done, of, ""))
        await asyncio.sleep(0.01 if done < 6 else 0)

    engine.between = between

    @headrace.agent
    async def streaming(session) -> float:
        async with opened(session) as client:
            text, calls = "", []
            how: Any = {"model": "m", "messages": [user("go")], "tools": [ADD], "stream": True}
            async for chunk in await client.chat.completions.create(**how):
                delta = chunk.choices[0].delta
                text += delta.content or ""
                calls += delta.tool_calls or []
                done, of, _ = seen[-1]
                assert not calls or done == of
                seen.append((done, of, text))
            assert text == "one two three <b> four" and len(calls) == 1
            return 1.0

    episode = run(streaming, engine)
    assert episode.outcome == Scored(1.0), episode.outcome
    check_exact(episode, engine)
    first = next((done, of) for done, of, text in seen if text)
    assert first[0] < first[1], "the first text came before the last token was sampled"


def test_a_response_streams_what_is_sampled_before_the_last_token_is() -> None:
    """The client's own helper, which puts the response together from its events: thinking, text, a tool call."""
    engine = Answering(lambda text: f"<think>\nhm, hm\n</think>\n\none two three <b> four\n{CALL}{END}", template="qwen3")
    sampled, told = [(0, 1)], dict[str, tuple[int, int]]()

    async def between(done: int, of: int) -> None:
        sampled.append((done, of))
        await asyncio.sleep(0.01)

    engine.between = between
    tool: Any = {"type": "function", "strict": False, **ADD["function"]}

    @headrace.agent
    async def streaming(session) -> float:
        async with opened(session) as client:
            texts = {"response.reasoning_text.delta": "", "response.output_text.delta": ""}
            async with client.responses.stream(model="m", input="go", tools=[tool]) as stream:
                async for event in stream:
                    told.setdefault(event.type, sampled[-1])
                    if event.type in texts:
                        texts[event.type] += event.delta
            response = await stream.get_final_response()
        thinking, message, call = response.output
        assert (thinking.content[0].text, response.output_text) == ("hm, hm", "one two three <b> four") == tuple(texts.values())
        assert message.id != thinking.id and call.name == "add" and response.status == "completed"
        return 1.0

    episode = run(streaming, engine)
    assert episode.outcome == Scored(1.0), episode.outcome
    check_exact(episode, engine)
    for name in ("created", "reasoning_text.delta", "reasoning_text.done", "output_text.delta"):
        done, of = told[f"response.{name}"]
        assert done < of, f"{name} came before the last token was sampled"
    assert told["response.function_call_arguments.delta"] == sampled[-1]


def test_a_stream_that_is_left_is_sampled_to_its_end() -> None:
    engine = Answering(lambda text: f"a long story that goes on and on{END}")

    async def slowly(done: int, of: int) -> None:
        await asyncio.sleep(0.02)

    engine.between = slowly

    @headrace.agent
    async def impatient(session) -> float:
        async with opened(session) as client:
            stream = await client.chat.completions.create(model="m", messages=[user("go")], stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
        return 1.0

    episode = run(impatient, engine)
    check_exact(episode, engine)
    assert episode.outcome == Scored(1.0) and "goes on and on" in text_of(episode.rollouts[0], engine)


@pytest.mark.parametrize("interface", ["chat", "responses"])
def test_a_stream_that_fails_midway_says_so(interface: str) -> None:
    engine = Answering(lambda text: f"a long story that goes on and on{END}")

    async def fails(done: int, of: int) -> None:
        await asyncio.sleep(0.01)
        if done == 5:
            raise RuntimeError("the engine is gone")

    engine.between = fails

    @headrace.agent
    async def agent(session) -> float:
        async with opened(session) as client:
            if interface == "chat":
                call = client.chat.completions.create(model="m", messages=[user("go")], stream=True)
            else:
                call = client.responses.create(model="m", input="go", stream=True)
            with pytest.raises(openai.APIError, match="the server failed: RuntimeError"):
                _ = [each async for each in await call]
        engine.between = lambda *_: asyncio.sleep(0)
        await ask(session, user("go"))
        return 1.0

    assert run(agent, engine).outcome == Scored(1.0)


def test_a_stream_that_is_closed_early_keeps_what_was_sampled() -> None:
    engine = Answering(lambda text: f"a long story{END}")

    @headrace.agent
    async def impatient(session) -> None:
        async with opened(session) as client:
            stream = await client.chat.completions.create(model="m", messages=[user("go")], stream=True)
            async for _ in stream:
                break
            await stream.close()
        await ask(session, user("go"), {"role": "assistant", "content": "a long"}, user("yes?"))

    episode = run(impatient, engine)
    check_exact(episode, engine)
    assert len(episode.rollouts) == 2


def test_a_call_that_is_given_up_is_cancelled_at_the_engine_and_can_be_repeated() -> None:
    engine = Answering(lambda text: f"ok{END}")

    @headrace.agent
    async def hasty(session) -> None:
        history = [user("go"), await ask(session, user("go")), user("more")]
        engine.may_answer.clear()
        for stream in (False, True):
            with pytest.raises(openai.APITimeoutError):
                await ask(session, *history, timeout=0.2, stream=stream)
        while engine.num_cancelled < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        engine.may_answer.set()
        await ask(session, *history)

    episode = run(hasty, engine)
    check_exact(episode, engine)
    assert len(episode.rollouts) == 1 and len(episode.rollouts[0].calls) == 2


async def test_one_episodes_key_opens_no_other() -> None:
    engine = Answering(lambda text: f"ok{END}")
    sessions: dict[str, Any] = {}
    both_there = asyncio.Event()

    @headrace.agent
    async def nosy(session) -> None:
        own = session.row["prompt"]
        async with opened(session) as client:
            said = await client.responses.create(model="m", input="go")
            session.response, sessions[own] = said.id, session
            if len(sessions) == 2:
                both_there.set()
            await both_there.wait()
            other = next(each for name, each in sessions.items() if name != own)
            with pytest.raises(openai.BadRequestError, match="no response of this episode"):
                await client.responses.create(model="m", input="more", previous_response_id=other.response)
            await ask(session, user("go"), {"role": "assistant", "content": "ok"}, user("more"))
        for key in ("", "wrong", session.api_key[:-1], f"{session.api_key}x"):
            async with openai.AsyncOpenAI(base_url=session.base_url, api_key=key or "-", max_retries=0) as stranger:
                with pytest.raises(openai.AuthenticationError):
                    await stranger.chat.completions.create(model="m", messages=[user("go")])
                with pytest.raises(openai.AuthenticationError):
                    await stranger.models.list()

    rows = {"g0/0": {"prompt": "first"}, "g1/0": {"prompt": "second"}}
    running = [run_episode(nosy, row, client_of(engine, episode)) for episode, row in rows.items()]
    episodes = await asyncio.gather(*running)
    assert [episode.outcome for episode in episodes] == [None, None]
    for episode in episodes:
        check_exact(episode, engine)
        assert len(episode.rollouts) == 1 and len(episode.rollouts[0].calls) == 2, "responses and chats are one history"
    first, second = sessions.values()
    assert first.base_url == second.base_url and first.api_key != second.api_key
    for session in (first, second):  # keys end with their episodes
        with pytest.raises(openai.AuthenticationError):
            await ask(session, user("go"))


async def test_calls_in_flight_end_with_the_episode() -> None:
    engine = Answering(lambda text: f"ok{END}")
    left: list[asyncio.Task[Any]] = []

    @headrace.agent
    async def careless(session) -> None:
        await ask(session, user("go"))
        engine.may_answer.clear()
        left.append(asyncio.ensure_future(ask(session, user("late"))))
        while len(engine.samplings) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    episode = await run_episode(careless, {"prompt": "x"}, client_of(engine))
    assert len(episode.rollouts) == 1 and episode.outcome is None
    with pytest.raises(openai.AuthenticationError, match="has ended"):
        await left[0]
    assert engine.num_cancelled == 1


@pytest.mark.parametrize("way", ["number", "dict", "callback", "post", "none"])
def test_ways_to_give_a_reward(way: str) -> None:
    engine = Answering(lambda text: f"ok{END}")

    def post(session, rewards: dict[str, float]) -> None:
        headers = {"Authorization": f"Bearer {session.api_key}", "Content-Type": "application/json"}
        data = json.dumps(rewards).encode()
        urllib.request.urlopen(urllib.request.Request(f"{session.base_url}/reward", data, headers), timeout=10).read()

    @headrace.agent
    async def rewarded(session) -> Any:
        await asyncio.gather(ask(session, user("a")), ask(session, user("b")))
        if way == "callback":
            session.reward(0.25)
            session.reward({"reward": 1.0})
        if way == "post":
            await asyncio.to_thread(post, session, {"right": 1, "short": 0.5})
        return {"number": True, "dict": {"right": 1.0, "short": 0.5}}.get(way)

    episode = run(rewarded, engine)
    expected = {"number": {"reward": 1.0}, "callback": {"reward": 1.0}, "none": {}}.get(way, {"right": 1.0, "short": 0.5})
    assert [rollout.rewards for rollout in episode.rollouts] == [expected, expected]
    assert episode.outcome == (Scored(sum(expected.values())) if expected else None)


@pytest.mark.parametrize("reward", ["great", float("nan"), {"right": None}, [1.0]])
def test_a_reward_that_is_no_number_stops_the_run(reward: Any) -> None:
    async def odd(session) -> Any:
        await ask(session, user("go"))
        return reward

    with pytest.raises(ConfigError, match=r"agent '.*odd' returned a reward .*: must be a finite number"):
        run(headrace.agent(odd), Answering(lambda text: f"ok{END}"))


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_that_can_resume_gets_its_answers_again(stream: bool) -> None:
    """Run again after a restart in its third turn: it reads the first two answers as before, and only the third is sampled."""

    @headrace.agent(can_resume=True)
    async def talk(session) -> float:
        messages = [user("go")]
        async with opened(session) as client:
            for _ in range(3):
                made = await client.chat.completions.create(model="m", messages=messages, stream=stream)
                if stream:
                    text = "".join([chunk.choices[0].delta.content or "" async for chunk in made])
                else:
                    text = made.choices[0].message.content
                messages += [{"role": "assistant", "content": text}, user(f"not {text}")]
        return len(messages)

    engine = Answering(lambda text: f"{len(text)} it is{END}")
    whole = asyncio.run(run_episode(talk, {"prompt": "x"}, client_of(engine, keeps_turns=True)))
    (rollout,) = whole.rollouts
    before = rollout.forked(rollout.calls[1].stop, id="cut").replace(id=rollout.id, parent=None)
    again = Answering(engine.answer)
    again.random.seed(7)
    resuming = client_of(again, keeps_turns=can_resume(talk), partials={rollout.id: before})
    episode = asyncio.run(run_episode(talk, {"prompt": "x"}, resuming))
    assert len(again.records) == 1 and episode.outcome == whole.outcome == Scored(7.0)
    assert episode.rollouts[0].token_ids[: len(before)].tolist() == before.token_ids.tolist()
    assert len(episode.rollouts[0].calls) == 3 and not can_resume(with_tool)


def test_what_fails_is_named() -> None:
    engine = Answering(lambda text: f"ok{END}")

    @headrace.agent
    async def raising(session) -> None:
        await ask(session, user("go"))
        raise KeyError("mine")

    @headrace.agent
    async def silent(session) -> float:
        return 1.0

    @headrace.agent
    async def hanging(session) -> None:
        await ask(session, user("go"))
        await asyncio.Event().wait()

    assert run(raising, engine).outcome == InfraAbort("the environment raised KeyError: 'mine'")
    assert "the model has not answered it once" in run(silent, engine).outcome.reason
    assert "longer than episode.timeout = 0.5 s" in run(hanging, engine, timeout=0.5).outcome.reason
    with pytest.raises(ConfigError, match="must be a function of a session"):
        headrace.agent(3)


def test_an_agent_that_fails_over_a_truncated_answer_is_scored() -> None:
    @headrace.agent
    async def strict(session) -> None:
        said = await ask(session, user("go"))
        raise ValueError(f"{said.content} is not JSON")

    engine = Answering(lambda text: "cut off")
    episode = run(strict, engine)
    assert episode.outcome is None and episode.rollouts[0].finish_reason is FinishReason.LENGTH
    check_exact(episode, engine)


def test_a_conversation_that_fills_the_context_is_scored_and_a_prompt_that_does_is_invalid() -> None:
    @headrace.agent
    async def talkative(session) -> None:
        history = [user(session.row["prompt"])]
        for _ in range(20):
            history += [await ask(session, *history), user("more and more and more")]

    engine = Answering(lambda text: f"and more{END}", context=150)
    episode = run(talkative, engine)
    assert episode.outcome is None and episode.rollouts[0].finish_reason is FinishReason.LENGTH
    check_exact(episode, engine)
    assert isinstance(run(talkative, engine, row={"prompt": "long " * 100}).outcome, Invalid)


def test_a_fork_that_does_not_fit_the_context_leaves_no_rollout() -> None:
    @headrace.agent
    async def branching(session) -> None:
        said = await ask(session, user("go"))
        await ask(session, user("go"), said, user("short"))
        await ask(session, user("go"), said, user("long " * 100))

    engine = Answering(lambda text: f"and more{END}", context=150)
    episode = run(branching, engine)
    assert episode.outcome is None and len(episode.rollouts) == 1
    check_exact(episode, engine)


def test_limits_and_stop_strings_of_a_call_are_kept() -> None:
    engine = Answering(lambda text: "Thought: x\nObservation:" if "Observation" not in text else f"done{END}")

    @headrace.agent
    async def stopping(session) -> None:
        said = await ask(session, user("go"), stop=["Observation:"], max_completion_tokens=20, seed=3, top_p=0.5)
        assert said.content == "Thought: x\n"
        await ask(session, user("go"), said, user("5"), max_tokens=1000)

    episode = run(stopping, engine)
    check_exact(episode, engine)
    assert len(episode.rollouts) == 1
    first, second = engine.samplings
    assert (first.stop, first.max_tokens, first.top_p) == (("Observation:",), 20, 1.0)
    assert (second.stop, second.max_tokens) == ((), 64)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": [ADD]}, "tool_choice"),
        ({"extra_body": {"guess": 1}}, "guess"),
        ({"messages": [user("a"), {"role": "assistant", "content": "b"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(asked: dict[str, Any], name: str) -> None:
    engine = Answering(lambda text: f"ok{END}")

    @headrace.agent
    async def asking(session) -> None:
        await ask(session, user("go"))
        async with opened(session) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**{"model": "m", "messages": [user("go")], **asked})
        assert caught.value.param == name

    episode = run(asking, engine)
    assert episode.outcome is None and len(episode.rollouts) == 1


def test_a_model_without_a_template_stops_the_run() -> None:
    engine = Answering(lambda text: "ok", template="qwen2_5")
    template, engine.tokenizer.chat_template = engine.tokenizer.chat_template, None
    try:
        with pytest.raises(ConfigError, match="no chat template"):
            run(with_tool, engine)
    finally:
        engine.tokenizer.chat_template = template


def test_a_plain_function_runs_in_a_thread() -> None:
    engine = Answering(lambda text: f"ok{END}")

    @headrace.agent
    def plain(session) -> int:
        with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            said = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
        return len(said.choices[0].message.content or "")

    episode = run(plain, engine)
    assert episode.outcome == Scored(2.0)
    check_exact(episode, engine)


def test_a_second_event_loop_gets_an_endpoint_of_its_own() -> None:
    engine = Answering(lambda text: f"ok{END}")
    urls = []

    @headrace.agent
    async def noting(session) -> None:
        urls.append(session.base_url)
        await ask(session, user("go"))

    async def twice() -> None:
        for episode in ("g0/0", "g1/0"):
            await run_episode(noting, {"prompt": "x"}, client_of(engine, episode))

    for _ in range(2):
        asyncio.run(then_end_tasks(twice()))
    assert urls[0] == urls[1] and urls[2] == urls[3]
    with pytest.raises(OSError):
        urllib.request.urlopen(urls[0], timeout=5)
