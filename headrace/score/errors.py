"""What a reward function can do wrong."""

from __future__ import annotations


class RewardError(ValueError):
    """A reward function is wrong in a way no retry can mend; the run stops and shows it."""
