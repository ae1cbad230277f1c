"""An engine that answers as a function of the conversation, and the check that rollouts hold its tokens, each once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
from templates import tokenizer_of
from test_turns import Scripted

from headrace.engine import Increment
from headrace.envs import EngineClient, PromptEncoder, run_episode
from headrace.records import Episode, FinishReason, Rollout, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable

END = "<|im_end|>"


async def _at_once(_: int, __: int) -> None:
    await asyncio.sleep(0)


class Answering(Scripted):
    """Says what `answer` makes of the text so far; an answer that does not end its turn is truncated."""

    def release(self, ids: list[str]) -> None: ...

    def __init__(self, answer: Callable[[str], str], *, template: str = "qwen2_5", **more: Any) -> None:
        super().__init__(tokenizer_of(template), **more)
        self.answer, self.records, self.samplings, self.num_cancelled = answer, [], [], 0
        self.between: Callable[[int, int], Any] = _at_once
        """Awaited after each token of a stream, with how many there are and will be."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def generate(self, rollout: Rollout, sampling: Sampling, *, on_tokens: Any = None) -> Rollout:
        self.samplings.append(sampling)
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        text = self.answer(self.tokenizer.decode(rollout.token_ids.tolist()))
        self.says = [(text, FinishReason.STOP if text.endswith((END, *sampling.stop)) else FinishReason.LENGTH)]
        longer = await super().generate(rollout, sampling)
        new = longer.token_ids[len(rollout) :].tolist()
        for at, id in enumerate(new if on_tokens else ()):
            on_tokens(Increment((id,), (-1.0,), (0,), longer.finish_reason if at + 1 == len(new) else None))
            await self.between(at + 1, len(new))
        self.records.append((rollout.id, len(rollout), longer.token_ids[len(rollout) :].tolist()))
        return longer


def client_of(engine: Answering, episode: str = "g0/0", **more: Any) -> EngineClient:
    names: dict[str, Any] = {"episode": episode, "group": episode.split("/")[0], "index": 0}
    encoder = PromptEncoder(engine.tokenizer)
    return EngineClient(engine=engine, encoder=encoder, **names, sampling=Sampling(max_tokens=64), seed=1, **more)


def run(environment: Any, engine: Answering, *, row: dict | None = None, **how: Any) -> Episode:
    return asyncio.run(run_episode(environment, row or {"prompt": "2 + 3"}, client_of(engine), **how))


def check_exact(episode: Episode, engine: Answering) -> None:
    """Every token that the engine sampled is in the loss once, at its place, and no other token is."""
    rollouts = {rollout.id: rollout for rollout in episode.rollouts}
    expected = {id: np.zeros(len(rollout), dtype=bool) for id, rollout in rollouts.items()}
    for id, start, ids in engine.records:
        if id.partition(".")[0] != episode.id:
            continue
        assert rollouts[id].token_ids[start : start + len(ids)].tolist() == ids
        expected[id][start : start + len(ids)] = True
    for id, rollout in rollouts.items():
        assert (rollout.loss_mask == expected[id]).all() and rollout.loss_mask.any()
        assert (rollout.logprobs[rollout.loss_mask] == -1).all()
        if rollout.parent is not None:
            parent, at = rollout.parent
            assert (rollout.token_ids[:at] == rollouts[parent].token_ids[:at]).all()
            assert not rollout.loss_mask[:at].any()


def text_of(rollout: Rollout, engine: Answering) -> str:
    return engine.tokenizer.decode(rollout.token_ids.tolist())
