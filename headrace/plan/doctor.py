"""`headrace doctor`: finds what would go wrong with a run, and how to fix it, before a model is loaded.

A check is a function from a `Subject` to findings; to add one, write it and list it in its file's `CHECKS`. Checks run in
order and store what they load on the subject; a later check whose input is missing is skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from headrace.errors import in_words, is_ours
from headrace.model import bytes_per_number

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
    held_out_rows: dict[str, list[dict[str, Plain]]] = field(default_factory=dict)
    """The tasks of each evaluation, by source name."""
    rewards: list[tuple[RewardFunction, float]] = field(default_factory=list)
    tokenizer: PreTrainedTokenizerBase | None = None
    shape: ModelShape | None = None
    num_parameters: int = 0
    context: int = 0
    """The most tokens a rollout may have."""
    longest_prompt: int = 0
    """In tokens, among the first tasks and the first of each held-out source."""
    adapter: int = 0
    """Numbers in the adapter that is trained instead of the weights; 0 if there is none."""

    @property
    def published_bytes(self) -> int:
        """Of what the trainer sends to the engines, in their dtype; 0 if unknown."""
        return self.adapter * bytes_per_number(self.recipe.model.dtype) if self.recipe and self.adapter else self.weight_bytes

    @property
    def weight_bytes(self) -> int:
        """Of the policy in an engine's dtype; 0 if unknown."""
        return self.num_parameters * bytes_per_number("float32" if self.recipe is None else self.recipe.model.dtype)


Check: TypeAlias = Callable[[Subject], Iterator[Finding]]


def check(*needs: str, fix: str = "") -> Callable[[Callable[..., Iterator[Finding]]], Check]:
    """Decorate a check. It gets the subject and its fields in `needs`, and is skipped if one of these is missing or empty. What
    it raises is its last finding: an error of ours often names the fix after its last semicolon; if not, it is `fix`."""

    def decorate(function: Callable[..., Iterator[Finding]]) -> Check:
        @functools.wraps(function)
        def checked(subject: Subject) -> Iterator[Finding]:
            needed = [getattr(subject, name) for name in needs]
            if not all(needed):
                return
            try:
                yield from function(subject, *needed)
            except Exception as error:  # noqa: BLE001  (whatever is wrong with the machine or the user's code is reported)
                what, _, advice = in_words(error).rpartition("; ") if is_ours(error) else ("", "", "")
                yield Finding("problem", what or in_words(error).splitlines()[0], advice if what else fix)

        return checked

    return decorate


def examine(subject: Subject) -> Iterator[Finding]:
    """Run all checks and yield findings as they come. torch is imported only after the checks that do not need it."""
    from headrace.plan import inputs_checks, machine_checks

    for each in (*inputs_checks.CHECKS, *machine_checks.CHECKS):
        yield from each(subject)
    try:
        from headrace.plan import capacity_checks, model_checks, reward_checks
    except ImportError as error:
        yield Finding("problem", f"a library is missing or broken: {error}", "pip install --force-reinstall headrace")
        return
    for each in (*model_checks.CHECKS, *capacity_checks.CHECKS, *reward_checks.CHECKS):
        yield from each(subject)


def render(finding: Finding) -> str:
    """One aligned line, plus one for the fix if there is one."""
    fix = f"\n{'':9}fix: {finding.fix}" if finding.fix else ""
    return f"{finding.level:<8} {finding.what}{fix}"


def size(num_bytes: float) -> str:
    """1234567 as 1.2 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
