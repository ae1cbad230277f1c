"""A taskset, its tools and an agent program, as a package for verifiers would bring them."""

from __future__ import annotations

import json

import verifiers.v1 as vf
from mcp import Client
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Chat", "GuessTaskset"]


class GuessData(vf.TaskData):
    secret: int
    has_tools: bool = False


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class GuessTaskConfig(vf.TaskConfig):
    has_tools: bool = False


class GuessTask(vf.Task[GuessData, vf.State, GuessTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())] if config.has_tools else []

    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(str(self.data.secret) in (trace.last_reply or ""))

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return 1.0


class GuessConfig(vf.TasksetConfig):
    task: GuessTaskConfig = GuessTaskConfig()


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        for secret in (12, 7):
            yield GuessTask(GuessData(prompt=f"Say {secret}.", system_prompt="Be brief.", secret=secret), self.config.task)


class ChatConfig(vf.HarnessConfig):
    pass


class Chat(vf.Harness[ChatConfig]):
    """Calls the model, and tools as long as it asks for some."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [message_to_wire(m) for m in prompt]
        tools, servers = [], {}
        for url in mcp_urls.values():
            async with Client(url) as server:
                for tool in (await server.list_tools()).tools:
                    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
                    tools.append({"type": "function", "function": function})
                    servers[tool.name] = url
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            while True:
                given = {"tools": tools} if tools else {}
                made = await client.chat.completions.create(model=ctx.model, messages=messages, **given)
                answer = made.choices[0].message
                messages.append(answer.model_dump(exclude_none=True))
                for call in answer.tool_calls or ():
                    async with Client(servers[call.function.name]) as server:
                        result = await server.call_tool(call.function.name, json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result.content[0].text})
                if not answer.tool_calls:
                    return ProgramResult(exit_code=0, stdout="", stderr="")


if __name__ == "__main__":
    Adder.run()
