"""The reward that a reward model gives: a transformers model with a head for sequence classification."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.score.signature import RewardError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_WHERE = "reward.options.reward_model"


def reward_model(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    path: str,
    device: str = "cpu",
    dtype: str = "auto",
    batch_tokens: int = 16_384,
    label: int = 0,
) -> list[float]:
    """The model's logit of `label` for each prompt with its completion, as its chat template writes them, or one after the
    other if it has none. They are scored in batches of at most `batch_tokens`, padding included; of what is longer than the
    model's context the end is scored."""
    model, tokenizer = _loaded(path, device, dtype)
    num_labels = model.config.num_labels or 0
    if not 0 <= label < num_labels:
        raise RewardError(f"{_WHERE}.label = {label}: {path} has the labels 0 to {num_labels - 1}")
    context = getattr(model.config, "max_position_embeddings", None) or 1 << 30
    rows = [_encoded(tokenizer, *pair)[-context:] for pair in zip(prompts, completions, strict=True)]
    scores = [0.0] * len(rows)
    for batch in _batches([len(row) for row in rows], most=batch_tokens):
        for place, score in zip(batch, _scores(model, [rows[place] for place in batch], label=label), strict=True):
            scores[place] = score
    return scores


def _scores(model: PreTrainedModel, rows: list[list[int]], *, label: int) -> list[float]:
    import torch

    longest, pad = max(map(len, rows)), model.config.pad_token_id
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=model.device)
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
    found: list[float] = logits[:, label].float().tolist()
    return found


def _batches(lengths: list[int], *, most: int) -> list[list[int]]:
    """Which rows to score together: of like length, and at most so many tokens with padding."""
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches and (len(batches[-1]) + 1) * lengths[place] <= most:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def _encoded(tokenizer: PreTrainedTokenizerBase, prompt: Any, completion: Any) -> list[int]:  # noqa: ANN401
    """Token ids; texts if the prompt is one, else messages."""
    if tokenizer.chat_template is None:
        text = prompt + completion if isinstance(prompt, str) else "\n".join(each["content"] for each in [*prompt, *completion])
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids or [tokenizer.eos_token_id or 0]
    if isinstance(prompt, str):
        prompt, completion = [{"role": "user", "content": prompt}], [{"role": "assistant", "content": completion}]
    text = tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has written them
    return ids


@functools.lru_cache(maxsize=2)
def _loaded(path: str, device: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loaded once in a process. Code and pickles that come with a model are refused."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if not Path(path).is_dir():
        raise RewardError(f"{_WHERE}.path = {path!r}: no such folder (paths are relative to {Path.cwd()})")
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model = model.to(device).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise RewardError(f"{_WHERE}.path = {path!r}: cannot be loaded for sequence classification: {error}") from error
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise RewardError(f"{_WHERE}.path = {path!r}: is no trained reward model: it has no weights for {missing}")
    if model.config.pad_token_id is None:
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        model.config.pad_token_id = 0 if pad is None else pad
    return model, tokenizer
