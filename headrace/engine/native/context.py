"""The attention of one step in plain torch: whole prompts, then chunks that see something cached, then one row for each
rollout that decodes, then padding. Slow and obvious: what the GPU's kernels are held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.model import AttentionSpec, PackedContext, attend, causal, layer_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headrace.engine.native.cache import PagedCache


@dataclass(frozen=True)
class CachedRows:
    """Rows that attend to what is cached, `batch` rollouts with as many rows each."""

    positions: Tensor
    """[batch, rows] of the tokens in their rollouts."""
    places: Tensor
    """[batch, keys] flat cache places of all tokens up to the last, padded to whole blocks with the place of the first."""


class StepContext:
    """Writes the step's keys and values, then attends."""

    def __init__(
        self,
        cache: PagedCache,
        *,
        places: Tensor,
        prompt_lengths: list[int],
        cached: list[CachedRows],
        device: torch.device,
        exact: bool,
    ) -> None:
        self._cache = cache
        self.places = places
        self._num_prompt_rows = sum(prompt_lengths)
        self._prompts = PackedContext(prompt_lengths, device=device, exact=exact) if prompt_lengths else None
        self._cached = cached
        self._exact = exact
        self._allowed: dict[tuple[int, int | None], Tensor] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        layer = layer_of(module)
        self._cache.write(layer, self.places, key, value)
        done, parts = self._num_prompt_rows, []
        if self._prompts is not None:
            parts.append(self._prompts.attend(module, query[:done], key[:done], value[:done], spec))
        for which, rows in enumerate(self._cached):
            batch, each = rows.positions.shape
            keys, values = self._cache.read(layer, rows.places)
            queries = query[done : done + batch * each].reshape(batch, each, *query.shape[1:])
            result = attend(queries, keys, values, spec, allowed=self._visible(which, spec.sliding_window), exact=self._exact)
            parts.append(result.reshape(batch * each, *result.shape[2:]))
            done += batch * each
        if done < len(query):
            parts.append(query.new_zeros(len(query) - done, query.shape[1], value.shape[2]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _visible(self, which: int, window: int | None) -> Tensor:
        if (which, window) not in self._allowed:
            rows = self._cached[which]
            keys = torch.arange(rows.places.shape[1], device=rows.places.device)
            self._allowed[which, window] = causal(rows.positions, keys, window=window)
        return self._allowed[which, window]
