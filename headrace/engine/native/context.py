"""The attention of one engine step: rows of new prompts, then one row for each rollout being decoded, then padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.model.attention import AttentionSpec, PackedContext, attend, causal

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.engine.native.cache import PagedCache


@dataclass(frozen=True)
class DecodeRows:
    """Rollouts that add one token each."""

    positions: Tensor
    """[rows] of the new token in its rollout."""
    places: Tensor
    """[rows, keys] flat cache places of all tokens up to it, padded to whole blocks."""


class StepContext:
    """Writes the step's keys and values, then attends: prompts within themselves, decoded rows over the cache."""

    def __init__(
        self,
        cache: PagedCache,
        *,
        places: Tensor,
        prompt_lengths: list[int],
        decode: DecodeRows | None,
        device: torch.device,
        exact: bool,
    ) -> None:
        self._cache = cache
        self._places = places
        self._num_prompt_rows = sum(prompt_lengths)
        self._prompts = PackedContext(prompt_lengths, device=device, exact=exact) if prompt_lengths else None
        self._decode = decode
        self._exact = exact
        self._allowed: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        self._cache.write(layer, self._places, key, value)
        split, parts = self._num_prompt_rows, []
        if self._prompts is not None:
            parts.append(self._prompts.attend(layer, query[:split], key[:split], value[:split], spec))
        if self._decode is not None:
            rows = slice(split, split + len(self._decode.positions))
            keys, values = self._cache.read(layer, self._decode.places)
            allowed = self._visible(self._decode, spec.sliding_window)
            parts.append(attend(query[rows].unsqueeze(1), keys, values, spec, allowed=allowed, exact=self._exact).squeeze(1))
        done = sum(len(part) for part in parts)
        if done < len(query):
            parts.append(query.new_zeros(len(query) - done, query.shape[1], value.shape[2]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _visible(self, decode: DecodeRows, window: int | None) -> Tensor:
        if window not in self._allowed:
            keys = torch.arange(decode.places.shape[1], device=decode.places.device)
            self._allowed[window] = causal(decode.positions.unsqueeze(1), keys, window=window)
        return self._allowed[window]
