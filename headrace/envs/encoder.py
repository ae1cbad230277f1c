"""Prompts to tokens, tokens to text."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from headrace.engine import CALL_FORMS
from headrace.envs.turns import History, Turns
from headrace.records import Rollout, check_messages
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedTokenizerBase

    from headrace.records import Array, Plain

_MAX_CACHED = 64 << 20
"""Bytes of cached prompts: their text and their tokens."""


class PromptEncoder:
    """Turns prompts into token ids, with the chat template if they are messages; the policy continues a final assistant
    message. Recent prompts are cached up to a number of bytes, because siblings share one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._cache: dict[str, tuple[Rollout, History]] = {}
        self._num_cached = 0  # bytes
        self._decode = _decoder(tokenizer)
        self.turns = Turns(self)
        self._reads_calls = False  # known once a prompt has tools

    def encode(self, prompt: Plain, template_kwargs: Plain = None) -> Array:
        return self.start(prompt, template_kwargs)[0].token_ids

    def start(self, prompt: Plain, template_kwargs: Plain = None, tools: Sequence[Any] = ()) -> tuple[Rollout, History]:
        """A rollout of this prompt that belongs to no episode yet, and what its tokens stand for; siblings share both."""
        key = prompt if isinstance(prompt, str) else repr((prompt, template_kwargs, *tools))  # takes a fifth of json's time
        if key not in self._cache:
            rollout = Rollout.from_prompt(self._encode(prompt, template_kwargs, tools), id="prompt")
            size = sys.getsizeof(key) + rollout.num_bytes
            if self._num_cached + size > _MAX_CACHED:
                self._cache.clear()
                self._num_cached = 0
            given: Any = template_kwargs
            history = History.of_prompt(prompt, len(rollout), tools=tools, variables=given)
            self._cache[key] = rollout, history  # of any size, because its siblings come next
            self._num_cached += size
        return self._cache[key]

    def tokens(self, text: str) -> list[int]:
        """Of text inside a rollout: nothing is added at its start."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def render(self, messages: Sequence[Any], *, tools: Sequence[Any] = (), answers: bool = True, **variables: Any) -> str:  # noqa: ANN401
        """The text that the chat template makes of messages; with `answers`, up to where the assistant is to write, which is
        the end of the last message if that is an assistant's. A template may raise anything."""
        is_open = answers and messages[-1]["role"] == "assistant"  # the policy continues it, as in TRL and vLLM
        how: dict[str, Any] = {
            "add_generation_prompt": answers and not is_open,
            "continue_final_message": is_open,
            "tokenize": False,
        }
        given: Any = list(tools) or None
        return str(self.tokenizer.apply_chat_template(list(messages), tools=given, **how, **variables))

    def decode(self, rollout: Rollout) -> str:
        return self._decode(rollout.completion_ids)

    def _encode(self, prompt: Plain, template_kwargs: Any, tools: Sequence[Any]) -> Any:  # noqa: ANN401
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        if self.tokenizer.chat_template is None:
            raise ConfigError("tasks: prompts are chat messages but the model's tokenizer has no chat template; give text")
        messages: Any = prompt
        try:
            check_messages(messages)
        except ValueError as error:
            raise ConfigError(f"tasks: {error}") from error
        variables = template_kwargs or {}
        text = self.render(messages, tools=tools, **variables)
        if tools and text == self.render(messages, **variables):
            problem = "the model's chat template does not show tools, so the model would not see them"
            raise ConfigError(
                f"environment.tools: {problem}; set model.chat_template, or give prompts as text that says how to"
            )
        if tools and not self._reads_calls:
            self._reads_calls = self.turns.reads_calls(tools, variables)
            if not self._reads_calls:
                problem = f"calls are not read as the model's chat template prints them; the forms known are {CALL_FORMS}"
                raise ConfigError(f"environment.tools: {problem}; set model.chat_template to one of these")
        return self.tokens(text)


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """`tokenizer.decode` without special tokens; the backend's where equal, because the wrapper costs more than decoding."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    if (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and type(tokenizer).decode is PreTrainedTokenizerBase.decode
        and type(tokenizer)._decode is PreTrainedTokenizerFast._decode
        and not tokenizer.clean_up_tokenization_spaces
    ):
        backend = tokenizer.backend_tokenizer
        return lambda ids: str(backend.decode(ids, skip_special_tokens=True))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
