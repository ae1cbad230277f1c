"""Checks of torch, the GPU and the model. They read its config, tokenizer and safetensors headers, but no weights."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from transformers.utils.versions import require_version

from headrace.engine import stop_tokens
from headrace.envs import PromptEncoder
from headrace.launch import UserInputs, check_settings, count_parameters, describe_adapter, longest_prompt, special_stops
from headrace.lora import AdapterError, base_of
from headrace.model import (
    ModelError,
    ModelShape,
    adapter_shapes,
    config_limit,
    lacks_safetensors,
    load_config,
    load_generation,
    load_tokenizer,
    set_template,
    tiny,
)
from headrace.plan.doctor import Finding, check, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

    from headrace.config import Recipe
    from headrace.plan.doctor import Check, Subject
    from headrace.records import Plain

QUESTION = {"role": "user", "content": "What is two and two?"}
ANSWERS = ("Four.", "<think>\nTwo and two.\n</think>\n\nFour.")
"""Chat templates often treat past answers with reasoning differently."""


@check()
def check_libraries(subject: Subject) -> Iterator[Finding]:
    place = "CPU only" if not torch.cuda.is_available() else f"CUDA {torch.version.cuda}"
    yield Finding("ok", f"torch {torch.__version__}, {place} ({os.cpu_count()} cores)")
    yield Finding("ok", f"transformers {transformers.__version__}")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # run from a checkout that is not installed
        for needed in importlib.metadata.requires("headrace") or []:
            if needed.startswith(("torch>", "transformers>")):
                try:
                    require_version(needed)
                except ImportError as error:
                    yield Finding("problem", str(error).splitlines()[0], f"pip install '{needed}'")


@check(fix="correct that setting in the recipe")
def check_device(subject: Subject) -> Iterator[Finding]:
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Finding("ok", f"GPU {index}: {properties.name}, {size(properties.total_memory)}")
    if subject.recipe is not None:
        check_settings(subject.recipe, UserInputs())


@check("recipe")
def check_model(subject: Subject, recipe: Recipe) -> Iterator[Finding]:
    settings, path = recipe.model, recipe.model.path
    if path.startswith("builtin:") and path != tiny.NAME:
        yield Finding("problem", f"model.path = {path!r}: there is no such model", f"the built-in model is {tiny.NAME!r}")
        return
    try:
        config = tiny.build_config(settings, tiny.build_tokenizer()) if path == tiny.NAME else load_config(path)
        subject.context = config_limit(config, settings.context)
        subject.shape = ModelShape.of(config)
        path = base_of(path) or path
        subject.num_parameters = count_parameters(Path(path)) or _count_in_config(path, config)
    except ModelError as error:
        fix = "name a folder or hub model of a decoder with full or sliding attention in model.path"
        yield Finding("problem", str(error), fix)
        return
    count = f"{subject.num_parameters / 1e6:,.2f} million parameters, {size(subject.weight_bytes)} in {settings.dtype}"
    yield Finding("ok", f"model {path} ({config.get_text_config().model_type}): {count}, context {subject.context}")
    if recipe.lora.is_on and recipe.steps:
        try:
            subject.adapter = sum(map(math.prod, adapter_shapes(settings, recipe.lora).values()))
            yield Finding("ok", " ".join(describe_adapter(recipe).split()))
        except AdapterError as error:
            subject.shape = None  # nothing can be predicted
            yield Finding("problem", str(error), "name linear layers of the model in lora.targets, or 'all'")


def _count_in_config(path: str, config: Any) -> int:  # noqa: ANN401  (transformers' configs share no typed surface)
    """The parameters of a model that is not on disk."""
    if Path(path).is_dir():
        raise lacks_safetensors(path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@check("recipe", fix="name a folder in model.path that has the tokenizer's files beside the weights")
def check_tokenizer(subject: Subject, recipe: Recipe) -> Iterator[Finding]:
    path, is_builtin = recipe.model.path, recipe.model.path.startswith("builtin:")
    tokenizer = subject.tokenizer = tiny.build_tokenizer() if is_builtin else load_tokenizer(path)
    set_template(tokenizer, recipe.model)
    generation = None if is_builtin else load_generation(path)
    stops = {*stop_tokens(generation, tokenizer), *special_stops(recipe.sampling.stop, tokenizer)}
    if stops:
        ends = " or ".join(tokenizer.convert_ids_to_tokens(sorted(stops)))
        yield Finding("ok", f"tokenizer: {len(tokenizer)} tokens, a turn ends with {ends}")
    else:
        fix = "name an eos_token in tokenizer_config.json: rollouts would end at sampling.max_tokens only"
        yield Finding("warning", "tokenizer: has no end token", fix)


@check("tokenizer")
def check_template(subject: Subject, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    if tokenizer.chat_template is None:
        if any(isinstance(row["prompt"], list) for row in subject.rows):
            fix = "give prompts as text, or take a model whose tokenizer has a template"
            yield Finding("problem", "chat template: there is none, and prompts are chat messages", fix)
        else:
            yield Finding("ok", "chat template: none, and prompts are text")
        return
    for answer in ANSWERS:
        rewritten = first_rewrite(tokenizer, answer)
        if rewritten is not None:
            what = f"chat template: rewrites history when a turn is added ({rewritten}); multi-turn rollouts fork there"
            yield Finding("warning", what, "single-turn runs are not affected; for several turns use an appending template")
            return
    yield Finding("ok", "chat template: only appends, turn after turn")


def first_rewrite(tokenizer: PreTrainedTokenizerBase, answer: str) -> str | None:
    """Where adding a turn changes how the earlier ones are rendered; None if the template only appends."""
    turns = [QUESTION, {"role": "assistant", "content": answer}, {"role": "user", "content": "And three?"}]
    before = ""
    for length in (1, 2, 3):
        is_question = turns[length - 1]["role"] == "user"
        try:
            text = str(tokenizer.apply_chat_template(turns[:length], tokenize=False, add_generation_prompt=is_question))
        except Exception as error:  # noqa: BLE001  (the model's template can raise anything)
            return f"rendering {length} turns raises {type(error).__name__}: {error}"
        if not text.startswith(before):
            same = next(i for i in range(len(before) + 1) if before[: i + 1] != text[: i + 1])
            return f"with {length} turns, {before[same : same + 24]!r} becomes {text[same : same + 24]!r}"
        before = text
    return None


@check("recipe", "tokenizer", "rows", "context")
def check_prompts(
    subject: Subject, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, Plain]], context: int
) -> Iterator[Finding]:
    encoder = PromptEncoder(tokenizer)
    subject.longest_prompt = longest_prompt(rows, encoder, held_out=subject.held_out_rows)
    if tokenizer.chat_template is None and any(isinstance(row["prompt"], list) for row in rows):
        return  # reported above
    lengths = [len(encoder.encode(row["prompt"])) for row in rows]
    longest, count, max_tokens = max(lengths), len(lengths), recipe.sampling.max_tokens
    what = f"prompts: {longest} tokens at most in the first {count}; context {context}, max_tokens {max_tokens}"
    too_long = sum(length >= context for length in lengths)
    cut_short = sum(length > context - max_tokens for length in lengths)
    fix = f"raise model.context to {longest + max_tokens}"
    if too_long:
        level: Literal["problem", "warning"] = "problem" if too_long == count else "warning"
        yield Finding(
            level, f"{what}; {too_long} of {count} do not fit", f"{fix} if the model allows it, or shorten the prompts"
        )
    elif cut_short:
        what = f"{what}; completions to {cut_short} of {count} are cut short"
        yield Finding("warning", what, f"{fix}, or lower sampling.max_tokens")
    else:
        yield Finding("ok", what)


CHECKS: tuple[Check, ...] = (check_libraries, check_device, check_model, check_tokenizer, check_template, check_prompts)
