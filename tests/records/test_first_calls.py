"""Prompts answered together are what `Rollout.extend` makes of each alone."""

from __future__ import annotations

import numpy as np

from headrace.records import Call, FinishReason, Rollout, Sampling, Source, answered, is_prompt

SIZES = [(3, 2), (1, 5), (4, 0), (2, 7)]
"""Tokens of the prompt and of the answer."""


def drawn(count: int, *, place: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    logprobs = -np.arange(count, dtype=np.float32) - place
    return np.arange(count, dtype=np.int32) + 10 * place, logprobs, np.full(count, place, dtype=np.int32)


def prompts() -> list[Rollout]:
    made = [Rollout.from_prompt(np.arange(size), id=f"g0/{at}", group="g0", index=at) for at, (size, _) in enumerate(SIZES)]
    made[1] = made[1].replace(rewards={"early": 1.0}, parent=("g0/0", 1), policy="old")
    made[3] = made[3].append([8, 9], source=Source.TEMPLATE)
    assert all(map(is_prompt, made))
    return made


def together(given: list[Rollout], tokens: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> list[Rollout]:
    count = len(given)
    return answered(
        given,
        *map(np.concatenate, zip(*tokens, strict=True)),
        counts=[len(ids) for ids, _, _ in tokens],
        engine="engine-1",
        reasons=[FinishReason.STOP, FinishReason.LENGTH] * (count // 2),
        policies=["policy"] * count,
        lineages=[f"life {at}" for at in range(count)],
        sampling=[Sampling(seed=at) for at in range(count)],
        started=[float(at) for at in range(count)],
        finished=[at + 0.5 for at in range(count)],
    )


def test_answered_together_they_are_as_each_alone() -> None:
    given, tokens = prompts(), [drawn(count, place=at) for at, (_, count) in enumerate(SIZES)]
    found = together(given, tokens)
    for at, (prompt, rollout, (ids, logprobs, versions)) in enumerate(zip(given, found, tokens, strict=True)):
        reason = [FinishReason.STOP, FinishReason.LENGTH][at % 2]
        how = {"sampling": Sampling(seed=at), "finish_reason": reason, "started": float(at), "finished": at + 0.5}
        call = Call(start=len(prompt), stop=len(prompt) + len(ids), engine="engine-1", **how)
        new = {"token_ids": ids, "logprobs": logprobs, "versions": versions}
        assert rollout == prompt.extend(call, **new, policy="policy", lineage=f"life {at}")
        assert not is_prompt(rollout) and not rollout.token_ids.flags.writeable
        assert rollout.columns is not found[at - 1].columns
        rollout.append([1]).replace(rewards={"right": 1.0})
    assert [len(prompt) for prompt in given] == [3, 1, 4, 4], "as they were"


def test_what_has_more_than_tokens_is_no_prompt() -> None:
    prompt = prompts()[0]
    assert not is_prompt(prompt.replace(columns={"values": np.zeros(3, np.float32)}))
    assert not is_prompt(prompt.replace(expert_routing=np.zeros((3, 1, 1), np.uint8)))
