"""The reward for right answers that are numbers, formulas, sets or intervals, as the package math-verify judges them."""

from __future__ import annotations

import threading

from headrace.score.rewards import RewardFunction
from headrace.score.signature import RewardError


def _verified(completion: str, answer: object, *, seconds: int = 5) -> float | None:
    """1 if the completion's answer equals the row's, else 0, also if comparing them takes more than `seconds`; None if the
    row's answer is nothing that can be compared."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise RewardError(
            f"reward 'math_verify' needs the package math-verify: pip install headrace[math] ({error})"
        ) from error
    if isinstance(seconds, bool) or not isinstance(seconds, int) or seconds < 1:
        raise RewardError(f"reward.options.math_verify.seconds = {seconds!r}: must be a whole number ≥ 1")
    # It limits its time by SIGALRM, which only a main thread can; a process of `reward.processes` calls in its own.
    limit = seconds if threading.current_thread() is threading.main_thread() else None
    gold = str(answer)
    is_marked = "$" in gold or "\\boxed" in gold or "\\(" in gold or "\\[" in gold
    right = parse(gold if is_marked else f"\\boxed{{{gold}}}", parsing_timeout=limit)
    if not right:
        return None
    return float(verify(right, parse(completion, parsing_timeout=limit), timeout_seconds=limit))


math_verify = RewardFunction(_verified, name="math_verify", needs_process=True)
