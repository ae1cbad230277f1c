"""What an agent asks becomes rollouts. An agent sends its whole history with each call; where that continues a conversation of
its episode, message for message, only the new messages are tokenized, behind the tokens that the engine sampled. Two calls
that continue the same answer are two rollouts: the second is a fork, which keeps the sampled tokens and leaves training them to
the first. A history that continues none is a prompt of its own, or a fork where it begins with tokens that were sampled."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from headrace.engine import ApiError, PromptTooLong, UnusablePrompt, bad, first_stop, shown
from headrace.envs.answer_stream import AnswerStream
from headrace.envs.client import fork, num_shared
from headrace.envs.turns import History
from headrace.records import FinishReason
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.engine import Chat
    from headrace.envs.client import Client
    from headrace.records import Plain, Rollout

    Message = dict[str, Any]
    Tell = Callable[[dict[str, str]], None]


@dataclass(frozen=True)
class AgentCall:
    """One call of the model, read from either of OpenAI's interfaces."""

    chat: Chat
    model: str
    """As the agent calls it."""
    max_tokens: int = 0
    """At most this many, beside the run's own limit; 0 asks for none."""
    stops: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False


@dataclass(frozen=True)
class Reply:
    """The policy's answer to one call."""

    message: Message
    """Content, reasoning, tool calls; arguments are objects."""
    is_truncated: bool
    num_prompt: int
    num_sampled: int

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tool calls as OpenAI's clients get them, with arguments as JSON."""
        found = []
        for call in self.message.get("tool_calls", ()):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            found.append({**call, "function": {"name": call["function"]["name"], "arguments": arguments}})
        return found


@dataclass(eq=False)
class _Answered:
    """A conversation up to an answer of the policy."""

    rollout: Rollout
    history: History
    """Up to where the answer begins."""
    answer: Message
    is_taken: bool = False
    """Other messages follow it, in the same rollout."""

    def continued_by(self, chat: Chat) -> int:
        """How many messages of a chat this conversation is; 0 unless the chat starts with all of it and goes on."""
        told = (*self.history.messages, self.answer)
        if len(told) >= len(chat.messages) or self.history.tools != tuple(chat.tools):
            return 0
        is_same = self.history.variables == chat.variables and all(map(_is_same, told, chat.messages))
        return len(told) if is_same else 0


class AgentRollouts:
    """Those of one episode."""

    def __init__(self, client: Client) -> None:
        self._client, self._answered = client, list[_Answered]()
        self._finished: dict[str, Rollout] = {}
        self.is_truncated = False
        """The last call's answer was cut off at a limit, or its prompt does not fit the context."""
        self.refusal: Exception | None = None
        """Why the policy could not answer the last call: an unusable prompt, or a model that is none for such chats."""

    @property
    def finished(self) -> tuple[Rollout, ...]:
        """In the order of their last answers."""
        return tuple(self._finished.values())

    async def reply(self, call: AgentCall, tell: Tell | None = None) -> Reply:
        """The policy's answer. Waits for the engine; cancelling it cancels the call there. `tell` gets pieces of the message as
        they are generated, all but its tool calls."""
        found = max(self._answered, key=lambda each: (each.continued_by(call.chat), not each.is_taken), default=None)
        length = 0 if found is None else found.continued_by(call.chat)
        try:
            if found is None or not length:
                found, (history, rollout) = None, self._prompt(call.chat)
            else:
                history, rollout = self._client.follow(
                    found.history, found.rollout, found.answer, call.chat.messages[length:], is_taken=found.is_taken
                )
        except ConfigError as error:
            self.refusal = error
            raise bad("messages", str(error)) from error
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise bad("messages", f"the model's chat template refuses them: {shown(error)}") from error
        takes = found if found is not None and rollout.id == found.rollout.id else None
        if takes is not None:
            takes.is_taken = True
        try:
            stream = None if tell is None else AnswerStream(self._client.encoder.turns, history, stops=call.stops, tell=tell)
            longer = await self._generate(rollout, call, stream)
        except BaseException:
            if takes is not None:
                takes.is_taken = False
            raise
        reply = self._read(longer, history, call, num_prompt=len(rollout))
        if stream is not None:
            stream.finish(reply.message)
        return reply

    def _prompt(self, chat: Chat) -> tuple[History, Rollout]:
        messages, tools, variables = cast("Plain", chat.messages), chat.tools, chat.variables
        rollout = self._client.prompt(messages, variables or None, tools)
        history = History.of_prompt(messages, len(rollout), tools=tools, variables=variables)
        shared = {id: num_shared(other, rollout.token_ids) for id, other in self._finished.items()}
        nearest = self._finished[max(shared, key=lambda id: shared[id])] if shared else None
        if nearest is not None and nearest.is_sampled[: shared[nearest.id]].any():
            rollout = fork(nearest, rollout.token_ids, id=rollout.id)
        return history, rollout

    async def _generate(self, rollout: Rollout, call: AgentCall, stream: AnswerStream | None) -> Rollout:
        on_tokens = None if stream is None else stream.hear
        try:
            limits: dict[str, Any] = {"max_tokens": call.max_tokens, "stop": call.stops}
            longer = await self._client.generate(rollout, **limits, on_tokens=on_tokens)
        except UnusablePrompt as error:
            self.is_truncated, self.refusal = isinstance(error, PromptTooLong), error
            raise
        if len(longer.calls) > len(rollout.calls):
            return longer
        self.is_truncated = True
        if longer.loss_mask.any():  # else it is a fork that was never answered
            self._finished[longer.id] = longer
        message = f"the conversation has {len(rollout)} tokens, which leaves no room in the context for an answer"
        raise ApiError(400, message, param="messages", code="context_length_exceeded")

    def _read(self, rollout: Rollout, history: History, call: AgentCall, *, num_prompt: int) -> Reply:
        answer = self._client.encoder.turns.answer(history, rollout)
        stopped = first_stop(answer["content"], call.stops) if call.stops else None
        if stopped is not None:
            answer["content"] = answer["content"][: stopped[0]]
        if "tool_calls" in answer:
            answer["tool_calls"] = answer["tool_calls"][: call.chat.max_calls]
        self._answered.append(_Answered(rollout, history, answer))
        self._finished.pop(rollout.id, None)
        self._finished[rollout.id] = rollout
        self.is_truncated, self.refusal = rollout.finish_reason is FinishReason.LENGTH, None
        return Reply(answer, self.is_truncated, num_prompt, len(rollout) - num_prompt)


def check_last(messages: Sequence[Message]) -> None:
    """The policy answers; it does not write an answer of the agent's to its end."""
    if messages[-1]["role"] == "assistant":
        raise bad("messages", "the last is an assistant's, so there is nothing to answer; end with a user's or a tool's")


def _is_same(ours: Message, theirs: Message) -> bool:
    """Whether an agent's message is the one that its conversation has. It may leave out an answer's reasoning, the ids of calls
    and space around an answer, as frameworks do."""
    if ours["role"] != "assistant":
        return {**ours, "tool_call_id": ""} == {**theirs, "tool_call_id": ""}
    if theirs["role"] != "assistant" or str(ours["content"]).strip() != theirs["content"].strip():
        return False
    reasoning = theirs.get("reasoning_content")
    if reasoning is not None and reasoning.strip() != ours.get("reasoning_content", "").strip():
        return False
    return [call["function"] for call in ours.get("tool_calls", ())] == [
        call["function"] for call in theirs.get("tool_calls", ())
    ]
