"""OpenAI's responses interface, the part that agents use: items instead of messages, and earlier responses by their ids."""

from __future__ import annotations

import itertools
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.engine import Body, Chat, bad, check, unsupported
from headrace.envs.agent_rollouts import AgentCall, Reply, check_last

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from headrace.engine import ApiError

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

    def answer(self, asked: Asked, reply: Reply, *, name: str = "") -> dict[str, Any]:
        """OpenAI's object. `name`: what its ids are made of."""
        name, status = name or uuid.uuid4().hex, "incomplete" if reply.is_truncated else "completed"
        self._conversations[f"resp_{name}"] = [*asked.messages, {**reply.message, "tool_calls": reply.calls}]
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        counts = {"input_tokens": reply.num_prompt, "output_tokens": reply.num_sampled}
        return {
            **begun(asked, name),
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if reply.is_truncated else None,
            "output": _items(reply, name, status=status),
            "usage": {**counts, **details, "total_tokens": reply.num_prompt + reply.num_sampled},
        }


def begun(asked: Asked, name: str) -> dict[str, Any]:
    """The object before anything is generated."""
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "metadata": {},
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        **asked.echoed,
    }


class ResponseEvents:
    """The stream of one answer: text as it is generated, then the tool calls."""

    last = b""

    def __init__(self, responses: Responses, asked: Asked) -> None:
        self._responses, self._asked, self._name = responses, asked, uuid.uuid4().hex
        self._numbers = itertools.count()
        self._item: dict[str, Any] | None = None  # of the output, not yet complete
        self._text, self._num_items = "", 0
        self._has_begun = False

    def of(self, piece: dict[str, str] | Reply) -> Iterator[dict[str, Any]]:
        if not self._has_begun:
            for kind in ("created", "in_progress"):
                yield self._event(kind, response=begun(self._asked, self._name))
        self._has_begun = True
        if not isinstance(piece, Reply):
            for name, text in piece.items():
                yield from self._more(text, _message if name == "content" else _reasoning)
            return
        answer = self._responses.answer(self._asked, piece, name=self._name)
        for item in answer["output"][self._num_items :]:
            if self._item is None:
                yield from self._open(item)
                if item["type"] == "function_call":
                    arguments = item["arguments"]
                    yield self._event("function_call_arguments.delta", **self._place(), delta=arguments)
                    given = {"name": item["name"], "arguments": arguments}
                    yield self._event("function_call_arguments.done", **self._place(), **given)
            yield from self._close(item)
        yield self._event(answer["status"], response=answer)

    def failed(self, error: ApiError) -> dict[str, Any]:
        told = error.body()
        fields = {name: told["error"].get(name) for name in ("message", "code", "param")}
        return {"type": "error", **fields, **told, "sequence_number": next(self._numbers)}

    def _more(self, text: str, make: Callable[[str, str], dict[str, Any]]) -> Iterator[dict[str, Any]]:
        item = make(self._name, "")
        if self._item is not None and self._item["type"] != item["type"]:  # it has thought, and answers
            yield from self._close(_reasoning(self._name, self._text))
        if self._item is None:
            yield from self._open(item)
        self._text += text
        yield self._event(f"{_DELTAS[item['type']]}.delta", **self._place(), content_index=0, delta=text, **_logprobs(item))

    def _open(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._item, self._text = item, ""
        blank: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        status = {"status": "in_progress"} if "status" in item else {}
        yield self._event("output_item.added", output_index=self._num_items, item={**item, **blank, **status})
        if item["type"] == "message":
            part = {**item["content"][0], "text": ""}
            yield self._event("content_part.added", **self._place(), content_index=0, part=part)

    def _close(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if item["type"] in _DELTAS:
            (part,), at = item["content"], {**self._place(), "content_index": 0}
            yield self._event(f"{_DELTAS[item['type']]}.done", **at, text=part["text"], **_logprobs(item))
            if item["type"] == "message":
                yield self._event("content_part.done", **at, part=part)
        yield self._event("output_item.done", output_index=self._num_items, item=item)
        self._item, self._text = None, ""
        self._num_items += 1

    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"output_index": self._num_items, "item_id": self._item["id"]}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        return {"type": f"response.{kind}", **fields, "sequence_number": next(self._numbers)}


_DELTAS = {"message": "output_text", "reasoning": "reasoning_text"}


def _logprobs(item: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": []} if item["type"] == "message" else {}


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


def _items(reply: Reply, name: str, *, status: str) -> Objects:
    items: Objects = []
    if thinking := reply.message.get("reasoning_content"):
        items.append(_reasoning(name, thinking))
    if reply.message["content"] or not reply.calls:
        items.append(_message(name, reply.message["content"], status=status))
    for number, call in enumerate(reply.calls):
        names = {"type": "function_call", "id": f"fc_{name}{number}", "call_id": call["id"], "status": status}
        items.append({**names, **call["function"]})
    return items


def _reasoning(name: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content}


def _message(name: str, text: str, *, status: str = "in_progress") -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status, "content": content}
