"""`orchestrate = "inline"`: everything in this process and its event loop."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from headrace.launch.build import build_roles
from headrace.launch.orchestration import Orchestration

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.config import Recipe
    from headrace.launch.inputs import UserInputs
    from headrace.observe import Observer
    from headrace.run import Roles
    from headrace.sync import Lineage


class Inline(Orchestration):
    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    @contextlib.asynccontextmanager
    async def roles(
        self, model_path: str, given: UserInputs, *, observer: Observer, lineage: Lineage, most_blocks: int = 0
    ) -> AsyncIterator[Roles]:
        yield build_roles(self._recipe, model_path, given, observer=observer, lineage=lineage, most_blocks=most_blocks)
