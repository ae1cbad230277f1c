"""The attention hook: transformers calls `_hook`, which passes each layer's query, key and value to the context that came
with the forward pass. `PackedContext`, the trainer's, is here; the engine has its own over the paged cache.

Both compute with `attend`. In exact mode it goes over the keys in fixed blocks of 16 with an online softmax and pads queries
to multiples of 16, so that every row's bits are independent of the rest of the batch: see `docs/exactness.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

NAME = "headrace"
EXACT_ROWS = 16  # with a multiple of this many rows, a matrix product gives a row the same bits whatever their number


class AttentionError(ValueError):
    """A model uses an attention feature that this hook does not support."""


@dataclass(frozen=True)
class AttentionSpec:
    """A layer's attention parameters."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]: an extra logit that takes probability but has no value (GPT-OSS)


class AttentionContext(Protocol):
    """Passed to a forward pass as the keyword `attention_context`."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Called by each layer's attention module with [tokens, heads, dim]; returns [tokens, heads, value dim]."""


_HARMLESS = {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}


def _hook(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    attention_context: AttentionContext | None = None,
    **other: object,
) -> tuple[Tensor, None]:
    if attention_context is None:
        raise AttentionError("a Headrace model is called with attention_context=…")
    unknown = [name for name, given in other.items() if given is not None and name not in _HARMLESS]
    if unknown or attention_mask is not None or dropout or is_causal is False:
        what = ", ".join(unknown) or "a mask, dropout or non-causal attention"
        raise AttentionError(f"{type(module).__name__} asks its attention for {what}, which Headrace does not serve")
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    spec = AttentionSpec(scaling=scale, sliding_window=sliding_window, softcap=softcap, sinks=s_aux)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attention_context.attend(module, q, k, v, spec).unsqueeze(0), None


def layer_of(module: nn.Module) -> int:
    """The index of an attention module's decoder layer."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    return layer


def register() -> None:
    """Register the hook with transformers; may be repeated."""
    AttentionInterface.register(NAME, _hook)


def attend(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, *, allowed: Tensor | None, exact: bool = False
) -> Tensor:
    """Attention of [batch, rows, heads, dim] queries over [batch, keys, kv_heads, dim], in the queries' layout. `allowed`
    [batch, rows, keys] says which keys a row sees; None is causal with rows and keys aligned."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if allowed is None and (exact or spec.softcap is not None or spec.sinks is not None or spec.sliding_window is not None):
        positions = torch.arange(key.shape[2], device=key.device)
        allowed = causal(positions[: query.shape[2]], positions, window=spec.sliding_window).unsqueeze(0)
    if exact:
        assert allowed is not None
        result = _attend_exact(query, key, value, spec, allowed=allowed.unsqueeze(1))
    elif spec.softcap is None and spec.sinks is None:
        result = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if allowed is None else allowed.unsqueeze(1),
            is_causal=allowed is None,
            scale=spec.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    else:
        assert allowed is not None
        result = _attend_plain(query, key, value, spec, allowed=allowed.unsqueeze(1))
    return result.transpose(1, 2)


def causal(rows: Tensor, keys: Tensor, *, window: int | None) -> Tensor:
    """[..., rows, keys] bool: which key positions each row position sees."""
    distance = rows.unsqueeze(-1) - keys
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _grouped(tensor: Tensor, heads: int) -> Tensor:
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _scores(query: Tensor, key: Tensor, spec: AttentionSpec) -> Tensor:
    scores = (query @ key.transpose(-1, -2)) * spec.scaling
    return scores if spec.softcap is None else torch.tanh(scores / spec.softcap) * spec.softcap


def _attend_plain(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, *, allowed: Tensor) -> Tensor:
    heads = query.shape[1]
    scores = _scores(query, _grouped(key, heads), spec).masked_fill(~allowed, float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks.reshape(1, heads, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
        probabilities = torch.softmax(torch.cat([scores, sinks], dim=-1).float(), dim=-1)[..., :-1]
    else:
        probabilities = torch.softmax(scores.float(), dim=-1)
    return probabilities.to(value.dtype) @ _grouped(value, heads)


def _attend_exact(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, *, allowed: Tensor) -> Tensor:
    """Online softmax over fixed blocks of keys. One in which a row sees nothing leaves its bits alone: padding is harmless."""
    rows, heads, block = query.shape[2], query.shape[1], EXACT_ROWS
    query = F.pad(query, (0, 0, 0, -rows % block))
    allowed = F.pad(allowed, (0, -key.shape[2] % block, 0, -rows % block))
    key, value = (F.pad(_grouped(tensor, heads), (0, 0, 0, -tensor.shape[2] % block)) for tensor in (key, value))
    if spec.sinks is None:
        top = query.new_full((*query.shape[:3], 1), -1e30)
        total = torch.zeros_like(top)
    else:
        top = spec.sinks.reshape(1, heads, 1, 1).expand(*query.shape[:3], 1).to(query.dtype)
        total = torch.ones_like(top)
    result = query.new_zeros((*query.shape[:3], value.shape[-1]))
    for start in range(0, key.shape[2], block):
        span = slice(start, start + block)
        scores = _scores(query, key[:, :, span], spec).masked_fill(~allowed[..., span], -1e30)
        higher = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        kept = torch.exp(top - higher)
        shares = torch.exp(scores - higher).masked_fill(~allowed[..., span], 0.0)
        total = total * kept + shares.sum(dim=-1, keepdim=True)
        result = result * kept + shares @ value[:, :, span]
        top = higher
    return (result / total.clamp_min(1e-30))[:, :, :rows]


class PackedContext:
    """Sequences packed end to end; each attends within itself. Only attention pads them, in a few groups of similar length, so
    that one call serves many; the rest of the model never sees a padded token."""

    def __init__(self, lengths: Sequence[int], *, device: torch.device | str = "cpu", exact: bool = False) -> None:
        self.exact = exact
        self._gathers: list[tuple[Tensor, int, int]] = []
        starts = torch.tensor([0, *lengths]).cumsum(0)
        inverse = torch.empty(int(starts[-1]), dtype=torch.long)
        offset = 0
        for members, width in similar(lengths):
            begin = starts[members].unsqueeze(1)
            limit = torch.tensor([lengths[member] for member in members]).unsqueeze(1)
            columns = torch.arange(width).unsqueeze(0)
            index = begin + torch.minimum(columns, limit - 1)
            flat = offset + torch.arange(len(members) * width).reshape(len(members), width)
            is_real = columns < limit
            inverse[index[is_real]] = flat[is_real]
            self._gathers.append((index.reshape(-1).to(device), len(members), width))
            offset += len(members) * width
        self._inverse = inverse.to(device)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        results = []
        for index, count, width in self._gathers:
            q, k, v = (t.index_select(0, index).reshape(count, width, *t.shape[1:]) for t in (query, key, value))
            result = attend(q, k, v, spec, allowed=None, exact=self.exact)
            results.append(result.reshape(count * width, *result.shape[2:]))
        together = results[0] if len(results) == 1 else torch.cat(results)
        return together.index_select(0, self._inverse)


def similar(lengths: Sequence[int]) -> list[tuple[list[int], int]]:
    """(members, width) of groups padded by at most a quarter of the width or 8 tokens, whichever is more."""
    groups: list[tuple[list[int], int]] = []
    order = sorted(range(len(lengths)), key=lambda member: -lengths[member])
    for member in order:
        if groups and lengths[member] >= min(0.75 * groups[-1][1], groups[-1][1] - 8):
            groups[-1][0].append(member)
        else:
            groups.append(([member], lengths[member]))
    return groups
