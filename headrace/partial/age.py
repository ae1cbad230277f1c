"""When a group in flight can be given up."""

from __future__ import annotations


def is_over_age(oldest: int, *, next_version: int, max_lag: int) -> bool:
    """Whether a token of version `oldest` is too old for every batch to come.

    `next_version` is the first version for which no batch has been taken yet. A group still in flight is trained at that one
    or later, where the token's lag is at least `next_version - oldest`; versions only rise. So what is over age would
    be rejected whenever it ended (`staleness.reject`), and what would not is not over age.
    """
    return next_version - oldest > max_lag
