"""Text to tokens and back: prompts that fit the context, and completions decoded as they come, cut at stop strings."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.engine.server.body import ApiError, bad

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from headrace.engine.request import HeldAdapter

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_BEFORE = 5  # prompt tokens decoded with the completion: some tokenizers drop a space at the start of a text
_SINGLY = 4  # last tokens of a large push, pushed one by one: later tokens then decode after the same ones as in a stream
_MOST_SILENT = 16  # tokens that give no text, as special ones or halves of characters; more are not decoded again and again
_FORGOTTEN = 2  # once this many of those have given text, the tokens before them no longer affect later ones


@dataclass(frozen=True)
class ServedModel:
    """What requests are checked against: the served model."""

    tokenizer: PreTrainedTokenizerBase
    model_name: str
    context: int
    """The most tokens of a prompt and its completion together."""
    vocabulary: int
    """Number of token ids."""
    stop_ids: tuple[int, ...]
    """End a completion unless `ignore_eos`."""
    adapters: Mapping[str, HeldAdapter] = field(default_factory=dict)
    """Of the model, by the names that requests give instead of its own."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.model_name, *self.adapters

    @functools.cached_property
    def max_characters(self) -> int:
        """Of the longest text that could fit the context, if every token were the longest one."""
        return self.context * max(len(token) for token in self.tokenizer.get_vocab())


def encode_prompt(text: str, name: str, served: ServedModel, *, add_special: bool) -> tuple[int, ...]:
    """The tokens of parameter `name`. Text that cannot fit is refused first: tokenizing megabytes would block all requests."""
    if len(text) > served.max_characters:
        message = f"{name}: a text of {len(text)} characters is longer than the context of {served.context} tokens can be"
        raise ApiError(400, message, param=name, code="context_length_exceeded")
    encoded: Any = served.tokenizer(text, add_special_tokens=add_special, verbose=False)["input_ids"]
    highest = max(encoded, default=0)
    if highest >= served.vocabulary:
        raise bad(
            name, f"the tokenizer gives token id {highest}, which is outside the model's vocabulary of {served.vocabulary}"
        )
    return tuple(encoded)


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, skip_special: bool) -> str:
    """The exact text of the tokens. Spaces are not tidied, since that would depend on what comes after."""
    options = {"skip_special_tokens": skip_special, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(list(token_ids), **options))


class TextReader:
    """Decodes one completion. Pushes of any size add up to the same text."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: Sequence[int],
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.stopped_by: str | None = None  # the stop string that ended it
        self.num_pushed = 0  # tokens of the completion; those pushed after a stop string do not count
        self._text = functools.partial(decode, tokenizer, skip_special=skip_special)
        self._stops, self._include_stop, self._min_tokens = stops, include_stop, min_tokens
        self._ids = list(prompt_ids[-_BEFORE:])
        self._given = len(self._ids)  # tokens of `_ids` whose text was returned, kept because the next ones decode after them
        self._held = ""  # text that could be the start of a stop string
        self._exempt = 0  # a stop string that ends in this many characters of `_held` came before min_tokens, and is ignored

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these tokens. They are pushed one by one if there are stop strings, or if some are not
        whole characters: the decoder may then change the text of earlier tokens."""
        if len(token_ids) > _SINGLY and not self._stops and _UNFINISHED not in self._text([*self._ids, *token_ids]):
            before = self._ids.copy(), self._given, self.num_pushed
            text = self._push(token_ids[:-_SINGLY])
            last = [self._push([token]) for token in token_ids[-_SINGLY:]]
            if sum(map(bool, last)) >= _FORGOTTEN:
                return text + "".join(last)
            self._ids, self._given, self.num_pushed = before
        return "".join(self._push([token]) for token in token_ids if self.stopped_by is None)

    def finish(self) -> str:
        """The text that was held back, once no more tokens will come."""
        if self.stopped_by is not None:
            return ""
        text = self._cut(self._decode(is_last=True))
        return text if self.stopped_by is not None else text + self._held

    def _push(self, token_ids: Sequence[int]) -> str:
        self._ids.extend(token_ids)
        self.num_pushed += len(token_ids)
        return self._cut(self._decode(is_last=False))

    def _decode(self, *, is_last: bool) -> str:
        given = self._text(self._ids[: self._given])
        before = given.rstrip(_UNFINISHED)
        whole = self._text(self._ids)
        is_late = len(self._ids) - self._given > _MOST_SILENT
        if len(whole) <= len(before):
            if is_late:
                del self._ids[self._given :]
            return ""
        if whole.endswith(_UNFINISHED) and not is_last:
            if not is_late:
                return ""
            self._ids.clear()  # they are no character that later tokens could complete
        elif before == given:  # else the prompt ends inside a character, whose tokens must be decoded together
            del self._ids[: self._given]
        self._given = len(self._ids)
        return whole[len(before) :]

    def _cut(self, fresh: str) -> str:
        if not self._stops:
            return fresh
        text = self._held + fresh
        if self.num_pushed <= self._min_tokens:
            self._exempt = len(text)
        found = first_stop(text, self._stops, after=self._exempt)
        if found is not None:
            start, self.stopped_by = found
            return text[: start + len(self.stopped_by)] if self._include_stop else text[:start]
        given = len(text) - could_begin(text, self._stops)
        self._held, self._exempt = text[given:], max(0, self._exempt - given)
        return text[:given]


def first_stop(text: str, stops: Sequence[str], *, after: int = 0) -> tuple[int, str] | None:
    """(start, stop string) of the one that ends first, past `after`, so that the result does not depend on token boundaries."""
    found = [(text.find(stop, max(0, after - len(stop) + 1)), stop) for stop in stops]
    complete = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
    return min(complete)[1:] if complete else None


def could_begin(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of the text could begin a stop string."""
    longest = max(map(len, stops)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(len(stop) > length and stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
