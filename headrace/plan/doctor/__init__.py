"""`headrace doctor`: finds what would go wrong with a run, and how to fix it, before a model is loaded.

A check is a function from a `Subject` to findings; to add one, write it and list it in its file's `CHECKS`. Checks run in
order and store what they load on the subject; a later check whose input is missing reports nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.plan.doctor.finding import Finding, Subject

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Finding", "Subject", "examine", "render"]


def examine(subject: Subject) -> Iterator[Finding]:
    """Run all checks and yield findings as they come. torch is imported only after the checks that do not need it."""
    from headrace.plan.doctor import inputs, machine

    for check in (*inputs.CHECKS, *machine.CHECKS):
        yield from subject.tell(check)
    try:
        from headrace.plan.doctor import capacity, model, reward
    except ImportError as error:
        yield Finding("problem", f"a library is missing or broken: {error}", "pip install --force-reinstall headrace")
        return
    for check in (*model.CHECKS, *capacity.CHECKS, *reward.CHECKS):
        yield from subject.tell(check)


def render(finding: Finding) -> str:
    """One aligned line, plus one for the fix if there is one."""
    fix = f"\n{'':9}fix: {finding.fix}" if finding.fix else ""
    return f"{finding.level:<8} {finding.what}{fix}"
