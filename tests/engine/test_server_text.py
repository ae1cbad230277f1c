"""Tokens to text as they come: no character split, stop strings found wherever token boundaries fall."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.engine.server.text import TextReader, decode, first_stop
from headrace.engine.stop_strings import decoder_of, ends_call
from headrace.model.tiny import build_tokenizer
from headrace.records import Rollout, Sampling


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, as the rarest characters of real byte-level tokenizers are, and a few longer ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    longer = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    vocabulary = {token: index for index, token in enumerate(["<|end|>", *alphabet, *(a + b for a, b in longer)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, longer))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: a space is part of the token, dropped at the start of what is decoded; unknown bytes are spelt out."""
    words = ["▁the", "▁cat", "s", "▁", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


BYTES, SPACED = byte_tokenizer(), spaced_tokenizer()


def read(reader: TextReader, chunks: list[list[int]]) -> list[str]:
    parts = []
    for chunk in chunks:
        parts.append(reader.push(chunk))
        if reader.stopped_by is not None:
            return parts
    return [*parts, reader.finish()]


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    chunks, at = [], 0
    for size in sizes:
        chunks.append(ids[at : at + size])
        at += size
    return [*chunks, ids[at:]]


def test_a_character_of_several_tokens_comes_whole() -> None:
    ids = BYTES("a😀é")["input_ids"]
    assert len(ids) == 7
    parts = read(TextReader(BYTES, [1]), [[token] for token in ids])
    assert parts == ["a", "", "", "", "😀", "", "é", ""]


def test_half_a_character_at_the_end_is_not_lost() -> None:
    ids = BYTES("né")["input_ids"][:-1]
    assert "".join(read(TextReader(BYTES, []), [[token] for token in ids])) == "n\N{REPLACEMENT CHARACTER}"


def test_a_character_begun_in_the_prompt_is_finished() -> None:
    ids = BYTES("x😀y")["input_ids"]
    assert "".join(read(TextReader(BYTES, ids[:3]), [[token] for token in ids[3:]])) == "😀y"


def test_tokens_without_text_are_not_decoded_again_and_again(monkeypatch) -> None:
    """A model that may not end goes on with special tokens, whose text is left out."""
    num_decoded = 0

    def counted(tokenizer, token_ids, **options) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return decode(tokenizer, token_ids, **options)

    monkeypatch.setattr("headrace.engine.server.text.decode", counted)
    end, (a,) = BYTES.eos_token_id, BYTES("a")["input_ids"]
    half = BYTES("😀")["input_ids"][:1]
    reader = TextReader(BYTES, [a])
    text = "".join(read(reader, [[token] for token in [end] * 1000 + [a] + half * 1000 + [a]]))
    assert text == "a" + 1000 * "\N{REPLACEMENT CHARACTER}" + "a"
    assert num_decoded < 2000 * 64 and reader.num_pushed == 2002


@pytest.mark.parametrize("text", ["答案完毕了", "🛑🛑🛑", "stop"])
def test_a_stop_string_of_many_tokens_ends_a_call(text: str) -> None:
    sampled = BYTES("before " + text)["input_ids"]
    prompt, sampling = Rollout.from_prompt([1], id="r"), Sampling(stop=(text,))
    assert [ends_call(prompt, sampling, ids, decoder_of(BYTES)) for ids in (sampled, sampled[:-1])] == [True, False]


@pytest.mark.parametrize("tokenizer", [BYTES, SPACED], ids=["bytes", "spaced"])
@given(data=st.data())
def test_pushes_of_any_size_add_up_to_the_same_text(tokenizer, data) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=20))
    whole = "".join(read(TextReader(tokenizer, []), [ids]))
    expected = decode(tokenizer, ids, skip_special=True)
    assert whole == expected or (tokenizer is SPACED and "\N{REPLACEMENT CHARACTER}" in expected)  # it takes text back
    assert "".join(read(TextReader(tokenizer, []), cut(ids, sizes))) == whole
    assert "".join(read(TextReader(tokenizer, []), [[token] for token in ids])) == whole


def test_the_space_between_prompt_and_completion_is_kept() -> None:
    assert "".join(read(TextReader(SPACED, [0]), [[1], [2]])) == " cats"
    assert SPACED.decode([1, 2]) == "cats"


TINY = build_tokenizer()


def stopped(text: str, stops: list[str], **options: object) -> tuple[list[str], str | None]:
    reader = TextReader(TINY, [], stops=stops, **options)
    return read(reader, [[token] for token in TINY(text)["input_ids"]]), reader.stopped_by


def test_a_stop_string_over_several_tokens_is_cut_off() -> None:
    parts, by = stopped("one END two", ["END"])
    assert ("".join(parts), by) == ("one ", "END")
    parts, by = stopped("one END two", ["END"], include_stop=True)
    assert ("".join(parts), by) == ("one END", "END")


def test_what_could_become_a_stop_string_is_held_back_and_then_given() -> None:
    parts, by = stopped("aENDzEN", ["ENDING"])
    assert by is None and parts == ["a", "", "", "", "ENDz", "", "", "EN"]


def test_a_stop_string_before_min_tokens_does_not_count() -> None:
    assert "".join(stopped("a.b.c", ["."], min_tokens=2)[0]) == "a.b"
    assert "".join(stopped("a..c", [".."], min_tokens=2)[0]) == "a"  # ends with the third token
    assert "".join(stopped("a..c", [".."], min_tokens=3)[0]) == "a..c"


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_the_text_ends_where_a_stop_string_is_first_complete(text: str, stops: list[str], include: bool) -> None:
    """Against the obvious way: look at every beginning of the text for one that ends in a stop string."""
    expected, by = text, None
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            by = max(found, key=len)
            expected = text[:end] if include else text[: end - len(by)]
            break
    parts, stopped_by = stopped(text, stops, include_stop=include)
    assert ("".join(parts), stopped_by) == (expected, by)
    found = first_stop(text, stops)
    assert (None if found is None else found[1]) == by
