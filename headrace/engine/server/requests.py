"""Reads requests from OpenAI's bodies with vLLM's additions; what the server cannot do is refused by name."""

from __future__ import annotations

import dataclasses
import secrets
from typing import TYPE_CHECKING, Any

from headrace.engine.server.body import ApiError, Body, bad, check, check_token_ids, kind_of, shown, unsupported
from headrace.engine.server.chat import read_chat
from headrace.engine.server.grammar import read_grammar
from headrace.engine.server.text import encode_prompt
from headrace.engine.server.tool_calls import has_special_markers
from headrace.engine.shaping import Shaping
from headrace.records import Sampling

if TYPE_CHECKING:
    from headrace.engine.server.text import ServedModel

MAX_CHOICES = 1024  # prompts times n in one request
_MAX_STOPS, _MAX_STOP_IDS = 16, 128
_MAX_TOP = 20  # logprobs with each token
_SEEDS = 2**63

_UNUSED = (  # about the caller's account or caches
    "metadata parallel_tool_calls prompt_cache_key prompt_cache_options prompt_cache_retention request_id safety_identifier "
    "service_tier store user"
)
_NEVER = (
    "allowed_token_ids audio chat_template guided_choice guided_grammar guided_json guided_regex kv_transfer_params "
    "logits_processors mm_processor_kwargs moderation prediction prompt_embeds prompt_logprobs reasoning_effort "
    "truncate_prompt_tokens verbosity web_search_options"
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_UNUSED.split(), (...,)),
    **dict.fromkeys(_NEVER.split(), ()),
    "bad_words": ([],),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "priority": (0,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}
"""Parameters that are not used, and the values of each that request nothing; ... stands for any. With other values they would
change what is generated in a way this engine cannot."""


class CompletionRequest:
    """The body of `/v1/completions` or `/v1/chat/completions`, read and checked. Flags have the names of the parameters."""

    def __init__(self, body: Body, served: ServedModel, *, is_chat: bool) -> None:
        self.model: str = body.take("model", str, served.model_name)
        if self.model not in served.names:
            message = f"the model {shown(self.model)!r} is not served here; it is {' or '.join(map(repr, served.names))}"
            raise ApiError(404, message, param="model", code="model_not_found")
        self.held = served.adapters.get(self.model)
        self.is_chat = is_chat
        self.prompt_texts: list[str | None] = []  # as given, if they were text
        self.max_tool_calls = 0  # how many to parse out of a choice's text; with 0, all of it is content
        self.echo = False
        if is_chat:
            prompt, self.max_tool_calls = read_chat(body, served)
            self.prompts = [prompt]
            self.logprobs: bool = body.take("logprobs", bool, False)
            num_top = body.number("top_logprobs", 0, low=0, high=_MAX_TOP)
            if num_top and not self.logprobs:
                raise bad("top_logprobs", "is only for logprobs = true")
        else:
            self.prompts, self.prompt_texts = _prompts(body, served)
            self.echo = body.take("echo", bool, False)
            given = body.take("logprobs", int)
            self.logprobs, num_top = given is not None, given or 0
            if not 0 <= num_top <= _MAX_TOP:
                raise bad("logprobs", f"must be between 0 and {_MAX_TOP}")
            if self.echo and num_top > 1:
                raise unsupported("logprobs", "must be 0 or 1 with echo: of a prompt's tokens only their own logprob is known")
        self.num_choices = body.number("n", 1, low=1, high=MAX_CHOICES)  # per prompt
        if self.num_choices * len(self.prompts) > MAX_CHOICES:
            raise bad("n", f"{len(self.prompts)} prompts × {self.num_choices} choices: at most {MAX_CHOICES} in one request")
        if body.number("best_of", self.num_choices, low=1, high=MAX_CHOICES) != self.num_choices:
            raise unsupported("best_of", "is not supported by this server; ask for n choices")
        max_tokens = self._max_tokens(body, served)
        self.is_scored_only = max_tokens == 0  # only the prompt's logprobs are wanted
        self.ignore_eos: bool = body.take("ignore_eos", bool, False)
        most = min(max(1, max_tokens), served.context)
        self.sampling = _sampling(body, served, max_tokens=most, ignore_eos=self.ignore_eos)
        self.shaping = _shaping(body, served, num_top=num_top)
        self.grammar = read_grammar(body)
        if self.grammar is not None:
            self._check_grammar(self.grammar.param)
        self.stops = read_stops(body.take("stop"))
        has_options = body.has("stream_options")
        self.stream = body.take("stream", bool, False)
        if has_options and not self.stream:
            raise bad("stream_options", "is only for stream = true")
        self.include_usage = read_stream_options(body)
        self.return_token_ids: bool = body.take("return_token_ids", bool, False)
        self.return_tokens_as_token_ids: bool = body.take("return_tokens_as_token_ids", bool, False)
        self.include_stop_str_in_output: bool = body.take("include_stop_str_in_output", bool, False)
        hides_markers = self.max_tool_calls > 0 and has_special_markers(served.tokenizer)
        self.skip_special_tokens: bool = body.take("skip_special_tokens", bool, True) and not hides_markers
        body.end(NEUTRAL)

    def _max_tokens(self, body: Body, served: ServedModel) -> int:
        max_tokens = body.number("max_tokens", served.context if self.is_chat else 16, low=0, high=_SEEDS)
        max_tokens = body.number("max_completion_tokens", max_tokens, low=0, high=_SEEDS)
        if max_tokens == 0 and not self.echo:
            raise bad("max_tokens", "0 generates nothing; it is for echo, to score a prompt")
        name = "messages" if self.is_chat else "prompt"
        for length in map(len, self.prompts):
            if length == 0:
                raise bad(name, "is empty; it must come to at least one token")
            if length + min(max_tokens, 1) > served.context:
                message = f"the prompt has {length} tokens; the context is {served.context}, and one must be left to generate"
                raise ApiError(400, message, param=name, code="context_length_exceeded")
        return max_tokens

    def _check_grammar(self, param: str) -> None:
        """Only a stop token ends a grammar, so nothing may forbid or ignore one."""
        if self.max_tool_calls:
            raise unsupported(param, "is not supported together with tools; give tool_choice = none")
        if self.sampling.min_tokens:
            raise bad(param, "and min_tokens exclude each other: the grammar decides when an answer is complete")
        if self.ignore_eos:
            raise bad(param, "and ignore_eos exclude each other: a stop token ends what is complete")

    @property
    def is_shaped(self) -> bool:
        """Whether it asks for more than `Sampling` offers."""
        return self.shaping != Shaping()

    def sampling_of(self, prompt: tuple[int, ...], sibling: int, context: int) -> Sampling:
        """The sampling of one choice: its own seed, and as many tokens as the context has room for."""
        max_tokens = min(self.sampling.max_tokens, max(1, context - len(prompt)))  # a prompt that is only scored may fill it
        seed = (self.sampling.seed + sibling + _SEEDS) % (2 * _SEEDS) - _SEEDS
        min_tokens = min(self.sampling.min_tokens, max_tokens)
        return dataclasses.replace(self.sampling, max_tokens=max_tokens, min_tokens=min_tokens, seed=seed)


def _prompts(body: Body, served: ServedModel) -> tuple[list[tuple[int, ...]], list[str | None]]:
    """The tokens of each prompt, and its text if it was given as text."""
    value = body.take("prompt")
    add_special = body.take("add_special_tokens", bool, True)
    if value is None:
        raise bad("prompt", "is missing")
    if not isinstance(value, str | list) or value == []:
        raise bad("prompt", "must be text, token ids, or a list of either, and not empty")
    is_one = isinstance(value, str) or all(isinstance(entry, int) for entry in value)
    entries = [value] if is_one else value
    if len(entries) > MAX_CHOICES:
        raise bad("prompt", f"{len(entries)} prompts are more than {MAX_CHOICES} in one request")
    prompts = []
    for entry in entries:
        if isinstance(entry, str):
            prompts.append(encode_prompt(check(entry, str, "prompt"), "prompt", served, add_special=add_special))
        elif isinstance(entry, list):
            prompts.append(check_token_ids(entry, "prompt", vocabulary=served.vocabulary))
        else:
            raise bad("prompt", f"must be text, token ids, or a list of either; the list holds {kind_of(entry)}")
    return prompts, [entry if isinstance(entry, str) else None for entry in entries]


def _sampling(body: Body, served: ServedModel, *, max_tokens: int, ignore_eos: bool) -> Sampling:
    temperature = body.number("temperature", 1.0, low=0, high=100)
    if 0 < temperature < 0.01:
        raise bad("temperature", "must be 0, which is greedy, or at least 0.01")
    top_k = body.number("top_k", 0, low=-1, high=_SEEDS)
    given = body.take("stop_token_ids", list, [], "a list of token ids")
    if len(given) > _MAX_STOP_IDS:  # every step compares those of all slots
        raise bad("stop_token_ids", f"must be at most {_MAX_STOP_IDS} token ids")
    stop_ids = {*check_token_ids(given, "stop_token_ids", vocabulary=served.vocabulary)}
    if not ignore_eos:
        stop_ids |= set(served.stop_ids)
    min_tokens = body.number("min_tokens", 0, low=0, high=_SEEDS)
    if min_tokens > max_tokens:
        raise bad("min_tokens", f"must be at most max_tokens, which comes to {max_tokens}")
    try:
        return Sampling(
            temperature=temperature,
            top_k=0 if top_k == -1 else min(top_k, served.vocabulary),
            top_p=body.number("top_p", 1.0, low=0, high=1),
            min_p=body.number("min_p", 0.0, low=0, high=1),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_ids=tuple(sorted(stop_ids)),
            keep_mask=False,
            seed=body.number("seed", secrets.randbits(62), low=-_SEEDS, high=_SEEDS - 1),
        )
    except ValueError as error:  # "sampling.top_p = 0: must be in (0, 1]"
        message = str(error).removeprefix("sampling.")
        raise ApiError(400, message, param=message.split(" ")[0]) from error


def _shaping(body: Body, served: ServedModel, *, num_top: int) -> Shaping:
    bias: dict[int, float] = {}
    for token, value in body.take("logit_bias", dict, {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < served.vocabulary):
            raise bad("logit_bias", f"{shown(token)!r} is not a token id of the vocabulary of {served.vocabulary}")
        if not -100 <= check(value, float, "logit_bias", "numbers by token id") <= 100:
            raise bad("logit_bias", "must be between -100 and 100")
        bias[int(token)] = float(value)
    repetition = body.number("repetition_penalty", 1.0, low=0, high=100)
    if repetition < 0.01:
        raise bad("repetition_penalty", "must be at least 0.01; 1 changes nothing")
    return Shaping(
        logit_bias=tuple(bias.items()),
        repetition_penalty=repetition,
        frequency_penalty=body.number("frequency_penalty", 0.0, low=-2, high=2),
        presence_penalty=body.number("presence_penalty", 0.0, low=-2, high=2),
        top_logprobs=num_top,
    )


def read_stream_options(body: Body) -> bool:
    """Whether a stream's end tells the usage."""
    options = Body(body.take("stream_options", dict, {}))
    include_usage: bool = options.take("include_usage", bool, False)
    options.end({"include_obfuscation": (...,)}, within="stream_options")
    return include_usage


def read_stops(value: Any) -> tuple[str, ...]:  # noqa: ANN401
    """The parameter `stop`."""
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS:
        raise bad("stop", f"must be text or a list of at most {_MAX_STOPS} texts")
    if "" in stops:
        raise bad("stop", "an empty stop string would stop before anything is generated")
    return tuple(check(stop, str, "stop") for stop in stops)
