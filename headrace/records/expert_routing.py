"""Which experts each token of a rollout went through: the form it has in a record, and how it grows and is cut with it.

Row t is the forward pass of token t, so the row of the last token, which no pass has taken yet, is unknown. Everyone
takes `unknown_expert` and `unknown_routing` from `headrace.records`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from headrace.records.validate import Array

_UNKNOWN = {np.dtype(np.uint8): 255, np.dtype(np.int16): -1}
"""By the dtypes a routing may have: what stands where the expert is not known."""


def unknown_expert(dtype: npt.DTypeLike) -> int:
    """What stands for an expert that is not known: 255 in uint8, -1 in int16."""
    if np.dtype(dtype) not in _UNKNOWN:
        raise ValueError(f"expert_routing must be of uint8 or int16, not {np.dtype(dtype)}")
    return _UNKNOWN[np.dtype(dtype)]


def unknown_routing(num_tokens: int, *, num_layers: int, top_k: int, dtype: npt.DTypeLike) -> Array:
    """[tokens, layers, top_k] of which nothing is known yet; writable, for who fills it in."""
    return np.full((num_tokens, num_layers, top_k), unknown_expert(dtype), dtype=dtype)


def check_routing(routing: Array, *, num_tokens: int) -> None:
    """Raise unless it has a row for each of so many tokens."""
    if routing.dtype not in _UNKNOWN or routing.ndim != 3:
        raise ValueError("expert_routing must be [T, layers, top_k] of uint8 or int16")
    if len(routing) != num_tokens:
        raise ValueError(f"expert_routing has shape {routing.shape} but there are {num_tokens} tokens")


def cut_routing(routing: Array, *, at: int) -> Array:
    """Of the first `at` tokens; whoever goes on from there passes the last of them through the model again."""
    cut = routing[:at].copy()
    cut[-1:] = unknown_expert(cut.dtype)
    cut.flags.writeable = False
    return cut


def grown_routing(old: Array | None, new: Array | None, *, num_tokens: int) -> Array | None:
    """The routing of a rollout lengthened to `num_tokens`, from what it had and what the engine recorded over all of it.

    An engine knows nothing of the rows it did not compute (a prefix another engine passed through the model), so what
    was known of them stays. Where both know, the new one is of the pass the new tokens were drawn from.
    """
    if new is not None:
        check_routing(new, num_tokens=num_tokens)
        if old is not None and (old.dtype, old.shape[1:]) != (new.dtype, new.shape[1:]):
            raise ValueError(
                f"expert_routing has rows of {new.shape[1:]} {new.dtype} but those it goes on from are of "
                f"{old.shape[1:]} {old.dtype}"
            )
        grown = new.copy()
    elif old is not None:
        _, num_layers, top_k = old.shape
        grown = unknown_routing(num_tokens, num_layers=num_layers, top_k=top_k, dtype=old.dtype)
    else:
        return None
    if old is not None:
        before = grown[: len(old)]
        np.copyto(before, old, where=before == unknown_expert(old.dtype))
    grown.flags.writeable = False
    return grown
