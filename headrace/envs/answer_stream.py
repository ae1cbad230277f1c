"""An answer as it is generated: what is certain of its text before its last token is sampled.

The whole answer is parsed when it is complete (`Turns.answer`), and what was told before is always a start of that. So text
that could still become a tool call, a stop string or a mark around the thinking is held back, and so is space that may be
dropped.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from headrace.engine import MARKED, TextReader, ToolCallReader, call_form, could_begin, first_stop
from headrace.envs.turns import END_THINK, THINK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.engine import Increment
    from headrace.envs.turns import History, Turns

REASONING, CONTENT = "reasoning_content", "content"


class AnswerStream:
    """Of one call: tokens in, pieces of a message out."""

    def __init__(self, turns: Turns, history: History, *, stops: Sequence[str], tell: Callable[[dict[str, str]], None]) -> None:
        """`tell` gets each piece, of the content or of the reasoning."""
        self._tell, self._stops, self._special = tell, tuple(stops), turns.special
        self._reader = TextReader(turns.tokenizer, (), skip_special=turns.skips_special)
        self._waiting: list[int] = []  # a special token, which is left out if it is the last
        self._held = ""  # text whose part of the message is not certain
        form = turns.thinking_form(history)
        self._is_separate, self._is_trimmed = form.is_separate, False
        self._read = self._thinking if form.is_open else self._start if form.is_known else self._content
        self._calls, self._form = ToolCallReader(max_calls=1 << 30), call_form(turns.call_template(history))
        self._unstopped = ""  # content that could begin a stop string
        self._is_stopped = self._is_finished = False
        self._told = {REASONING: "", CONTENT: ""}

    def hear(self, new: Increment) -> None:
        """The engine's `on_tokens`. They are read after its step, not in it."""
        asyncio.get_running_loop().call_soon(self.push, new.token_ids)

    def push(self, token_ids: Sequence[int]) -> None:
        """More tokens were sampled."""
        if self._is_finished:
            return
        self._waiting += token_ids
        ready = len(self._waiting) - (bool(self._waiting) and self._waiting[-1] in self._special)
        self._held += self._reader.push(self._waiting[:ready])
        del self._waiting[:ready]
        while self._held and self._read():
            pass

    def finish(self, message: dict[str, Any]) -> None:
        """The whole message is known: tells the rest of it."""
        self._is_finished = True
        for name, told in self._told.items():
            whole = str(message.get(name) or "")
            assert whole.startswith(told), f"{name}: told {told!r}, but it is {whole!r}"
            self._say(name, whole[len(told) :])

    def _say(self, name: str, text: str) -> None:
        if text:
            self._told[name] += text
            self._tell({name: text})

    # Each reads the text held, and says whether the next may go on with the rest.

    def _start(self) -> bool:
        """Whether it thinks first."""
        text = self._held.lstrip()
        if len(text) < len(THINK) and THINK.startswith(text):
            return False
        self._read = self._thinking if text.startswith(THINK) else self._content
        return True

    def _thinking(self) -> bool:
        if not self._is_trimmed:
            text = self._held.lstrip()
            if len(text) < len(THINK) and THINK.startswith(text):
                return False
            text = text.removeprefix(THINK).lstrip("\n")
            if not text:
                return False
            self._held, self._is_trimmed = text, True
            if not self._is_separate:
                self._say_content(f"{THINK}\n")
        inside, mark, rest = self._held.partition(END_THINK)
        certain = inside if mark else inside[: len(inside) - could_begin(inside, [END_THINK])]
        certain = certain.rstrip("\n")
        if self._is_separate:
            self._say(REASONING, certain)
        else:
            self._say_content(certain)
        if not mark:
            self._held = self._held[len(certain) :]
            return False
        if not self._is_separate:
            self._say_content(f"\n{END_THINK}\n\n")
        self._held, self._read = rest, self._gap
        return True

    def _gap(self) -> bool:
        self._held = self._held.lstrip("\n")
        self._read = self._content if self._held else self._gap
        return bool(self._held)

    def _content(self) -> bool:
        """The answer itself, without tool calls in the form that the template shows them."""
        text, self._held = self._held, ""
        if self._form == "hermes":
            self._say_content(self._calls.push(text)[0])
        elif self._form in MARKED:
            marker = MARKED[self._form].opens
            before, mark, _ = text.partition(marker)
            certain = before[: len(before) - (0 if mark else could_begin(before, [marker]))].rstrip()
            self._say_content(certain)
            self._held = text[len(certain) :]
        elif self._form == "llama" and text.lstrip()[:1] in ("", "{", "<"):
            self._held = text  # the whole may be a call
        else:
            self._form = ""
            self._say_content(text)
        return False

    def _say_content(self, text: str) -> None:
        if self._stops and not self._is_stopped:
            text = self._unstopped + text
            found = first_stop(text, self._stops)
            length = found[0] if found is not None else len(text) - could_begin(text, self._stops)
            self._unstopped, text = text[length:], text[:length]
            self._say(CONTENT, text)
            self._is_stopped = found is not None
        elif not self._stops:
            self._say(CONTENT, text)
