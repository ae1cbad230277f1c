"""The interface of the choices of `orchestrate` (`inline.py`, `local.py`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from headrace.launch.inputs import UserInputs
    from headrace.observe import Observer
    from headrace.run import Roles
    from headrace.sync import Lineage


class Orchestration(AbstractContextManager["Orchestration"]):
    """Where engines and trainer run. Entered before the model is prepared; leaving it, at the run's end, removes everything."""

    reporting_roles: tuple[str, ...] = ()
    """Roles that report their timelines from other processes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing to end."""

    def roles(
        self, model_path: str, given: UserInputs, *, observer: Observer, lineage: Lineage, most_blocks: int = 0
    ) -> AbstractAsyncContextManager[Roles]:
        """Load the model into engines and trainer. `most_blocks`: the most KV blocks an engine can use, 0 if unknown."""
        raise NotImplementedError
