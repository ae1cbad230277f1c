"""How many CPU threads torch gets in each process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.config import Recipe


def threads_of(recipe: Recipe, role: str, *, cores: int) -> int:
    """The setting of the role, or `threads`, or where both are 0 an equal share of the cores."""
    own = {"engine": recipe.engine.threads, "trainer": recipe.train.threads}.get(role, 0)
    num_processes = 1 if recipe.is_inline else recipe.engine.num_engines + 1
    return own or recipe.threads or max(1, cores // num_processes)
