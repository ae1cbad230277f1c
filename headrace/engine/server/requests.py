"""Reads requests from OpenAI's bodies with vLLM's additions; what the server cannot do is refused by name."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.engine.server.body import (
    ApiError,
    Body,
    bad,
    check_object,
    check_text,
    check_token_ids,
    kind_of,
    shown,
    unsupported,
)
from headrace.engine.server.chat import read_chat
from headrace.engine.server.text import encode_prompt
from headrace.engine.server.tools import has_special_markers
from headrace.records import Sampling

if TYPE_CHECKING:
    from headrace.engine.server.text import ServedModel

MAX_CHOICES = 1024  # prompts times n in one request
_MAX_STOPS = 16
_SEEDS = 2**63

_UNUSED = (
    "metadata parallel_tool_calls prompt_cache_key prompt_cache_options prompt_cache_retention request_id safety_identifier "
    "service_tier store user"
)
HARMLESS = frozenset(_UNUSED.split())  # about the caller's account or caches: accepted and not used
_NEVER = (
    "allowed_token_ids audio chat_template guided_choice guided_grammar guided_json guided_regex kv_transfer_params "
    "logits_processors mm_processor_kwargs moderation prediction prompt_embeds prompt_logprobs reasoning_effort "
    "structured_outputs truncate_prompt_tokens verbosity web_search_options"
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NEVER.split(), ()),
    "bad_words": ([],),
    "documents": ([],),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "priority": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}
"""Parameters that change what is generated in a way this engine cannot, and the values of each that request nothing."""


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """One request, read and checked."""

    is_chat: bool
    prompts: tuple[tuple[int, ...], ...]
    prompt_texts: tuple[str | None, ...]
    """As given, if they were text."""
    num_choices: int
    """Per prompt."""
    sampling: Sampling
    """Of choice 0; choice i adds i to the seed. `max_tokens` is lowered to each prompt's room in the context."""
    is_scored_only: bool
    """max_tokens was 0: only the prompt's logprobs are wanted."""
    stops: tuple[str, ...]
    include_stop: bool
    skip_special: bool
    echo: bool
    logprobs: bool
    return_token_ids: bool
    tokens_as_ids: bool
    stream: bool
    include_usage: bool
    max_tool_calls: int
    """How many tool calls to parse out of a choice's text; with 0, all of it is content."""

    def sampling_of(self, prompt: tuple[int, ...], sibling: int, context: int) -> Sampling:
        """The sampling of one choice."""
        max_tokens = min(self.sampling.max_tokens, context - len(prompt))
        seed = (self.sampling.seed + sibling + _SEEDS) % (2 * _SEEDS) - _SEEDS
        min_tokens = min(self.sampling.min_tokens, max_tokens)
        return dataclasses.replace(self.sampling, max_tokens=max_tokens, min_tokens=min_tokens, seed=seed)


def parse_completion(body: Body, served: ServedModel) -> CompletionRequest:
    """`POST /v1/completions`."""
    _check_model(body, served)
    texts = _prompts(body.take("prompt"))
    add_special = body.flag("add_special_tokens", True)
    prompts, given = [], []
    for text in texts:
        if isinstance(text, str):
            prompts.append(encode_prompt(text, "prompt", served, add_special=add_special))
        else:
            prompts.append(check_token_ids(text, "prompt", vocabulary=served.vocabulary))
        given.append(text if isinstance(text, str) else None)
    logprobs = body.take("logprobs")
    if logprobs is not None and (not isinstance(logprobs, int) or isinstance(logprobs, bool) or logprobs < 0):
        raise bad("logprobs", "must be 0 or 1")
    if logprobs is not None and logprobs > 1:
        raise unsupported("logprobs", "only the sampled token's logprob is recorded: give 0 or 1")
    return _ask(
        body,
        served,
        is_chat=False,
        prompts=tuple(prompts),
        prompt_texts=tuple(given),
        logprobs=logprobs is not None,
        echo=body.flag("echo", False),
        default_tokens=16,
        max_tool_calls=0,
    )


def parse_chat(body: Body, served: ServedModel) -> CompletionRequest:
    """`POST /v1/chat/completions`."""
    _check_model(body, served)
    prompt, max_tool_calls = read_chat(body, served)
    if body.whole("top_logprobs", 0, low=0, high=20):
        raise unsupported("top_logprobs", "only the sampled token's logprob is recorded: give 0")
    return _ask(
        body,
        served,
        is_chat=True,
        prompts=(prompt,),
        prompt_texts=(None,),
        logprobs=body.flag("logprobs", False),
        echo=False,
        default_tokens=served.context,
        max_tool_calls=max_tool_calls,
    )


def _ask(
    body: Body,
    served: ServedModel,
    *,
    is_chat: bool,
    prompts: tuple[tuple[int, ...], ...],
    prompt_texts: tuple[str | None, ...],
    logprobs: bool,
    echo: bool,
    default_tokens: int,
    max_tool_calls: int,
) -> CompletionRequest:
    """The fields that both endpoints share."""
    num_choices = body.whole("n", 1, low=1, high=MAX_CHOICES)
    if num_choices * len(prompts) > MAX_CHOICES:
        raise bad("n", f"{len(prompts)} prompts × {num_choices} choices are more than {MAX_CHOICES} in one request")
    if body.whole("best_of", num_choices, low=1, high=MAX_CHOICES) != num_choices:
        raise unsupported("best_of", "is not supported by this server; ask for n choices")
    max_tokens = body.whole("max_tokens", default_tokens, low=0, high=_SEEDS)
    max_tokens = body.whole("max_completion_tokens", max_tokens, low=0, high=_SEEDS)
    if max_tokens == 0 and not echo:
        raise bad("max_tokens", "0 generates nothing; it is for echo, to score a prompt")
    for prompt in prompts:
        _check_room(len(prompt), max_tokens, served, name="messages" if is_chat else "prompt")
    sampling = _sampling(body, served, max_tokens=min(max(1, max_tokens), served.context))
    stream = body.flag("stream", False)
    hides_markers = max_tool_calls > 0 and has_special_markers(served.tokenizer)
    ask = CompletionRequest(
        is_chat=is_chat,
        prompts=prompts,
        prompt_texts=prompt_texts,
        num_choices=num_choices,
        sampling=sampling,
        is_scored_only=max_tokens == 0,
        stops=_stops(body.take("stop")),
        include_stop=body.flag("include_stop_str_in_output", False),
        skip_special=body.flag("skip_special_tokens", True) and not hides_markers,
        echo=echo,
        logprobs=logprobs,
        return_token_ids=body.flag("return_token_ids", False),
        tokens_as_ids=body.flag("return_tokens_as_token_ids", False),
        stream=stream,
        include_usage=_include_usage(body.take("stream_options"), stream=stream),
        max_tool_calls=max_tool_calls,
    )
    body.end(harmless=HARMLESS, neutral=NEUTRAL)
    return ask


def _check_model(body: Body, served: ServedModel) -> None:
    name = body.take("model")
    if name is not None and not isinstance(name, str):
        raise bad("model", f"must be text, not {kind_of(name)}")
    if name is not None and name != served.model_name:
        message = f"the model {shown(name)!r} is not served here; it is {served.model_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _check_room(length: int, max_tokens: int, served: ServedModel, *, name: str) -> None:
    if length == 0:
        raise bad(name, "is empty; it must come to at least one token")
    if length + min(max_tokens, 1) > served.context:
        message = f"the prompt has {length} tokens; the context is {served.context}, and one must be left to generate"
        raise ApiError(400, message, param=name, code="context_length_exceeded")


def _sampling(body: Body, served: ServedModel, *, max_tokens: int) -> Sampling:
    temperature = body.number("temperature", 1.0, low=0.0, high=100.0)
    if 0 < temperature < 0.01:
        raise bad("temperature", "must be 0, which is greedy, or at least 0.01")
    top_k = body.whole("top_k", 0, low=-1, high=_SEEDS)
    stop_ids = set(body.token_ids("stop_token_ids", vocabulary=served.vocabulary))
    if not body.flag("ignore_eos", False):
        stop_ids |= set(served.stop_ids)
    min_tokens = body.whole("min_tokens", 0, low=0, high=_SEEDS)
    if min_tokens > max_tokens:
        raise bad("min_tokens", f"must be at most max_tokens, which comes to {max_tokens}")
    try:
        return Sampling(
            temperature=temperature,
            top_k=0 if top_k == -1 else min(top_k, served.vocabulary),
            top_p=body.number("top_p", 1.0, low=0.0, high=1.0),
            min_p=body.number("min_p", 0.0, low=0.0, high=1.0),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_ids=tuple(sorted(stop_ids)),
            seed=body.whole("seed", secrets.randbits(62), low=-_SEEDS, high=_SEEDS - 1),
        )
    except ValueError as error:  # "sampling.top_p = 0: must be in (0, 1]"
        name = str(error).removeprefix("sampling.").split(" ")[0]
        raise ApiError(400, str(error).removeprefix("sampling."), param=name) from error


def _prompts(value: Any) -> list[Any]:  # noqa: ANN401
    """One entry per prompt: text, or a list of token ids, not yet checked."""
    if value is None:
        raise bad("prompt", "is missing")
    if isinstance(value, str):
        return [check_text(value, "prompt")]
    if not isinstance(value, list) or not value:
        raise bad("prompt", "must be text, token ids, or a list of either, and not empty")
    if all(isinstance(entry, int) for entry in value):
        return [value]
    if len(value) > MAX_CHOICES:
        raise bad("prompt", f"{len(value)} prompts are more than {MAX_CHOICES} in one request")
    for entry in value:
        if not isinstance(entry, str | list):
            raise bad("prompt", f"must be text, token ids, or a list of either; the list holds {kind_of(entry)}")
    return [check_text(entry, "prompt") if isinstance(entry, str) else entry for entry in value]


def _stops(value: Any) -> tuple[str, ...]:  # noqa: ANN401
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS:
        raise bad("stop", f"must be text or a list of at most {_MAX_STOPS} texts")
    checked = tuple(check_text(stop, "stop") for stop in stops)
    if not all(checked):
        raise bad("stop", "an empty stop string would stop before anything is generated")
    return checked


def _include_usage(value: Any, *, stream: bool) -> bool:  # noqa: ANN401
    if value is None:
        return False
    if not stream:
        raise bad("stream_options", "is only for stream = true")
    options = Body(check_object(value, "stream_options"))
    wanted = options.flag("include_usage", False)
    options.end(harmless={"include_obfuscation"})
    return wanted
