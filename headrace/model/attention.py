"""The attention hook: transformers calls `_hook`, which passes each layer's query, key and value to the context that came
with the forward pass. `make_context` makes the trainer's; the engine has its own over the paged cache.

In plain torch both compute with `attend`. In exact mode it goes over the keys in fixed blocks of 16 with an online softmax and
pads queries to multiples of 16, so that every row's bits are independent of the rest of the batch: see `docs/exactness.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

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
    layer = module.layer_idx
    assert isinstance(layer, int)
    return layer


def register() -> None:
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


class Layout(NamedTuple):
    """A pass as segments of rows, end to end. A row sees its segment up to itself and, in a branch, the whole prefix."""

    lengths: Sequence[int]  # of the segments: sequences that share nothing, prefixes, and branches that continue a prefix
    continues: Sequence[int]  # the segment that each one continues; -1 for none


def make_context(layout: Layout, device: torch.device, exact: bool) -> AttentionContext:
    """For one pass: kernels on a GPU, else plain torch. Exact mode shares no prefixes."""
    if device.type == "cuda" and not exact:
        from headrace.model.tree_attention import KernelContext

        return KernelContext(layout, device=device)
    return PackedContext(layout.lengths, continues=layout.continues, device=device, exact=exact)


class _Gather(NamedTuple):
    """Segments of similar shape that go through one call."""

    num_segments: int
    rows: Tensor  # [segments × width]: a shorter segment repeats its last row, whose results are dropped
    columns: Tensor
    """[segments × (prefix + width)]: the prefix is aligned right, against the segment's own rows, so that distances between
    columns are distances between positions."""
    allowed: Tensor | None  # [segments or 1, width, prefix + width]; None is causal


class PackedContext:
    """A `Layout` in plain torch, which the GPU kernels are checked against. Only attention pads segments, in a few groups of
    similar shape, so that one call serves many. The rest of the model never sees a padded token; no mask covers the pass."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        continues: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        exact: bool = False,
    ) -> None:
        self._lengths, self._exact, self._device = lengths, exact, device
        self._continues = [-1] * len(lengths) if continues is None else continues
        self._gathers: dict[int | None, tuple[list[_Gather], Tensor]] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        if spec.sliding_window not in self._gathers:
            self._gathers[spec.sliding_window] = self._gathered(spec.sliding_window)
        gathers, inverse = self._gathers[spec.sliding_window]
        results = []
        for count, rows, columns, allowed in gathers:
            q = query.index_select(0, rows).reshape(count, -1, *query.shape[1:])
            k, v = (tensor.index_select(0, columns).reshape(count, -1, *tensor.shape[1:]) for tensor in (key, value))
            results.append(attend(q, k, v, spec, allowed=allowed, exact=self._exact).flatten(0, 1))
        together = results[0] if len(results) == 1 else torch.cat(results)
        return together.index_select(0, inverse)

    def _gathered(self, window: int | None) -> tuple[list[_Gather], Tensor]:
        """The calls for one window, and where each row's result is. A branch gets only the prefix rows its first row sees."""
        lengths = torch.tensor(self._lengths)
        ends = lengths.cumsum(0)
        prefixes = [0 if prefix < 0 else self._lengths[prefix] for prefix in self._continues]
        if window is not None:
            prefixes = [min(prefix, window - 1) for prefix in prefixes]
        inverse = torch.empty(int(lengths.sum()), dtype=torch.long)
        gathers, offset = [], 0
        for group, width in _similar(self._lengths):
            for chosen, num_before in _similar([prefixes[member] for member in group]):
                members = [group[place] for place in chosen]
                length, end = lengths[members].unsqueeze(1), ends[members].unsqueeze(1)
                own = torch.arange(width)
                rows = end - length + torch.minimum(own, length - 1)
                is_real = own < length
                inverse[rows[is_real]] = torch.arange(offset, offset + rows.numel()).view(rows.shape)[is_real]
                offset += rows.numel()
                columns, allowed = rows, None
                if num_before:
                    seen = torch.tensor([prefixes[member] for member in members]).unsqueeze(1)
                    prefix_ends = ends[[self._continues[member] for member in members]].unsqueeze(1)
                    columns, allowed = _with_prefixes(rows, prefix_ends, seen, num_before=num_before, window=window)
                    allowed = allowed.to(self._device)
                rows, columns = (index.reshape(-1).to(self._device) for index in (rows, columns))
                gathers.append(_Gather(len(members), rows, columns, allowed))
        return gathers, inverse.to(self._device)


def _with_prefixes(
    rows: Tensor, prefix_ends: Tensor, seen: Tensor, *, num_before: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """Columns and mask of segments, [segments, width] rows, that see the last `seen` rows of their prefixes."""
    before = torch.arange(-num_before, 0)
    is_seen = -before <= seen
    columns = torch.cat([torch.where(is_seen, prefix_ends + before, 0), rows], dim=1)
    positions = torch.arange(columns.shape[1])
    allowed = causal(positions[num_before:], positions, window=window).unsqueeze(0)
    if not bool(is_seen.all()):
        allowed = allowed & F.pad(is_seen, (0, rows.shape[1]), value=True).unsqueeze(1)
    return columns, allowed


def _similar(lengths: Sequence[int]) -> list[tuple[list[int], int]]:
    """(members, width) of groups padded by at most a quarter of the width or 8 tokens, whichever is more."""
    groups: list[tuple[list[int], int]] = []
    for member in sorted(range(len(lengths)), key=lambda member: -lengths[member]):
        if groups and lengths[member] >= min(0.75 * groups[-1][1], groups[-1][1] - 8):
            groups[-1][0].append(member)
        else:
            groups.append(([member], lengths[member]))
    return groups
