"""Which experts processed each token of a rollout: row t is the forward pass of token t. The last token has not been through
the model yet, so its row is unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.records.validate import grown

if TYPE_CHECKING:
    import numpy.typing as npt

    from headrace.records.validate import Array

_UNKNOWN = {np.dtype(np.uint8): 255, np.dtype(np.int16): -1}


def unknown_expert(dtype: npt.DTypeLike) -> int:
    """The value of an unknown expert: 255 in uint8, -1 in int16."""
    if np.dtype(dtype) not in _UNKNOWN:
        raise ValueError(f"expert_routing must be of uint8 or int16, not {np.dtype(dtype)}")
    return _UNKNOWN[np.dtype(dtype)]


def unknown_routing(num_tokens: int, *, num_layers: int, top_k: int, dtype: npt.DTypeLike) -> Array:
    """[tokens, layers, top_k], all unknown; writable."""
    return np.full((num_tokens, num_layers, top_k), unknown_expert(dtype), dtype=dtype)


def check_routing(routing: Array, *, num_tokens: int) -> None:
    """Raise unless it has a valid dtype and shape with `num_tokens` rows."""
    if routing.dtype not in _UNKNOWN or routing.ndim != 3:
        raise ValueError("expert_routing must be [T, layers, top_k] of uint8 or int16")
    if len(routing) != num_tokens:
        raise ValueError(f"expert_routing has shape {routing.shape} but there are {num_tokens} tokens")


def cut_routing(routing: Array, *, at: int) -> Array:
    """The routing of the first `at` tokens. The last of them will go through the model again, so its row is unknown."""
    cut = routing[:at].copy()
    cut[-1:] = unknown_expert(cut.dtype)
    cut.flags.writeable = False
    return cut


def merge_routing(old: Array | None, new: Array | None, *, num_tokens: int) -> Array | None:
    """The routing of a rollout extended to `num_tokens`: the engine's new rows, or the old ones where the engine computed none
    (such as a prefix computed by another engine). New rows win, because the new tokens were sampled from that forward pass."""
    if new is None:
        if old is None:
            return None
        return grown(old, unknown_routing(num_tokens - len(old), num_layers=old.shape[1], top_k=old.shape[2], dtype=old.dtype))
    check_routing(new, num_tokens=num_tokens)
    merged = new.copy()
    if old is not None:
        if (old.dtype, old.shape[1:]) != (new.dtype, new.shape[1:]):
            rows, before = f"{new.shape[1:]} {new.dtype}", f"{old.shape[1:]} {old.dtype}"
            raise ValueError(f"expert_routing has rows of {rows} but those before are of {before}")
        known = merged[: len(old)]
        np.copyto(known, old, where=known == unknown_expert(old.dtype))
    merged.flags.writeable = False
    return merged
