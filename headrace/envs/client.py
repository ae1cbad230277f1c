"""What an environment holds of the system: make a prompt, generate, read text."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any, Protocol

from headrace.partial import goes_on_from
from headrace.records import FinishReason, Rollout, check_messages
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

    from headrace.engine import Engine
    from headrace.envs.call_limit import CallLimit
    from headrace.records import Array, Plain, Sampling

_REMEMBERED = 4096


class Client(Protocol):
    """Given to `Environment.run`, one per episode."""

    @property
    def episode(self) -> str:
        """Its id."""

    @property
    def group(self) -> str:
        """Of the siblings it is compared with."""

    def prompt(self, prompt: Plain) -> Rollout:
        """A rollout of this episode with nothing sampled yet."""

    async def generate(self, rollout: Rollout) -> Rollout:
        """The rollout with one more completion, resumed as often as the weights interrupted it."""

    def text(self, rollout: Rollout) -> str:
        """What was generated, for display and for rewards; never tokenized again."""


class PromptEncoder:
    """Prompts to token ids, by the chat template where they are messages. A final message of the assistant's is left open, for
    the policy to go on with. Siblings ask for the same prompt; it is kept."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._known: dict[str, Rollout] = {}
        self._decode = _decoder(tokenizer)

    def encode(self, prompt: Plain) -> Array:
        return self.rollout(prompt).token_ids

    def rollout(self, prompt: Plain) -> Rollout:
        """A rollout of this prompt that is nobody's yet: siblings share its arrays."""
        key = prompt if isinstance(prompt, str) else json.dumps(prompt)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[key] = Rollout.from_prompt(self._encode(prompt), id="prompt")
        return known

    def decode(self, rollout: Rollout) -> str:
        return self._decode(rollout.completion_ids)

    def _encode(self, prompt: Plain) -> Any:  # noqa: ANN401
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        if self.tokenizer.chat_template is None:
            raise ConfigError("tasks: prompts are chat messages but the model's tokenizer has no chat template; give text")
        messages: Any = prompt
        try:
            check_messages(messages)
        except ValueError as error:
            raise ConfigError(f"tasks: {error}") from error
        is_begun = messages[-1]["role"] == "assistant"  # to be gone on with, as TRL and vLLM do
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=not is_begun, continue_final_message=is_begun, return_dict=False
        )


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """`tokenizer.decode` without special tokens. Where that comes to a call of its backend, the call: the look at each
    token on the way there takes longer than decoding does."""
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


class EngineClient:
    """A `Client` over an engine."""

    def __init__(
        self,
        engine: Engine,
        encoder: PromptEncoder,
        *,
        policy: str = "policy",
        episode: str,
        group: str,
        index: int,
        sampling: Sampling,
        seed: int,
        partials: dict[str, Rollout] | None = None,
        limit: CallLimit | None = None,
    ) -> None:
        """`seed` is the run's; each rollout draws random numbers of its own by its id, the episode's first by the episode's.
        `partials` has half-finished rollouts by their id. One that begins with the prompt a call is made for is gone on
        with; one that the weights interrupted lies there until its call ends. `limit` bounds the calls at the engine."""
        self._engine, self._encoder = engine, encoder
        self._limit, self._has_called = limit, False
        self.policy = policy
        self._partials = {} if partials is None else partials
        self.episode: str = episode
        self.group: str = group
        self._index = index
        self._sampling, self._seed = sampling, seed
        self._rollouts = 0

    def prompt(self, prompt: Plain) -> Rollout:
        suffix = f".{self._rollouts}" if self._rollouts else ""
        self._rollouts += 1
        shared = self._encoder.rollout(prompt)
        names = {"id": self.episode + suffix, "episode": self.episode, "group": self.group, "policy": self.policy}
        return shared.renamed(**names, index=self._index)

    async def generate(self, rollout: Rollout) -> Rollout:
        if self._limit is None:
            return await self._generate(rollout)
        is_first, self._has_called = not self._has_called, True
        await self._limit.acquire(is_first=is_first)
        try:
            return await self._generate(rollout)  # an interrupted call keeps its place until it is finished
        finally:
            self._limit.release()

    async def _generate(self, rollout: Rollout) -> Rollout:
        start, partials, id = len(rollout), self._partials, rollout.id
        asked = self._sampling.with_seed(_rollout_seed(self._seed, id))
        partial = partials.pop(id, None)
        if partial is None or not goes_on_from(rollout, partial):
            rollout = await self._engine.generate(rollout, asked)
        else:
            rollout = partial
        try:
            while rollout.finish_reason is FinishReason.ABORT:
                partials[id] = rollout
                done = len(rollout) - start
                left = dataclasses.replace(
                    asked, max_tokens=asked.max_tokens - done, min_tokens=max(0, asked.min_tokens - done)
                )
                rollout = await self._engine.generate(rollout, left)
        finally:
            partials.pop(id, None)
        return rollout

    def limit(self, max_tokens: int) -> None:
        """Let its calls draw no more than this."""
        self._sampling = dataclasses.replace(self._sampling, max_tokens=max_tokens)

    def text(self, rollout: Rollout) -> str:
        return self._encoder.decode(rollout)


def _rollout_seed(seed: int, id: str) -> int:
    """63 bits of (run seed, rollout id): the same rollout draws the same random numbers in any run of the same seed."""
    digest = hashlib.blake2b(f"{seed}:{id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
