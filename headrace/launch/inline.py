"""`orchestrate = "inline"`: everything in this process and its event loop."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from headrace.launch.build import build_roles

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from headrace.config import Recipe
    from headrace.launch.inputs import UserInputs
    from headrace.run import Roles


class Inline(contextlib.AbstractContextManager["Inline"]):
    """Where engines and trainer run. Entered before the model is prepared; leaving it, at the run's end, removes everything."""

    reporting_roles: tuple[str, ...] = ()
    """Roles that report their timelines from other processes."""

    def __init__(self, recipe: Recipe, folder: Path, *, trains: bool = True) -> None:
        """Without a trainer unless it `trains`."""
        self._recipe, self._trains = recipe, trains

    def __exit__(self, *error: object) -> None:
        """Nothing to remove."""

    @contextlib.asynccontextmanager
    async def roles(self, model_path: str, given: UserInputs, **how: Any) -> AsyncIterator[Roles]:  # noqa: ANN401
        """Load the model into engines and trainer, as `build_roles` says."""
        yield build_roles(self._recipe, model_path, given, trains=self._trains, **how)
