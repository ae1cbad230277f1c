"""What an agent asks becomes rollouts. An agent sends its whole history with each call; where that continues a conversation of
its episode, message for message, only the new messages are tokenized, behind the tokens that the engine sampled. Two calls
that continue the same answer are two rollouts: the second is a fork, which keeps the sampled tokens and leaves training them to
the first. A history that continues none is a prompt of its own, or a fork where it begins with tokens that were sampled."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
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

    def starts(self, chat: Chat) -> bool:
        """Whether a chat begins with all of this conversation and goes on. The last messages are compared first: if they are
        edited, it is most often there."""
        told = (*self.history.messages, self.answer)
        is_other = (self.history.tools, self.history.variables) != (tuple(chat.tools), chat.variables)
        if is_other or len(told) >= len(chat.messages):
            return False
        return all(map(_is_same, reversed(told), reversed(chat.messages[: len(told)])))


class AgentRollouts:
    """Those of one episode."""

    def __init__(self, client: Client) -> None:
        self._client, self._answered = client, defaultdict[int, list[_Answered]](list)  # by their `_hashes`
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
        found = self._continued(call.chat)
        try:
            if found is None:
                history, rollout = self._prompt(call.chat)
            else:
                new = call.chat.messages[len(found.history.messages) + 1 :]
                history, rollout = self._client.follow(found.history, found.rollout, found.answer, new, is_taken=found.is_taken)
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

    def _continued(self, chat: Chat) -> _Answered | None:
        """The longest conversation that a chat begins with and goes on; of several, one that no other messages follow."""
        for key in reversed(_hashes(chat.messages[:-1])):
            for answered in sorted(self._answered.get(key, ()), key=lambda each: each.is_taken):
                if answered.starts(chat):
                    return answered
        return None

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
        self._answered[_hashes((*history.messages, answer))[-1]].append(_Answered(rollout, history, answer))
        self._finished.pop(rollout.id, None)
        self._finished[rollout.id] = rollout
        self.is_truncated, self.refusal = rollout.finish_reason is FinishReason.LENGTH, None
        return Reply(answer, self.is_truncated, num_prompt, len(rollout) - num_prompt)


def check_last(messages: Sequence[Message]) -> None:
    """The policy answers; it does not write an answer of the agent's to its end."""
    if messages[-1]["role"] == "assistant":
        raise bad("messages", "the last is an assistant's, so there is nothing to answer; end with a user's or a tool's")


def _is_same(ours: Message, theirs: Message) -> bool:
    """Whether an agent's message is the one that its conversation has. It may leave out an answer's reasoning too."""
    reasoning = theirs.get("reasoning_content") if theirs["role"] == "assistant" else None
    if reasoning is not None and reasoning.strip() != ours.get("reasoning_content", "").strip():
        return False
    return _compared(ours) == _compared(theirs)


def _compared(message: Message) -> Message:
    """What must be the same. The ids of calls and space around an answer need not, which frameworks change."""
    if message["role"] != "assistant":
        return {**message, "tool_call_id": ""}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {"role": "assistant", "content": str(message["content"]).strip(), "tool_calls": calls}


def _hashes(messages: Sequence[Message]) -> list[int]:
    """Of each start of a conversation, from its first message to all; the same if all its messages are `_is_same`."""
    found = itertools.accumulate(messages, lambda start, each: hash((start, _hashable(_compared(each)))), initial=0)
    return list(found)[1:]


def _hashable(value: Any, depth: int = 8) -> Any:  # noqa: ANN401  (JSON)
    """Equal for equal values, down to a depth that bounds recursion: the policy writes the arguments of calls."""
    if isinstance(value, dict | list | tuple) and not depth:
        return None
    if isinstance(value, dict):
        return frozenset((key, _hashable(each, depth - 1)) for key, each in value.items())
    return tuple(_hashable(each, depth - 1) for each in value) if isinstance(value, list | tuple) else value
