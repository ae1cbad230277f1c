"""Python's garbage collector, told what a run is like."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_YOUNG = 50_000
"""New objects between two looks at the young ones; Python's own is 700."""


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """Look for garbage less often inside the block.

    A run holds some dozens of objects for each of thousands of rollouts in flight, and next to none of them are part of a
    cycle; looking through all of them, and through a million of the libraries', every few hundred takes a fifth of the
    launcher's time. What the libraries made before is not looked at again until the block ends.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
