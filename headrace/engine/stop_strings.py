"""What ends a call besides its length: the model's stop tokens, and stop strings that its last token may complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.records import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from headrace.records import Array, Rollout, Sampling

_SPARE_TOKENS = 8  # decoded beyond one token per byte of the stop string


def stop_tokens(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a turn: the tokenizer's, and those of the model's generation config."""
    named = getattr(generation, "eos_token_id", None)
    listed = named if isinstance(named, list) else [named]
    return tuple(sorted({int(token) for token in [tokenizer.eos_token_id, *listed] if token is not None}))


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Turns tokens into the text that stop strings are searched in: the same that rewards see and vLLM searches."""

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    return decode


def ends_call(rollout: Rollout, sampling: Sampling, sampled: Sequence[int] | Array, decode: Callable[[list[int]], str]) -> bool:
    """Whether the last of the tokens `sampled` for this rollout completes a stop string. Like a stop token, one completed
    within the first `min_tokens` is ignored for good."""
    if not sampling.stop or len(sampled) <= sampling.min_tokens:
        return False
    num_old, longest = len(rollout), max(len(each.encode()) for each in sampling.stop)
    first = max(_start_of_text(rollout), num_old + len(sampled) - longest - _SPARE_TOKENS)
    token_ids = map(int, (*rollout.token_ids[first:], *sampled[max(0, first - num_old) :]))
    return completes(sampling.stop, list(token_ids), decode)


def completes(stops: Sequence[str], token_ids: list[int], decode: Callable[[list[int]], str]) -> bool:
    """Whether the last of these tokens completes one of the strings."""
    text = decode(token_ids)
    found = [each for each in stops if each in text]
    if not found:
        return False
    before = decode(token_ids[:-1])
    # `before` may end in half a character, so count the characters that both texts share.
    known = next((at for at, (old, new) in enumerate(zip(before, text, strict=False)) if old != new), len(before))
    return any(text.find(each, max(0, known - len(each) + 1)) >= 0 for each in found)


def _start_of_text(rollout: Rollout) -> int:
    """Where the text starts that the next call continues: an aborted call and the one that resumes it are one text."""
    start = len(rollout)
    for call in reversed(rollout.calls):
        if call.finish_reason is not FinishReason.ABORT or call.stop != start:
            break
        start = call.start
    return start
