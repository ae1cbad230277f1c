"""What a check reports (`Finding`) and what it examines (`Subject`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from headrace.errors import in_words, is_ours

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headrace.config import Recipe
    from headrace.model import ModelShape
    from headrace.records import Plain
    from headrace.score import RewardFunction
    from headrace.tasks import TaskSource


@dataclass(frozen=True)
class Finding:
    """One line of the report. A `problem` stops a run or spoils it; a `warning` may be intended."""

    level: Literal["ok", "warning", "problem"]
    what: str
    fix: str = ""


@dataclass
class Subject:
    """What the doctor examines. Checks fill in the fields from `recipe` on, for later checks."""

    recipe_path: Path | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    run_dir: Path | None = None
    """The run's folder, if not `runs/<recipe>-<time>`."""
    runs: Path = Path("runs")

    recipe: Recipe | None = None
    rows: list[dict[str, Plain]] = field(default_factory=list)
    """The first tasks the run would submit."""
    sources: list[TaskSource] = field(default_factory=list)
    held_out: list[TaskSource] = field(default_factory=list)
    rewards: list[tuple[RewardFunction, float]] = field(default_factory=list)
    tokenizer: PreTrainedTokenizerBase | None = None
    context: int = 0
    """The most tokens a rollout may have."""
    num_parameters: int = 0
    shape: ModelShape | None = None
    held_out_rows: dict[str, list[dict[str, Plain]]] = field(default_factory=dict)
    """The tasks of each evaluation, by source name."""
    longest_prompt: int = 0
    """In tokens, among the first tasks and the first of each held-out source."""

    @property
    def weight_bytes(self) -> int:
        """Of the policy in an engine's dtype; 0 if unknown."""
        width = 2 if self.recipe is not None and self.recipe.model.dtype == "bfloat16" else 4
        return width * self.num_parameters

    def tell(self, check: Check) -> Iterator[Finding]:
        """Run a check. If it raises, the error becomes a finding and does not stop the other checks."""
        try:
            yield from check(self)
        except Exception as error:  # noqa: BLE001  (whatever is wrong with the machine or the user's code is reported)
            yield problem(error)


Check: TypeAlias = Callable[[Subject], Iterator[Finding]]


def of_recipe(check: Callable[[Subject, Recipe], Iterator[Finding]]) -> Check:
    """Decorate a check that needs a recipe; without one it is skipped."""

    @functools.wraps(check)
    def checked(subject: Subject) -> Iterator[Finding]:
        return check(subject, subject.recipe) if subject.recipe is not None else iter(())

    return checked


def problem(error: BaseException, *, fix: str = "", otherwise: str = "") -> Finding:
    """An error as a finding. Our own often name the fix after their last semicolon; `otherwise` is the fix for the rest."""
    text = in_words(error)
    if not is_ours(error):
        return Finding("problem", text.splitlines()[0], fix or otherwise)
    what, separator, advice = text.rpartition("; ")
    if separator and not fix:
        return Finding("problem", what, advice)
    return Finding("problem", text, fix or otherwise)


def size(num_bytes: float) -> str:
    """1234567 as 1.2 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
