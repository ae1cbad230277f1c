"""OpenAI's responses interface, the part that agents use: items instead of messages, and earlier responses by their ids."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.engine import Body, Chat, bad, check, unsupported
from headrace.envs.agent_rollouts import AgentCall, check_last

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace.envs.agent_rollouts import Reply

    Objects = list[dict[str, Any]]

_ANY: tuple[Any, ...] = (...,)
_UNUSED = (  # about the caller's account, caches, or what an answer repeats
    "include metadata prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier service_tier store "
    "stream_options user"
)
_NEVER = "context_management conversation max_tool_calls moderation prompt"
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_UNUSED.split(), _ANY),
    **dict.fromkeys(_NEVER.split(), ()),
    "background": (False,),
    "reasoning": ({},),
    "text": ({}, {"format": {"type": "text"}}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Parameters that are not used, and the values of each that request nothing; ... stands for any."""
_MOST = 2**31


@dataclass(frozen=True)
class Asked:
    """One request."""

    call: AgentCall
    messages: Objects
    """The conversation, without the instructions, which later requests give anew."""
    echoed: dict[str, Any]
    """Fields of the request that the answer repeats."""


class Responses:
    """The requests and answers of one episode."""

    def __init__(self) -> None:
        self._conversations: dict[str, Objects] = {}

    def read(self, body: Body, *, neutral: Mapping[str, tuple[Any, ...]]) -> Asked:
        given, earlier = body.take("input"), body.take("previous_response_id", str)
        if earlier is not None and earlier not in self._conversations:
            raise bad("previous_response_id", "is no response of this episode", code="previous_response_not_found")
        messages = [*self._conversations.get(earlier, ()), *_messages(given)]
        instructions = body.take("instructions", str)
        system = [] if instructions is None else [{"role": "system", "content": instructions}]
        names = ("tool_choice", "parallel_tool_calls", "chat_template_kwargs")
        tools = body.take("tools", list, [], "a list of tools")
        asked = {"messages": [*system, *messages], "tools": [_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)]}
        settings = {name: body.take(name) for name in names}
        chat = Chat.read(Body({**asked, **settings}), is_strict_refused=False)
        check_last(chat.messages)
        max_tokens = body.number("max_output_tokens", _MOST, low=1, high=_MOST)
        model, stream = body.take("model", str, "policy"), body.take("stream", bool, False)
        body.end({**_NEUTRAL, **neutral})
        echoed = {
            "instructions": instructions,
            "model": model,
            "parallel_tool_calls": settings["parallel_tool_calls"] is not False,
            "previous_response_id": earlier,
            "tool_choice": settings["tool_choice"] or "auto",
            "tools": tools,
        }
        return Asked(AgentCall(chat, model, max_tokens, stream=stream), messages, echoed)

    def answer(self, asked: Asked, reply: Reply) -> dict[str, Any]:
        """OpenAI's object."""
        id, status = f"resp_{uuid.uuid4().hex}", "incomplete" if reply.is_truncated else "completed"
        self._conversations[id] = [*asked.messages, {**reply.message, "tool_calls": reply.calls}]
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        counts = {"input_tokens": reply.num_prompt, "output_tokens": reply.num_sampled}
        return {
            "id": id,
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if reply.is_truncated else None,
            "output": _items(reply, status=status),
            "usage": {**counts, **details, "total_tokens": reply.num_prompt + reply.num_sampled},
            "metadata": {},
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            **asked.echoed,
        }

    def events(self, answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The same as a stream."""
        for number, event in enumerate(_events(answer)):
            yield {**event, "sequence_number": number}


def _messages(given: Any) -> Objects:  # noqa: ANN401
    """A chat's messages. A call belongs to the assistant's message before it."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: Objects = []
    for index, item in enumerate(check(given, list, "input", "text or a list of items")):
        name = f"input[{index}]"
        kind = check(item, dict, name).get("type", "message")
        if kind == "message":
            role = {"developer": "system"}.get(item.get("role"), item.get("role"))
            messages.append({"role": role, "content": _text(item.get("content"), f"{name}.content")})
        elif kind == "function_call":
            call = {"id": item.get("call_id"), "type": "function"}
            call["function"] = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _text(item.get("output"), f"{name}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind != "reasoning":  # which the rollout has, as it was sampled
            raise unsupported(f"{name}.type", "must be message, function_call, function_call_output or reasoning")
    return messages


def _text(content: Any, name: str) -> Any:  # noqa: ANN401
    """Parts as a chat has them; text as it is."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("input_text", "output_text", "text"):
            raise unsupported(name, "only text parts are supported")
    return [{"type": "text", "text": part.get("text")} for part in content]


def _tool(tool: Any, name: str) -> dict[str, Any]:  # noqa: ANN401
    if check(tool, dict, name).get("type") != "function":
        raise unsupported(f"{name}.type", "must be function: this server has no tools of its own")
    known = ("name", "description", "parameters", "strict")
    if unknown := tool.keys() - {"type", *known}:
        raise unsupported(f"{name}.{min(unknown)}")
    return {"type": "function", "function": {key: tool[key] for key in known if key in tool}}


def _items(reply: Reply, *, status: str) -> Objects:
    items: Objects = []
    if thinking := reply.message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thinking}]
        items.append({"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": content})
    if reply.message["content"] or not reply.calls:
        content = [{"type": "output_text", "text": reply.message["content"], "annotations": []}]
        names = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
        items.append({**names, "status": status, "content": content})
    for call in reply.calls:
        names = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"], "status": status}
        items.append({**names, **call["function"]})
    return items


def _events(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(answer["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty = {key: value for key, value in item.items() if key not in ("content", "arguments")}
        blank: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield {"type": "response.output_item.added", "output_index": index, "item": {**empty, **blank}}
        if item["type"] == "message":
            part, at = item["content"][0], {**place, "content_index": 0}
            yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
            yield {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []}
            yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **at, "part": part}
        elif item["type"] == "function_call":
            arguments = item["arguments"]
            yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
            yield {"type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": arguments}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{answer['status']}", "response": answer}
