"""Rollouts of one group, with trained tokens, tool replies, temperatures and masks, as an engine would have left them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.records import Call, FinishReason, Rollout, Sampling, SamplingMask, Source

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCABULARY = 90
PLAIN = Sampling()


def sibling(
    prompt: Sequence[int],
    turns: Sequence[int],
    *,
    group: str,
    index: int,
    sampling: Sampling = PLAIN,
    routing: np.ndarray | None = None,
) -> Rollout:
    """`turns` are lengths: sampled tokens, a tool's reply, sampled tokens and so on. The same names give the same tokens."""
    random = np.random.default_rng([ord(letter) for letter in group] + [index])
    total = len(prompt) + sum(turns)
    token_ids = np.concatenate([prompt, random.integers(6, VOCABULARY, size=total - len(prompt))]).astype(np.int32)
    source = np.full(total, Source.PROMPT, dtype=np.int8)
    calls, start = [], len(prompt)
    for turn, length in enumerate(turns):
        source[start : start + length] = Source.TOOL if turn % 2 else Source.SAMPLED
        if turn % 2 == 0:
            span = {"start": start, "stop": start + length, "sampling": sampling}
            calls.append(Call(**span, engine="e", finish_reason=FinishReason.STOP, started=0.0, finished=1.0))
        start += length
    sampled = source == Source.SAMPLED
    mask = None
    if sampling.is_truncated:
        rows = [random.permutation(VOCABULARY)[: sampling.top_k] if drawn else np.zeros(0, np.int32) for drawn in sampled]
        rows = [np.union1d(row, token_ids[at : at + 1]) if len(row) else row for at, row in enumerate(rows)]
        mask = SamplingMask.from_rows(rows)
    return Rollout(
        id=f"{group}/{index}",
        episode=f"{group}/{index}",
        group=group,
        index=index,
        token_ids=token_ids,
        source=source,
        loss_mask=sampled,
        logprobs=np.where(sampled, -random.random(total), 0).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        calls=tuple(calls),
        finish_reason=FinishReason.STOP if calls else None,
        expert_routing=routing,
        sampling_mask=mask,
    )


def make_prompt(name: str, length: int) -> list[int]:
    return np.random.default_rng([ord(letter) for letter in name]).integers(6, VOCABULARY, size=length).tolist()


def mixed() -> list[Rollout]:
    """Groups that share much, one token, or nothing; one with two prompts; tool replies, temperatures, cut distributions."""
    warm, cut = Sampling(temperature=0.7), Sampling(temperature=1.3, top_k=20)
    long, short = make_prompt("long", 21), make_prompt("short", 11)
    return [
        *(sibling(long, [length], group="long", index=length) for length in (9, 1, 30, 12)),
        sibling(long, [4, 6, 5], group="long", index=99, sampling=warm),
        *(sibling([7], [length], group="one token", index=length, sampling=cut) for length in (5, 14)),
        *(sibling([8 + length], [length], group="nothing", index=length) for length in (6, 13)),
        *(sibling([*short, 50], [length], group="two prompts", index=length, sampling=cut) for length in (3, 17, 4)),
        *(sibling([*short[:2], *long], [length, 2, 3], group="two prompts", index=length, sampling=warm) for length in (8, 2)),
        sibling(short, [25], group="alone", index=0),
    ]
