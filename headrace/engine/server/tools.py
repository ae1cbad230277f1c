"""The tools a chat offers the model: checked here, shown to the model by its chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.engine.server.body import check_text, kind_of, read_json, shown
from headrace.engine.server.errors import bad

if TYPE_CHECKING:
    from headrace.engine.server.body import Body

_MANY = 2**31


@dataclass(frozen=True)
class Tools:
    """What a request says about tools."""

    shown: list[dict[str, Any]]
    """Given to the chat template; empty where none are offered, or none may be called."""
    max_calls: int
    """In one answer."""


def read_tools(body: Body) -> Tools:
    """`tools`, `tool_choice` and `parallel_tool_calls`."""
    given = body.take("tools")
    if given is not None and not isinstance(given, list):
        raise bad("tools", f"must be a list of tools, not {kind_of(given)}")
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given or [])]
    names = [tool["function"]["name"] for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise bad(f"tools[{index}].function.name", f"{shown(name)!r} is the name of another tool already")
    max_calls = _MANY if body.flag("parallel_tool_calls", True) else 1
    may_call = _may_call(body.take("tool_choice"))
    return Tools(tools if may_call else [], max_calls)


def _may_call(choice: Any) -> bool:  # noqa: ANN401
    if choice in (None, "auto"):
        return True
    if choice == "none":
        return False
    if choice == "required" or isinstance(choice, dict):
        message = 'a call cannot be forced, since decoding is not constrained; give "auto" or "none"'
        raise bad("tool_choice", message, code="unsupported_parameter")
    raise bad("tool_choice", 'must be "auto" or "none"')


def _tool(tool: Any, name: str) -> dict[str, Any]:  # noqa: ANN401
    """A tool as templates want it; what a function says beyond OpenAI's fields is the template's to show."""
    if not isinstance(tool, dict):
        raise bad(name, f"must be an object, not {kind_of(tool)}")
    if tool.get("type") != "function":
        raise bad(f"{name}.type", 'must be "function"')
    unknown = sorted(tool.keys() - {"type", "function"})
    if unknown:
        raise bad(shown(f"{name}.{unknown[0]}"), "is not a field this server knows", code="unknown_parameter")
    given = tool.get("function")
    if not isinstance(given, dict):
        raise bad(f"{name}.function", f"must be an object, not {kind_of(given)}")
    function = {key: value for key, value in given.items() if value is not None and key != "strict"}
    if not check_text(function.get("name"), f"{name}.function.name"):
        raise bad(f"{name}.function.name", "must not be empty")
    check_text(function.get("description", ""), f"{name}.function.description")
    if not isinstance(function.get("parameters", {}), dict):
        raise bad(f"{name}.function.parameters", f"must be a JSON schema, not {kind_of(function['parameters'])}")
    if given.get("strict") not in (None, False):
        message = "arguments cannot be held to a schema, since decoding is not constrained; leave it out"
        raise bad(f"{name}.function.strict", message, code="unsupported_parameter")
    check_text(json.dumps(function, ensure_ascii=False), f"{name}.function")
    return {"type": "function", "function": function}


def read_past_calls(calls: Any, name: str) -> list[dict[str, Any]]:  # noqa: ANN401
    """An assistant message's `tool_calls`, their arguments as the objects templates want."""
    if not isinstance(calls, list):
        raise bad(name, f"must be a list of calls, not {kind_of(calls)}")
    return [_past_call(call, f"{name}[{index}]") for index, call in enumerate(calls)]


def _past_call(call: Any, name: str) -> dict[str, Any]:  # noqa: ANN401
    if not isinstance(call, dict):
        raise bad(name, f"must be an object, not {kind_of(call)}")
    if call.get("type", "function") != "function":
        raise bad(f"{name}.type", 'must be "function"')
    function = call.get("function")
    if not isinstance(function, dict):
        raise bad(f"{name}.function", f"must be an object, not {kind_of(function)}")
    if not check_text(function.get("name"), f"{name}.function.name"):
        raise bad(f"{name}.function.name", "must not be empty")
    arguments = _arguments(function.get("arguments"), f"{name}.function.arguments")
    read = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return read if call.get("id") is None else {"id": check_text(call["id"], f"{name}.id"), **read}


def _arguments(value: Any, name: str) -> dict[str, Any]:  # noqa: ANN401
    """OpenAI's clients send JSON inside of JSON; a call without arguments may be an empty text."""
    if isinstance(value, str):
        try:
            value = read_json(value.encode(), name) if value.strip() else {}
        except (ValueError, RecursionError) as error:
            raise bad(name, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise bad(name, f"must be a JSON object, not {kind_of(value)}")
    check_text(json.dumps(value, ensure_ascii=False), name)
    return value
