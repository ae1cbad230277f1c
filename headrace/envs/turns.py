"""Turns: what a chat template adds to a rollout when messages follow the policy's answer.

The policy's tokens stay as the engine sampled them; only what is new is tokenized, once. To find what is new, the history is
rendered with and without the new messages, with a stand-in for each answer of the policy, since a template may print an answer
otherwise than it was sampled (spaces, the JSON of a call). If the template leaves the earlier text as it is, the tokens behind
the answer are appended. If it rewrites it, as Qwen3's does that drops earlier thinking, the rollout is forked: another rollout
of the same episode goes on from the tokens that both have in common, and the first keeps what the policy sampled.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.engine import PromptTooLong, has_special_markers, read_calls
from headrace.records import Episode, FinishReason, Rollout, Source, check_messages
from headrace.settings import check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.envs.client import Client
    from headrace.envs.encoder import PromptEncoder
    from headrace.records import Plain

    Message = dict[str, Any]

_CONTENT, _THINKING, _CALL = "☉content☉", "☉thinking☉", "☉call☉"
"""Texts of stand-ins; no template prints them by itself."""
THINK, END_THINK = "<think>", "</think>"
_SOURCES = {"tool": Source.TOOL, "ipython": Source.TOOL}
"""Of the content of a message, by role; other roles are the prompt's, and what the template writes around it is its own."""


def check_limits(*, max_turns: object, max_seconds: object) -> None:
    """Raise for options of an environment that are no limits of an episode."""
    check(type(max_turns) is int and max_turns >= 1, "environment.options.max_turns", max_turns, "a whole number ≥ 1")
    is_time = isinstance(max_seconds, int | float) and 0 <= max_seconds < math.inf
    check(is_time, "environment.options.max_seconds", max_seconds, "a number of seconds, or 0 for no limit")


class TemplateError(ValueError):
    """The chat template refuses a conversation."""


@dataclass(frozen=True)
class History:
    """The messages that a rollout's tokens stand for, up to where the policy is to write."""

    is_text: bool
    """The prompt is text, not messages: no template is used."""
    tools: tuple[Any, ...] = ()
    """JSON schemas of the tools that the template shows."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Of the template."""
    messages: tuple[Message, ...] = ()
    """All of them, answers of the policy as they were parsed; of a text prompt, those that followed it."""
    shown: tuple[Message, ...] = ()
    """The same with stand-ins for the answers that the policy sampled into this rollout."""
    num_tokens: int = 0
    """Tokens of the rollout so far; what follows them is the policy's next answer."""

    @classmethod
    def of_prompt(
        cls, prompt: Plain, num_tokens: int, *, tools: Sequence[Any] = (), variables: dict[str, Any] | None = None
    ) -> History:
        messages: Any = () if isinstance(prompt, str) else tuple(prompt)  # type: ignore[arg-type]
        return cls(isinstance(prompt, str), tuple(tools), variables or {}, messages, messages, num_tokens)


class ThinkingForm(NamedTuple):
    """What a chat template makes of an answer's thinking."""

    is_known: bool
    """It knows of thinking."""
    is_open: bool
    """The prompt ends inside of it."""
    is_separate: bool
    """It takes it apart from the content."""


class Turns:
    """Parses the policy's answers and makes the tokens of what follows them."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder, self.tokenizer = encoder, encoder.tokenizer
        self.skips_special = not has_special_markers(self.tokenizer)
        special = {id: token.content for id, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        self.special, self._special_texts = set(special), tuple(special.values())

    def answer(self, history: History, rollout: Rollout) -> Message:
        """The policy's tokens after the history, as an assistant's message. Arguments of calls are objects, as templates expect
        them; ids of calls are numbers in order, so that a repeated episode has the same."""
        ids = rollout.token_ids[history.num_tokens :].tolist()
        if ids and ids[-1] in self.special:
            del ids[-1]  # it ends the turn
        options = {"skip_special_tokens": self.skips_special, "clean_up_tokenization_spaces": False}
        text = str(self.tokenizer.decode(ids, **options))
        message: Message = {"role": "assistant"}
        thinking, text, is_separate = (None, text, False) if history.is_text else self._thinking(text, history)
        content, calls = read_calls(text, template=self.call_template(history))
        if is_separate:
            message["reasoning_content"] = thinking
        elif thinking is not None:
            content = f"{THINK}\n{thinking}\n{END_THINK}\n\n{content}"
        for number, call in enumerate(calls, start=sum(len(m.get("tool_calls", ())) for m in history.messages)):
            call |= {"id": f"call{number:05d}"}  # nine letters and digits, which is what Mistral's templates want
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        message["content"] = content
        return {**message, "tool_calls": calls} if calls else message

    def reads_calls(self, tools: Sequence[Any], variables: dict[str, Any]) -> bool:
        """Whether a call is found again in what the chat template prints of it."""
        asked: Message = {"role": "user", "content": "?"}
        call = {"name": "look", "arguments": {"at": "it"}}
        said = {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "type": "function", "function": call}]}
        history = History.of_prompt([asked], 0, tools=tools, variables=variables)
        try:
            before, whole = self._render([asked], history), self._render([asked, said], history, answers=False)
        except TemplateError:
            return False
        start = len(commonprefix([before, whole]))  # noqa: RUF071  (texts, not paths)
        tag = whole.rfind("<", 0, start)
        if tag >= 0 and ">" not in whole[tag:start]:  # `<think>` and `<tool_call>` begin alike
            start = tag
        printed = whole[start:].rstrip()
        if END_THINK not in printed and self.thinking_form(history).is_open:  # QwQ's leaves out what the policy thought
            printed = END_THINK + printed
        ids = self._encoder.tokens(printed)
        found = self.answer(history, Rollout.from_prompt(ids, id="call")) if ids else {}
        return [each["function"] for each in found.get("tool_calls", ())] == [call]

    def call_template(self, history: History) -> str | None:
        """The template whose form of calls is read. Without tools it is "", which has none: a call that the policy makes up is
        text, as templates refuse a conversation in which no reply follows a call. A text prompt may name tools itself."""
        return None if history.is_text else self.template(history) if history.tools else ""

    def template(self, history: History) -> str:
        tools: Any = list(history.tools) or None
        return str(self.tokenizer.get_chat_template(tools=tools))

    def _thinking(self, text: str, history: History) -> tuple[str | None, str, bool]:
        """(thinking, the text behind it, whether the template takes them apart from each other). A template that knows of no
        thinking gets it as part of the content."""
        form = self.thinking_form(history)
        if not form.is_known or (not form.is_open and not text.lstrip().startswith(THINK)):
            return None, text, False
        thinking, _, rest = text.partition(END_THINK)
        return thinking.lstrip().removeprefix(THINK).strip("\n"), rest.lstrip("\n"), form.is_separate

    def thinking_form(self, history: History) -> ThinkingForm:
        template = self.template(history)
        is_known = "reasoning_content" in template or END_THINK in template
        is_open = is_known and self._render(history.shown, history).rstrip().endswith(THINK)
        return ThinkingForm(is_known, is_open, "reasoning_content" in template)

    def follow(
        self, history: History, rollout: Rollout, answer: Message, messages: Sequence[Message]
    ) -> tuple[History, list[int], list[int]] | None:
        """After the policy's answer: (the new history, the tokens to append, the source of each). None if the template rewrites
        what came before."""
        check_messages(messages)
        if history.is_text:
            ids, sources = self._plain(messages)
            told = (*history.messages, answer, *messages)
            return replace(history, messages=told, shown=told, num_tokens=len(rollout) + len(ids)), ids, sources
        stand_in, marks = _stand_in(answer)
        before, first = _opened(history.shown)
        stand_in["content"] = first + stand_in["content"]
        shown = (*before, stand_in, *messages)
        added = self._added(history, before, stand_in, shown, marks)
        if added is None:
            return None
        text, end = added
        for number, call in enumerate(answer.get("tool_calls", ())):  # some templates name the function that replies
            text = text.replace(f"{_CALL}{number}☉", call["function"]["name"])
        ids, sources = self._tokens(text, messages)
        num_end = len(self._encoder.tokens(end))
        num_end += num_end < len(ids) and ids[num_end] in self.special  # what begins the next turn ends GLM's
        for num_sampled in range(num_end, 0, -1):  # of what ends a turn, the policy sampled the start
            is_sampled = rollout.is_sampled[len(rollout) - num_sampled :]
            if is_sampled.all() and rollout.token_ids[-num_sampled:].tolist() == ids[:num_sampled]:
                ids, sources = ids[num_sampled:], sources[num_sampled:]
                break
        return (
            replace(history, messages=_told(history, answer, messages), shown=shown, num_tokens=len(rollout) + len(ids)),
            ids,
            sources,
        )

    def rewritten(self, history: History, answer: Message, messages: Sequence[Message]) -> tuple[History, list[int]]:
        """What the template makes of all messages: the prompt of a fork."""
        told = _told(history, answer, messages)
        ids = self._encoder.tokens(self._render(told, history))
        return replace(history, messages=told, shown=told, num_tokens=len(ids)), ids

    def _added(
        self, history: History, before: tuple[Message, ...], stand_in: Message, shown: Sequence[Message], marks: list[str]
    ) -> tuple[str, str] | None:
        """(the text behind the answer, the start of it that ends the answer's turn); None if the template rewrote the text
        before the answer, or left out a part of the answer."""
        old, new = self._render(history.shown, history), self._render(shown, history)
        if not new.startswith(old):
            return None
        at = len(old)
        for mark in marks:
            at = new.find(mark, at)
            if at < 0:
                return None
            at += len(mark)
        alone = self._render((*before, {"role": "assistant", "content": _CONTENT}), history, answers=False)
        end = alone.rpartition(_CONTENT)[2]
        closed = self._render((*before, stand_in), history, answers=False)
        is_left = new.startswith(closed)
        if not is_left and stand_in.get("reasoning_content") == "":
            return None  # it leaves out that the policy did not think
        if not marks[-1].startswith(_CALL):
            return new[at:], end
        place = new.find(end, at, len(closed) if is_left else len(new)) if end else -1
        if place >= 0:
            return new[place:], end
        last = next((text for text in self._special_texts if closed.endswith(text)), "")
        return (new[len(closed) - len(last) :], last) if is_left else None

    def _render(self, messages: Sequence[Message], history: History, *, answers: bool = True) -> str:
        """Arguments of calls are objects in most templates, and JSON in some."""
        how: dict[str, Any] = {"tools": history.tools, "answers": answers, **history.variables}
        try:
            return self._encoder.render(messages, **how)
        except Exception as error:  # a template is a program of the model's author and may raise anything
            if not any(message.get("tool_calls") for message in messages):
                raise TemplateError(f"the chat template refuses the conversation: {error}") from error
        try:
            return self._encoder.render([_with_json(message) for message in messages], **how)
        except Exception as error:
            raise TemplateError(f"the chat template refuses the conversation: {error}") from error

    def _tokens(self, text: str, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Tokens and sources: the content of each message is its role's, what is around it the template's."""
        sources, at = np.full(len(text), Source.TEMPLATE, dtype=np.int8), 0
        for message in messages:
            content = str(message.get("content") or "").strip()
            start = text.find(content, at) if content else -1
            if start >= 0:
                at = start + len(content)
                sources[start:at] = _SOURCES.get(message["role"], Source.PROMPT)
        encoded: Any = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = np.array([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
        return encoded["input_ids"], sources[np.minimum(starts, len(text) - 1)].tolist() if len(text) else []

    def _plain(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Without a template: contents as they are, replies of tools between marks."""
        ids: list[int] = []
        sources: list[int] = []
        for message in messages:
            content, source = str(message.get("content") or ""), _SOURCES.get(message["role"], Source.PROMPT)
            text = f"<tool_response>\n{content}\n</tool_response>\n" if source is Source.TOOL else content
            new = self._encoder.tokens(text)
            ids, sources = ids + new, sources + [int(source)] * len(new)
        return ids, sources


def _told(history: History, answer: Message, messages: Sequence[Message]) -> tuple[Message, ...]:
    """All messages; the start of the answer that the prompt gave is part of it."""
    before, first = _opened(history.messages)
    return (*before, {**answer, "content": first + answer["content"]}, *messages)


def _opened(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], str]:
    """(the messages before the answer, the start of the answer that the prompt gave)."""
    *before, last = messages
    return (tuple(before), str(last.get("content") or "")) if last["role"] == "assistant" else (messages, "")


def _with_json(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _stand_in(answer: Message) -> tuple[Message, list[str]]:
    """(a message of the same parts, the texts that the template must show, in order)."""
    content, marks = answer["content"], [_CONTENT]
    stand_in: Message = {"role": "assistant", "content": _CONTENT}
    if "reasoning_content" in answer:
        stand_in["reasoning_content"] = _THINKING if answer["reasoning_content"] else ""
        marks = [_THINKING, _CONTENT] if answer["reasoning_content"] else marks
    elif content.startswith(THINK):
        stand_in["content"] = f"{THINK}\n{_THINKING}\n{END_THINK}\n\n{_CONTENT}"
        marks = [_THINKING, _CONTENT]
    if answer.get("tool_calls"):
        if not content:
            stand_in["content"] = ""
            marks.remove(_CONTENT)
        names = [f"{_CALL}{number}☉" for number in range(len(answer["tool_calls"]))]
        calls = [
            {**call, "function": {"name": name, "arguments": {}}}
            for call, name in zip(answer["tool_calls"], names, strict=True)
        ]
        stand_in["tool_calls"], marks = calls, [*marks, *names]
    return stand_in, marks


class Conversation:
    """A chat of one episode: its messages, and the rollouts that hold its tokens."""

    def __init__(self, client: Client, prompt: Plain, *, tools: Sequence[Any] = (), template_kwargs: Plain = None) -> None:
        self._client, self._started = client, time.time()
        self._clock_started: float | None = None
        self.rollout = client.prompt(prompt, template_kwargs, tools)
        """The one that goes on."""
        self._left: list[Rollout] = []

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """All, in order; more than one only if the template rewrote the history."""
        return (*self._left, self.rollout)

    @property
    def messages(self) -> list[Message]:
        """All so far, also the last ones if they did not fit the context; of a text prompt, those that followed it."""
        return self._client.messages(self.rollout)

    @property
    def is_truncated(self) -> bool:
        """The last answer reached `sampling.max_tokens`, or the conversation its context: it cannot go on."""
        return self.rollout.finish_reason is FinishReason.LENGTH

    @property
    def seconds(self) -> float:
        """How long it has taken since its first call was at the engine; 0 until that is answered. What it waits for a place at
        the engines before that does not count, nor what it took before a restart."""
        return 0.0 if self._clock_started is None else time.monotonic() - self._clock_started

    async def generate(self) -> Message:
        """The policy's next answer. If the conversation no longer fits the context, it ends: `is_truncated`."""
        called = time.monotonic()
        try:
            self.rollout = await self._client.generate(self.rollout)
        except PromptTooLong:
            if not self._left:
                raise
        if self._left and not self.rollout.loss_mask.any():  # a fork that was never answered, and holds nothing to train
            self.rollout = self._client.drop_fork(self.rollout, self._left.pop())
        if self._clock_started is None:
            at_engine = sum(call.finished - call.started for call in self.rollout.calls)  # in part before a restart
            self._clock_started = max(called, time.monotonic() - at_engine)
        return next(message for message in reversed(self.messages) if message["role"] == "assistant")

    def append(self, *messages: Message) -> None:
        """Messages that follow the answer."""
        before, self.rollout = self.rollout, self._client.append(self.rollout, list(messages))
        if self.rollout.id != before.id:
            self._left.append(before)

    def episode(self, task: dict[str, Plain], **fields: Any) -> Episode:  # noqa: ANN401  (of `Episode`)
        """What an environment returns."""
        client = self._client
        names: dict[str, Any] = {"id": client.episode, "group": client.group, "task": task, "rollouts": self.rollouts}
        return Episode(**names, started=self._started, finished=time.time(), **fields)
