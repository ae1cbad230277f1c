"""openai-agents from PyPI, unmodified, through both of OpenAI's interfaces."""

from __future__ import annotations

from typing import Any

import agents
import openai
import pytest
from agent_bench import END, Answering, check_exact, client_of, run, text_of

import headrace
from headrace.envs import run_episode
from headrace.records import FinishReason, Scored

agents.set_tracing_disabled(True)


@agents.function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def model_of(session, interface: str) -> Any:
    client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    kind = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[interface]
    return kind(model="policy", openai_client=client)


def calculator(text: str) -> str:
    said = text.rpartition("<|im_start|>assistant")[0]
    if "<tool_response>" not in said:
        return "\n".join([call("add", '{"a": 2, "b": 3}'), call("add", '{"a": 4, "b": 4}') + END])
    replies = [part.split()[0] for part in said.split("<tool_response>\n")[1:]]
    return f"They are {' and '.join(replies)}.{END}"


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("interface", ["chat", "responses"])
def test_an_agent_with_a_tool_is_one_rollout(interface: str, streams: bool) -> None:
    engine = Answering(calculator)

    @headrace.agent
    async def solve(session) -> dict[str, float]:
        agent = agents.Agent(name="Adder", instructions="Add.", tools=[add], model=model_of(session, interface))
        if streams:
            result: Any = agents.Runner.run_streamed(agent, "2 + 3 and 4 + 4")
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, "2 + 3 and 4 + 4")
        return {"right": float(result.final_output == "They are 5 and 8.")}

    episode = run(solve, engine)
    assert episode.outcome == Scored(1.0)
    (rollout,) = episode.rollouts
    assert len(rollout.calls) == 2 and "Adds two numbers." in text_of(rollout, engine)
    check_exact(episode, engine)


@pytest.mark.parametrize("interface", ["chat", "responses"])
def test_agents_as_tools_and_handoffs_are_rollouts_of_their_own(interface: str) -> None:
    def answer(text: str) -> str:
        if "You translate" in text:
            return f"Hallo{END}"
        if "You say goodbye" in text:
            return f"Goodbye.{END}"
        if "<tool_response>" not in text:
            return call("translate", '{"input": "Hello"}') + END
        return call("transfer_to_closer", "{}") + END

    engine = Answering(answer)

    @headrace.agent
    async def solve(session) -> float:
        model = model_of(session, interface)
        translator = agents.Agent(name="Translator", instructions="You translate.", model=model)
        closer = agents.Agent(name="Closer", instructions="You say goodbye.", model=model)
        tool = translator.as_tool("translate", "Translates.")
        lead = agents.Agent(name="Lead", instructions="You lead.", tools=[tool], handoffs=[closer], model=model)
        result = await agents.Runner.run(lead, "Greet in German, then close.")
        return float(result.final_output == "Goodbye.")

    episode = run(solve, engine)
    assert episode.outcome == Scored(1.0)
    check_exact(episode, engine)
    calls = {text_of(rollout, engine).partition("You ")[2][:4]: len(rollout.calls) for rollout in episode.rollouts}
    assert len(episode.rollouts) == 3 and calls == {"tran": 1, "lead": 2, "say ": 1}


def test_a_truncated_response_which_the_framework_raises_for_is_scored() -> None:
    engine = Answering(lambda text: "and so on")

    @headrace.agent
    async def solve(session) -> None:
        await agents.Runner.run(agents.Agent(name="A", model=model_of(session, "responses")), "Tell me.")

    episode = run(solve, engine)
    assert episode.outcome is None and episode.rollouts[0].finish_reason is FinishReason.LENGTH


async def test_earlier_responses_are_named_by_their_ids() -> None:
    engine = Answering(lambda text: f"{text.count('assistant')}{END}")

    @headrace.agent
    async def solve(session) -> None:
        agent = agents.Agent(name="A", instructions="Count.", model=model_of(session, "responses"))
        result: Any = None
        for number in range(3):
            earlier = result and result.last_response_id
            result = await agents.Runner.run(agent, f"question {number}", previous_response_id=earlier)
        assert result.final_output == "3"

    episode = await run_episode(solve, {"prompt": "x"}, client_of(engine))
    assert episode.outcome is None and [len(rollout.calls) for rollout in episode.rollouts] == [3]
    check_exact(episode, engine)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"conversation": "c"}, "conversation"),
        ({"input": 3}, "input"),
    ],
)
def test_what_the_responses_interface_cannot_do_is_refused_by_name(asked: dict[str, Any], name: str) -> None:
    engine = Answering(lambda text: f"ok{END}")

    @headrace.agent
    async def asking(session) -> None:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            await client.responses.create(model="m", input="go")
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(**{"model": "m", "input": "go", **asked})
        assert caught.value.param == name

    assert run(asking, engine).outcome is None
