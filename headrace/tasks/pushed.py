"""`pushed:groups`: a row for each group that environments push. What they work on is their own affair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.tasks.settings import TaskError

if TYPE_CHECKING:
    from headrace.records import Plain


def open_source(name: str, *, seed: int, split: str, options: dict[str, Any]) -> PushedGroups:
    reward_of(name)
    if split != "train":
        raise TaskError(f"tasks: pushed:{name}: there is nothing to evaluate; give evaluate.tasks a source of its own")
    if options:
        raise TaskError(f"tasks: pushed:{name}: options: there are none, not {', '.join(options)}")
    return PushedGroups()


def reward_of(name: str) -> None:
    if name != "groups":
        raise TaskError(f"tasks: no pushed tasks {name!r}; write pushed:groups")


class PushedGroups:
    def row(self, index: int) -> dict[str, Plain]:
        return {"prompt": "pushed"}
