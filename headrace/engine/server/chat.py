"""Turns a chat's messages and tools into a prompt, through the model's chat template."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.engine.server.body import ApiError, bad, check_object, check_text, shown, unsupported
from headrace.engine.server.text import encode_prompt
from headrace.engine.server.tools import read_past_calls, read_tools, writes_tool_calls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

    from headrace.engine.server.body import Body
    from headrace.engine.server.text import ServedModel

_RESERVED = ("chat_template", "conversation", "documents", "return_dict", "return_tensors", "tokenize", "tools")


@dataclass(frozen=True)
class _TemplateInput:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    options: dict[str, Any]

    def render(self, tokenizer: PreTrainedTokenizerBase) -> str:
        options: dict[str, Any] = {"tools": self.tools or None, "tokenize": False, **self.options}
        return check_text(tokenizer.apply_chat_template(self.messages, **options), "messages")


def read_chat(body: Body, served: ServedModel) -> tuple[tuple[int, ...], int]:
    """(the prompt, how many tool calls to parse out of the answer's text: with 0, all of it is content)."""
    messages = body.take("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("messages", "must be a list of at least one message")
    checked = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    _name_answers(checked)
    tools, max_calls = read_tools(body)
    given = _TemplateInput(checked, tools, _options(body))
    add_special = body.flag("add_special_tokens", False)
    tokenizer = served.tokenizer
    if tokenizer.chat_template is None:
        raise ApiError(
            400, f"the model {served.model_name!r} has no chat template; use /v1/completions", code="no_chat_template"
        )
    try:
        text = given.render(tokenizer)
    except ApiError:
        raise
    except Exception as error:  # a template is a program of the model's author and may raise anything
        raise bad("messages", f"the model's chat template refuses them: {shown(error)}") from error
    _check_nothing_is_dropped(given, text, tokenizer)
    can_call = bool(tools) and writes_tool_calls(tokenizer.get_chat_template(tools=tools))
    return encode_prompt(text, "messages", served, add_special=add_special), max_calls if can_call else 0


def _options(body: Body) -> dict[str, Any]:
    continues = body.flag("continue_final_message", False)
    generates = body.flag("add_generation_prompt", not continues)
    if continues and generates:
        raise bad("continue_final_message", "and add_generation_prompt exclude each other")
    extra = body.take("chat_template_kwargs")
    if extra is not None and (not isinstance(extra, dict) or extra.keys() & set(_RESERVED)):
        raise bad("chat_template_kwargs", f"must be an object of variables of the template, without {', '.join(_RESERVED)}")
    return {"add_generation_prompt": generates, "continue_final_message": continues, **(extra or {})}


def _check_nothing_is_dropped(given: _TemplateInput, text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """A template not written for tools silently ignores them: it renders the same text without them."""
    for name, what, less in _without(given):
        try:
            is_dropped = less.render(tokenizer) == text
        except Exception:  # noqa: BLE001  (a template that fails without them does not ignore them)
            is_dropped = False
        if is_dropped:
            raise unsupported(name, f"the model's chat template does not show {what}, so the model would not see them")


def _without(given: _TemplateInput) -> Iterator[tuple[str, str, _TemplateInput]]:
    """(parameter, what it gives, the input without it) for everything about tools; the first of each kind stands for all."""
    if given.tools:
        yield "tools", "tools", dataclasses.replace(given, tools=[])
    messages = given.messages
    calling = next((index for index, message in enumerate(messages) if "tool_calls" in message), None)
    if calling is not None:
        silent = {key: value for key, value in messages[calling].items() if key != "tool_calls"}
        less = dataclasses.replace(given, messages=[*messages[:calling], silent, *messages[calling + 1 :]])
        yield f"messages[{calling}].tool_calls", "calls of tools", less
    answering = next((index for index, message in enumerate(messages) if message["role"] == "tool"), None)
    if answering is not None:
        less = dataclasses.replace(given, messages=[*messages[:answering], *messages[answering + 1 :]])
        yield f"messages[{answering}]", "answers of tools", less


def _message(message: Any, name: str) -> dict[str, Any]:  # noqa: ANN401
    """A message as templates expect it. Text fields beyond OpenAI's go to the template; empty values are dropped."""
    check_object(message, name)
    role = check_text(message.get("role"), f"{name}.role")
    if message.get("function_call") is not None:
        raise unsupported(f"{name}.function_call", "is not supported by this server; use tool_calls")
    given = message.get("tool_calls")
    calls = [] if given is None else read_past_calls(given, f"{name}.tool_calls")
    if calls and role != "assistant":
        raise bad(f"{name}.tool_calls", "are an assistant's")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{name}.content") for part in content)
    elif content is None and calls:
        content = ""
    read: dict[str, Any] = {"role": role, "content": check_text(content, f"{name}.content")}
    for key, value in message.items():
        says_nothing = not value and not isinstance(value, str)
        if key not in ("role", "content", "tool_calls") and not says_nothing:
            read[key] = check_text(value, shown(f"{name}.{key}"))
    return {**read, "tool_calls": calls} if calls else read


def _name_answers(messages: list[dict[str, Any]]) -> None:
    """OpenAI's clients give the id of the call that a tool answers; some templates need the tool's name."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", []):
            names[call.get("id", "")] = call["function"]["name"]
        called = message.get("tool_call_id")
        if message["role"] == "tool" and called in names:
            message.setdefault("name", names[called])


def _part(part: Any, name: str) -> str:  # noqa: ANN401
    if not isinstance(part, dict) or part.get("type") != "text":
        raise unsupported(name, "only text parts are supported")
    return check_text(part.get("text"), name)
