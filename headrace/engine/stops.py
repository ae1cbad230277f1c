"""Stop strings: whether the last token of a call completes one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.records import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.records import Rollout, Sampling

_SPARE_TOKENS = 8
"""More than a stop string's characters are read again: a token may hold less than one."""


def window(rollout: Rollout, sampling: Sampling, length: int) -> int | None:
    """From where on the first `length` tokens of a lengthened rollout are to be looked at; None if not at all: a string
    completed within the first `min_tokens` is passed over, then and later, as a stop token is."""
    if not sampling.stop or length - len(rollout) <= sampling.min_tokens:
        return None
    return max(_start_of_text(rollout), length - max(map(len, sampling.stop)) - _SPARE_TOKENS)


def completes(stops: Sequence[str], token_ids: list[int], decode: Callable[[list[int]], str]) -> bool:
    """Whether the last of these tokens completes one of the strings."""
    text = decode(token_ids)
    found = [each for each in stops if each in text]
    if not found:
        return False
    known = _num_alike(decode(token_ids[:-1]), text)
    return any(text.find(each, max(0, known - len(each) + 1)) >= 0 for each in found)


def _start_of_text(rollout: Rollout) -> int:
    """Where the text began that the next call goes on with: what was interrupted is one text with what follows."""
    start = len(rollout)
    for call in reversed(rollout.calls):
        if call.finish_reason is not FinishReason.ABORT or call.stop != start:
            break
        start = call.start
    return start


def _num_alike(before: str, text: str) -> int:
    """Characters that were known before the last token: the last of `before` may have been half of one."""
    return next((at for at, (old, new) in enumerate(zip(before, text, strict=False)) if old != new), len(before))
