"""The reward for code that passes its tests."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from headrace.score.sandbox import Limits, Verdict, run_code
from headrace.score.signature import RewardError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FENCED = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)


def find_code(completion: str) -> str:
    """Its last fenced block that is Python or of no language, also if it was cut off; without any, all of it."""
    blocks = [code for language, code in _FENCED.findall(completion) if language.lower() in ("", "python", "py", "python3")]
    return blocks[-1] if blocks else completion


def code_tests(
    completion: str,
    tests: str | Sequence[str | dict[str, str]],
    log_metric: Callable[[str, float], None],
    *,
    share: bool = False,
    seconds: float = Limits.seconds,
    memory_mb: int = Limits.memory_mb,
    processes: int = Limits.processes,
) -> float:
    """1 if the completion's code passes all tests of the row, else 0; with `share` the share of tests that it passes. What the
    code does wrong is worth 0, and the share of each verdict is logged; what the sandbox or the tests do wrong raises."""
    if not tests:
        raise RewardError("code_tests: the row's tests are empty; each row needs at least one")
    result = run_code(find_code(completion), tests=tests, seconds=seconds, memory_mb=memory_mb, processes=processes)
    for verdict in Verdict:
        log_metric(f"code/{verdict}", float(result.verdict is verdict))
    return result.passed / result.total if share else float(result.passed == result.total)
