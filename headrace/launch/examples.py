"""Turns rows into examples for SFT: the tokens a chat would have, and which of them are learned.

Answers are found by rendering the chat up to each of them, with the template's own generation prompt, and up to its end: what
the second text adds is the answer, as the policy would have to write it. Whitespace after its end token is not learned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.records import Rollout
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.envs import PromptEncoder
    from headrace.records import Plain


class _Piece(NamedTuple):
    text: str
    is_learned: bool


def example_parts(row: dict[str, Plain], *, where: str) -> tuple[Any, Any]:
    """(prompt, completion), each text or messages. A chat in `messages` is a completion without a prompt."""
    if "prompt" not in row:
        chat: Any = row["messages"]
        if not any(message["role"] == "assistant" for message in chat):
            raise ConfigError(f"{where}: 'messages' has no answer of the assistant to learn")
        return [], chat
    prompt: Any = row["prompt"]
    completion: Any = row.get("completion", row.get("answer"))
    is_chat = isinstance(completion, list) and all(isinstance(m, dict) and "role" in m and "content" in m for m in completion)
    if is_chat and isinstance(prompt, list) and any(message["role"] == "assistant" for message in completion):
        return prompt, completion
    if not isinstance(completion, str):
        fix = "give text, or messages with an assistant's if the prompt is messages; or leave [sft] out"
        raise ConfigError(f"{where} has no 'completion' or 'answer' to learn from: it is {str(completion)[:40]!r}; {fix}")
    return prompt, completion


def encode_examples(row: dict[str, Plain], encoder: PromptEncoder, *, name: str) -> list[Rollout]:
    """The row's examples: one, or several where the template rewrites earlier turns, such as Qwen3, which drops their thoughts.
    Each answer is then learned once, after the very tokens that a chat would have before it."""
    prompt, completion = example_parts(row, where="sft")
    variables: Any = row.get("chat_template_kwargs") or {}
    if isinstance(completion, str):
        return [_written(prompt, completion, encoder, variables, name=name)]
    examples = _split_chat(prompt + completion, encoder, {**variables, "tools": row.get("tools")}, first=len(prompt))
    return [_rollout(_tokenize(each, encoder), name=f"{name}.{index}", group=name) for index, each in enumerate(examples)]


def _written(prompt: Any, completion: str, encoder: PromptEncoder, variables: Any, *, name: str) -> Rollout:  # noqa: ANN401
    """Text is learned as it is written, after the prompt as RL has it, with the token that ends a turn."""
    text = completion + (_turn_end(encoder, variables) if isinstance(prompt, list) else str(encoder.tokenizer.eos_token))
    ids = encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
    return _rollout([(encoder.encode(prompt, variables).tolist(), False), (ids, True)], name=name, group=name)


def _turn_end(encoder: PromptEncoder, variables: Any) -> str:  # noqa: ANN401
    """What the chat template writes after an answer; the end token if it cannot be told."""
    try:
        ((*_, answer),) = _split_chat(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}], encoder, variables
        )
    except ConfigError:
        return str(encoder.tokenizer.eos_token)
    return answer.text.rpartition("!")[2].strip()


def _split_chat(messages: Any, encoder: PromptEncoder, variables: Any, *, first: int = 0) -> list[list[_Piece]]:  # noqa: ANN401
    """The texts before and of each answer from message `first` on; a new list wherever earlier text has changed."""

    def render(count: int, *, asks: bool) -> str:
        how = {"tokenize": False, "add_generation_prompt": asks, **variables}
        try:
            return str(encoder.tokenizer.apply_chat_template(messages[:count], **how))
        except Exception as error:
            raise ConfigError(f"sft: the chat template refuses the first {count} messages: {error}") from error

    if encoder.tokenizer.chat_template is None:
        raise ConfigError("sft: rows are chats but the tokenizer has no chat template; set model.chat_template to a file")
    special = tuple(str(token) for token in encoder.tokenizer.added_tokens_decoder.values() if token.special)
    examples: list[list[_Piece]] = []
    done: str | None = None
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index < first:
            continue
        before, whole = render(index, asks=True), render(index + 1, asks=False)
        if not whole.startswith(before):
            fix = "give the row a prompt and its completion as text, or set model.chat_template"
            raise ConfigError(f"sft: the chat template writes answers differently from its generation prompt; {fix}")
        if done is None or not before.startswith(done):
            examples.append([])
            done = ""
        answer = whole[len(before) :]
        has_end = answer.rstrip().endswith(special)
        answer = _up_to_end(answer, special) if has_end else answer + str(encoder.tokenizer.eos_token or "")
        examples[-1] += [_Piece(before[len(done) :], False), _Piece(answer, True)]
        done = before + answer if has_end else None  # an end token that the template lacks cannot be followed by its text
    return examples


def _up_to_end(answer: str, special: tuple[str, ...]) -> str:
    """Without what follows the end token: whitespace, and a second token that ends the whole text, as Phi-3's template has."""
    while (answer := answer.rstrip()).endswith(special):
        last = max((token for token in special if answer.endswith(token)), key=len)
        before = answer.removesuffix(last)
        if before == before.rstrip() or not before.rstrip().endswith(special):
            break
        answer = before
    return answer


def _tokenize(pieces: list[_Piece], encoder: PromptEncoder) -> list[tuple[list[int], bool]]:
    """Token ids of each piece: of the whole text, as the chat template's own call gives them, unless a token would lie on both
    sides of a border; then of each piece by itself, as they are generated."""
    tokenizer = encoder.tokenizer
    if tokenizer.is_fast:
        text = "".join(piece.text for piece in pieces)
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts, ends = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        borders = np.cumsum([0, *(len(piece.text) for piece in pieces)])
        place = np.maximum(np.searchsorted(borders, ends, side="left") - 1, 0)
        if (starts >= borders[place]).all():
            ids = np.array(found["input_ids"])
            return [(ids[place == index].tolist(), piece.is_learned) for index, piece in enumerate(pieces)]
    return [(tokenizer(piece.text, add_special_tokens=False)["input_ids"], piece.is_learned) for piece in pieces]


def _rollout(pieces: list[tuple[list[int], bool]], *, name: str, group: str) -> Rollout:
    """A rollout as if the policy had sampled what is to be learned."""
    (prompt, _), *rest = pieces
    made = Rollout.from_prompt(prompt, id=name, episode=name, group=group)
    for ids, is_learned in rest:
        made = made.demonstrate(ids, engine="demonstration") if is_learned else made.append(ids)
    return made
