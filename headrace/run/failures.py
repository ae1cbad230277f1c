"""Which failure to show."""

from __future__ import annotations


def first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that came first; the others are its consequence."""
    inner = failures.exceptions[0]
    return first_failure(inner) if isinstance(inner, BaseExceptionGroup) else inner
