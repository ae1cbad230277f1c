"""The per-token columns of a rollout that have a meaning here. Any other is the user's own."""

from __future__ import annotations

PROXIMAL = "proximal"
"""Logprobs under the policy at the start of the version."""
REFERENCE = "reference"
"""Logprobs under the model that the KL is taken to."""
TEACHER = "teacher"
"""Logprobs under the model that is learnt from."""
VALUES = "values"
"""What the value head expected, at the start of the version, of the state before the token was drawn."""
RETURNS = "returns"
"""What came of that state: the target of the value head."""
REWARDS = "rewards"
"""The reward of the token itself, of which `gae` makes advantages and returns."""
COMPUTED = (PROXIMAL, REFERENCE, TEACHER, VALUES)
"""Those a trainer computes where a batch lacks them; others must be there."""
