"""Turns a chat's messages and tools into a prompt, through the model's chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.engine.server.body import ApiError, bad, check, read_json, shown, unsupported
from headrace.engine.server.text import encode_prompt
from headrace.engine.server.tool_calls import CLOSES, OPENS
from headrace.records import NOT_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.engine.server.body import Body
    from headrace.engine.server.text import ServedModel

    Objects = list[dict[str, Any]]

_RESERVED = (*NOT_VARIABLES, "documents")
_MANY = 2**31


@dataclass(frozen=True)
class Chat:
    """What a chat's body asks about, as templates expect it."""

    messages: Objects
    tools: Objects
    max_calls: int
    """Tool calls to parse out of the answer's text; later ones are left out."""
    variables: dict[str, Any]
    """Of the template."""

    @classmethod
    def read(cls, body: Body, *, is_strict_refused: bool = True) -> Chat:
        given = body.take("messages")
        if not isinstance(given, list) or not given:
            raise bad("messages", "must be a list of at least one message")
        messages = [_message(message, f"messages[{index}]") for index, message in enumerate(given)]
        _name_answers(messages)
        tools = _tools(body, is_strict_refused=is_strict_refused)
        max_calls = _MANY if body.take("parallel_tool_calls", bool, True) else 1
        variables = body.take("chat_template_kwargs", default={})
        if not isinstance(variables, dict) or variables.keys() & set(_RESERVED):
            problem = f"must be an object of variables of the template, without {', '.join(_RESERVED)}"
            raise bad("chat_template_kwargs", problem)
        return cls(messages, tools, max_calls, variables)


def read_chat(body: Body, served: ServedModel) -> tuple[tuple[int, ...], int]:
    """(the prompt, how many tool calls to parse out of the answer's text: with 0, all of it is content)."""
    chat = Chat.read(body)
    messages, tools, max_calls = chat.messages, chat.tools, chat.max_calls
    options = {**_template_options(body), **chat.variables}
    add_special = body.take("add_special_tokens", bool, False)
    tokenizer = served.tokenizer
    if tokenizer.chat_template is None:
        message = f"the model {served.model_name!r} has no chat template; use /v1/completions"
        raise ApiError(400, message, code="no_chat_template")

    def render(messages: Objects, tools: Objects) -> str:
        given: Any = tools or None
        return str(tokenizer.apply_chat_template(messages, tools=given, tokenize=False, **options))

    try:
        text = render(messages, tools)
    except Exception as error:  # a template is a program of the model's author and may raise anything
        raise bad("messages", f"the model's chat template refuses them: {shown(error)}") from error
    check(text, str, "messages")
    for name, what, less_messages, less_tools in _without(messages, tools):
        try:
            is_dropped = render(less_messages, less_tools) == text
        except Exception:  # noqa: BLE001  (a template that fails without them does not ignore them)
            continue
        if is_dropped:
            raise unsupported(name, f"the model's chat template does not show {what}, so the model would not see them")
    template = tokenizer.get_chat_template(tools=tools) if tools else ""
    can_call = OPENS in template and CLOSES in template  # it teaches the form that is parsed; other forms stay content
    return encode_prompt(text, "messages", served, add_special=add_special), max_calls if can_call else 0


def _without(messages: Objects, tools: Objects) -> Iterator[tuple[str, str, Objects, Objects]]:
    """(parameter, what it gives, the messages and tools without it) for everything about tools, which a template not written
    for them silently ignores: it renders the same text without them. The first of each kind stands for all."""
    if tools:
        yield "tools", "tools", messages, []
    call = next((index for index, message in enumerate(messages) if "tool_calls" in message), None)
    if call is not None:
        silent = {key: value for key, value in messages[call].items() if key != "tool_calls"}
        yield f"messages[{call}].tool_calls", "calls of tools", [*messages[:call], silent, *messages[call + 1 :]], tools
    answer = next((index for index, message in enumerate(messages) if message["role"] == "tool"), None)
    if answer is not None:
        yield f"messages[{answer}]", "answers of tools", [*messages[:answer], *messages[answer + 1 :]], tools


def _template_options(body: Body) -> dict[str, Any]:
    continues = body.take("continue_final_message", bool, False)
    generates = body.take("add_generation_prompt", bool, not continues)
    if continues and generates:
        raise bad("continue_final_message", "and add_generation_prompt exclude each other")
    return {"add_generation_prompt": generates, "continue_final_message": continues}


def _message(message: Any, name: str) -> dict[str, Any]:  # noqa: ANN401
    """A message as templates expect it. Text fields beyond OpenAI's go to the template; empty values are dropped."""
    role = check(check(message, dict, name).get("role"), str, f"{name}.role")
    if message.get("function_call") is not None:
        raise unsupported(f"{name}.function_call", "is not supported by this server; use tool_calls")
    given = message.get("tool_calls")
    listed = [] if given is None else check(given, list, f"{name}.tool_calls", "a list of calls")
    calls = [_past_call(call, f"{name}.tool_calls[{index}]") for index, call in enumerate(listed)]
    if calls and role != "assistant":
        raise bad(f"{name}.tool_calls", "are an assistant's")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{name}.content") for part in content)
    elif content is None and calls:
        content = ""
    read = {"role": role, "content": check(content, str, f"{name}.content")}
    for key, value in message.items():
        says_nothing = not value and not isinstance(value, str)
        if key not in ("role", "content", "tool_calls") and not says_nothing:
            read[key] = check(value, str, shown(f"{name}.{key}"))
    return {**read, "tool_calls": calls} if calls else read


def _part(part: Any, name: str) -> str:  # noqa: ANN401
    if not isinstance(part, dict) or part.get("type") != "text":
        raise unsupported(name, "only text parts are supported")
    return str(check(part.get("text"), str, name))


def _past_call(call: Any, name: str) -> dict[str, Any]:  # noqa: ANN401
    """A call in an assistant's message, with arguments as an object, as templates expect it. OpenAI's clients send JSON inside
    JSON; a call without arguments may be an empty text."""
    function = _function(call, name, default_type="function")
    arguments, place = function.get("arguments"), f"{name}.function.arguments"
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments.encode(), place) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise bad(place, f"is not JSON: {error}") from error
    check(arguments, dict, place, "a JSON object")
    check(json.dumps(arguments, ensure_ascii=False), str, place)
    read = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return read if call.get("id") is None else {"id": check(call["id"], str, f"{name}.id"), **read}


def _name_answers(messages: Objects) -> None:
    """OpenAI's clients give the id of the call that a tool answers; some templates need the tool's name."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", []):
            names[call.get("id", "")] = call["function"]["name"]
        called = message.get("tool_call_id")
        if message["role"] == "tool" and called in names:
            message.setdefault("name", names[called])


def _tools(body: Body, *, is_strict_refused: bool) -> Objects:
    """The tools for the chat template: none if none may be called."""
    given = body.take("tools", list, [], "a list of tools")
    tools = [_tool(tool, f"tools[{index}]", is_strict_refused=is_strict_refused) for index, tool in enumerate(given)]
    names = [tool["function"]["name"] for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise bad(f"tools[{index}].function.name", f"{shown(name)!r} is the name of another tool already")
    choice = body.take("tool_choice", default="auto")
    if choice == "required" or isinstance(choice, dict):
        raise unsupported("tool_choice", 'a call cannot be forced by this server; give "auto" or "none"')
    if choice not in ("auto", "none"):
        raise bad("tool_choice", 'must be "auto" or "none"')
    return tools if choice == "auto" else []


def _tool(tool: Any, name: str, *, is_strict_refused: bool) -> dict[str, Any]:  # noqa: ANN401
    """A tool as templates expect it. Fields of a function beyond OpenAI's go to the template."""
    given = _function(tool, name)
    for key in tool.keys() - {"type", "function"}:
        raise bad(shown(f"{name}.{key}"), "is not a field this server knows", code="unknown_parameter")
    if is_strict_refused and given.get("strict") not in (None, False):
        message = "arguments of calls cannot be held to a schema by this server; leave it out"
        raise unsupported(f"{name}.function.strict", message)
    function = {key: value for key, value in given.items() if value is not None and key != "strict"}
    check(function.get("description", ""), str, f"{name}.function.description")
    check(function.get("parameters", {}), dict, f"{name}.function.parameters", "a JSON schema")
    check(json.dumps(function, ensure_ascii=False), str, f"{name}.function")
    return {"type": "function", "function": function}


def _function(value: Any, name: str, *, default_type: str = "") -> dict[str, Any]:  # noqa: ANN401
    """The function of a tool or of a call, which must have a name."""
    if check(value, dict, name).get("type", default_type) != "function":
        raise bad(f"{name}.type", 'must be "function"')
    function: dict[str, Any] = check(value.get("function"), dict, f"{name}.function")
    if not check(function.get("name"), str, f"{name}.function.name"):
        raise bad(f"{name}.function.name", "must not be empty")
    return function
