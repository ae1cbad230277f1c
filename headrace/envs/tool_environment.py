"""The built-in environment with tools: answer, call tools, answer again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from headrace.envs.tools import Toolbox
from headrace.settings import check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.envs.client import Client
    from headrace.records import Episode, Plain


class ToolEnvironment:
    """The policy answers, and as long as its answer calls tools, their replies follow and it answers again.

    The episode ends with an answer that calls none, after `max_turns` answers, when it holds `max_tokens` tokens, or when an
    answer or the context has reached its limit, which counts as truncated; it is scored in each case."""

    def __init__(
        self,
        tools: Sequence[Any],
        *,
        max_turns: int = 8,
        max_tokens: int = 0,
        tool_timeout: float = 30.0,
        max_reply: int = 8192,
        can_resume: bool = False,
    ) -> None:
        """`tools`: see `headrace.envs.tools`. `max_turns`: answers of the policy. `max_tokens`: of an episode, prompt and
        replies included; 0 leaves it to the model's context. A call may take `tool_timeout` seconds, and its reply have
        `max_reply` characters. `can_resume`: tools may be called again with the same arguments after a restart, and reply the
        same; episodes then continue where they were."""
        check(type(max_turns) is int and max_turns >= 1, "environment.options.max_turns", max_turns, "a whole number ≥ 1")
        check(type(max_tokens) is int and max_tokens >= 0, "environment.options.max_tokens", max_tokens, "≥ 0")
        is_time = isinstance(tool_timeout, int | float) and 0 < tool_timeout < math.inf
        check(is_time, "environment.options.tool_timeout", tool_timeout, "a number of seconds above 0")
        check(type(max_reply) is int and max_reply >= 1, "environment.options.max_reply", max_reply, "a whole number ≥ 1")
        self._max_turns, self._max_tokens, self.can_resume = max_turns, max_tokens, can_resume
        self._tools = Toolbox(tools, timeout=tool_timeout, max_reply=max_reply)

    async def run(self, task: dict[str, Plain], client: Client) -> Episode:
        tools = await self._tools.open(task)
        try:
            chat = client.chat(task["prompt"], tools=tools.schemas, template_kwargs=task.get("chat_template_kwargs"))
            for turn in range(1, self._max_turns + 1):
                answer = await chat.generate()
                calls = answer.get("tool_calls", ())
                if not calls or chat.is_truncated or turn == self._max_turns or self._is_full(len(chat.rollout)):
                    break
                chat.append(*await tools.answer(calls))
            return chat.episode(task, environment="tools")
        finally:
            await tools.close()

    def _is_full(self, num_tokens: int) -> bool:
        return 0 < self._max_tokens <= num_tokens
