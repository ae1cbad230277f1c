"""torch, the GPU, and the model by its config and tokenizer alone; no weights are read."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from headrace.envs import PromptEncoder
from headrace.launch import (
    UserInputs,
    check_columns,
    check_engine,
    check_loss,
    check_sync,
    choose_device,
    longest_prompt,
    special_stops,
    stop_tokens,
)
from headrace.model import ModelError, ModelShape, config_limit, load_config, load_generation, load_tokenizer, tiny
from headrace.plan.doctor.finding import Finding, problem, size
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

    from headrace.plan.doctor.finding import Check, Subject

QUESTION = {"role": "user", "content": "What is two and two?"}
ANSWERS = ("Four.", "<think>\nTwo and two.\n</think>\n\nFour.")
"""What templates do to history often depends on whether there is reasoning in it."""


def check_libraries(subject: Subject) -> Iterator[Finding]:
    place = "CPU only" if not torch.cuda.is_available() else f"CUDA {torch.version.cuda}"
    described = {"torch": f"torch {torch.__version__}, {place} ({os.cpu_count()} cores)"}
    described["transformers"] = f"transformers {transformers.__version__}"
    least = _least_versions()
    for name, what in described.items():
        found = getattr({"torch": torch, "transformers": transformers}[name], "__version__", "0")
        if _numbers(found) < _numbers(least.get(name, "0")):
            yield Finding("problem", f"{what}, older than {least[name]}", f"pip install '{name}>={least[name]}'")
        else:
            yield Finding("ok", what)


def _least_versions() -> dict[str, str]:
    """What the installed package says it needs."""
    try:
        needed = importlib.metadata.requires("headrace") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    pairs = (re.match(r"([\w-]+)>=([\d.]+)$", line) for line in needed)
    return {pair[1]: pair[2] for pair in pairs if pair is not None}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def check_device(subject: Subject) -> Iterator[Finding]:
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Finding("ok", f"GPU {index}: {properties.name}, {size(properties.total_memory)}")
    if subject.recipe is not None:
        try:
            choose_device(subject.recipe)
            check_sync(subject.recipe)
            check_engine(subject.recipe)
            check_loss(subject.recipe)
            check_columns(subject.recipe, UserInputs())
        except ConfigError as error:
            yield problem(error, otherwise="mend that setting in the recipe")


def check_model(subject: Subject) -> Iterator[Finding]:
    if subject.recipe is None:
        return
    settings, path = subject.recipe.model, subject.recipe.model.path
    if path.startswith("builtin:") and path != tiny.NAME:
        yield Finding("problem", f"model.path = {path!r}: there is no such model", f"the built-in model is {tiny.NAME!r}")
        return
    try:
        config = tiny.build_config(settings, tiny.build_tokenizer()) if path == tiny.NAME else load_config(path)
        subject.context = config_limit(config, settings.context)
        subject.shape = ModelShape.of(config)
        subject.num_parameters = _count_parameters(path, config)
    except ModelError as error:
        yield problem(error, fix="name a folder or hub model of a decoder with full or sliding attention in model.path")
        return
    count = f"{subject.num_parameters / 1e6:,.2f} million parameters, {size(subject.weight_bytes)} in {settings.dtype}"
    yield Finding("ok", f"model {path} ({config.get_text_config().model_type}): {count}, context {subject.context}")


def _count_parameters(path: str, config: Any) -> int:  # noqa: ANN401  (transformers' configs share no typed surface)
    """From the headers of the safetensors files where there are any, or else from the model's shape."""
    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []
    if files:
        return sum(_elements(file) for file in files)
    if Path(path).is_dir() and not list(Path(path).glob("*.bin")):
        raise ModelError(f"model.path = {path!r}: there are no weights in the folder")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def _elements(file: Path) -> int:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > file.stat().st_size:
            raise ModelError(f"{file}: not a whole safetensors file")
        header: dict[str, Any] = json.loads(opened.read(length))
    total = 0
    for name, entry in header.items():
        if name != "__metadata__":
            elements = 1
            for extent in entry["shape"]:
                elements *= extent
            total += elements
    return total


def check_tokenizer(subject: Subject) -> Iterator[Finding]:
    if subject.recipe is None:
        return
    path, generation = subject.recipe.model.path, None
    if path.startswith("builtin:"):
        tokenizer: PreTrainedTokenizerBase = tiny.build_tokenizer()
    else:
        try:
            tokenizer, generation = load_tokenizer(path), load_generation(path)
        except ModelError as error:
            yield problem(error, fix="put the tokenizer's files beside the weights")
            return
    subject.tokenizer = tokenizer
    try:
        stops = {*stop_tokens(generation, tokenizer), *special_stops(subject.recipe.sampling.stop, tokenizer)}
    except ConfigError as error:
        yield problem(error)
        return
    if not stops:
        fix = "name an eos_token in tokenizer_config.json: rollouts would end at sampling.max_tokens only"
        yield Finding("warning", "tokenizer: has no end token", fix)
    else:
        ends = " or ".join(tokenizer.convert_ids_to_tokens(sorted(stops)))
        yield Finding("ok", f"tokenizer: {len(tokenizer)} tokens, a turn ends with {ends}")


def check_template(subject: Subject) -> Iterator[Finding]:
    tokenizer = subject.tokenizer
    if tokenizer is None:
        return
    if tokenizer.chat_template is None:
        if any(isinstance(row["prompt"], list) for row in subject.rows):
            fix = "give prompts as text, or take a model whose tokenizer has a template"
            yield Finding("problem", "chat template: there is none, and prompts are chat messages", fix)
        else:
            yield Finding("ok", "chat template: none, and prompts are text")
        return
    for answer in ANSWERS:
        rewritten = rewritten_at(tokenizer, answer)
        if rewritten is not None:
            what = (
                f"chat template: rewrites what came before when a turn is added ({rewritten}); multi-turn rollouts fork there"
            )
            yield Finding(
                "warning", what, "single-turn runs are as they should be; for several turns take an appending template"
            )
            return
    yield Finding("ok", "chat template: only appends, turn after turn")


def rewritten_at(tokenizer: PreTrainedTokenizerBase, answer: str) -> str | None:
    """Where a longer conversation is not rendered as the shorter one and more; None where it always is."""
    turns = [QUESTION, {"role": "assistant", "content": answer}, {"role": "user", "content": "And three?"}]
    before = ""
    for length in (1, 2, 3):
        try:
            rendered = str(
                tokenizer.apply_chat_template(
                    turns[:length], tokenize=False, add_generation_prompt=turns[length - 1]["role"] == "user"
                )
            )
        except Exception as error:  # noqa: BLE001  (a template can raise anything; it is the model's, not ours)
            return f"rendering {length} turns raises {type(error).__name__}: {error}"
        if not rendered.startswith(before):
            common = next(i for i in range(len(before) + 1) if before[: i + 1] != rendered[: i + 1])
            return f"with {length} turns, {before[common : common + 24]!r} becomes {rendered[common : common + 24]!r}"
        before = rendered
    return None


def check_prompts(subject: Subject) -> Iterator[Finding]:
    recipe, tokenizer = subject.recipe, subject.tokenizer
    if recipe is None or tokenizer is None or not subject.rows or not subject.context:
        return
    encoder = PromptEncoder(tokenizer)
    subject.longest_prompt = longest_prompt(subject.rows, encoder, held_out=subject.held_out_rows)
    try:
        lengths = [len(encoder.encode(row["prompt"])) for row in subject.rows]
    except ConfigError:  # no template; said above
        return
    longest = max(lengths)
    count, room = len(lengths), subject.context - recipe.sampling.max_tokens
    sizes = f"context {subject.context}, max_tokens {recipe.sampling.max_tokens}"
    what = f"prompts: {longest} tokens at most in the first {count}; {sizes}"
    too_long = sum(length >= subject.context for length in lengths)
    if too_long:
        fix = f"raise model.context to {longest + recipe.sampling.max_tokens} if the model allows it, or shorten the prompts"
        yield Finding("problem" if too_long == count else "warning", f"{what}; {too_long} of {count} do not fit", fix)
    elif longest > room:
        cut = sum(length > room for length in lengths)
        fix = f"raise model.context to {longest + recipe.sampling.max_tokens}, or lower sampling.max_tokens"
        yield Finding("warning", f"{what}; completions to {cut} of {count} are cut short", fix)
    else:
        yield Finding("ok", what)


CHECKS: tuple[Check, ...] = (
    check_libraries,
    check_device,
    check_model,
    check_tokenizer,
    check_template,
    check_prompts,
)
