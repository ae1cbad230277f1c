"""What the choices of `orchestrate` (`inline.py`, `local.py`) have in common."""

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
    """Where the engines and the trainer of one run are. Entered before the model is made ready; left when the run is over,
    however it ended, and then nothing of it remains."""

    reporting_roles: tuple[str, ...] = ()
    """Roles that report how they spend their time from other processes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing was started."""

    def roles(
        self, model_path: str, given: UserInputs, *, observer: Observer, lineage: Lineage, most_blocks: int = 0
    ) -> AbstractAsyncContextManager[Roles]:
        """Load the model into engines and trainer. `most_blocks`: KV blocks that an engine can use, 0 where not known."""
        raise NotImplementedError
