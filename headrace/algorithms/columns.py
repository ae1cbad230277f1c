"""The per-token columns of a rollout that Headrace itself uses. Users may add others."""

from __future__ import annotations

PROXIMAL = "proximal"  # logprobs under the policy at the start of the version
REFERENCE = "reference"  # logprobs under the reference model of the KL
TEACHER = "teacher"  # logprobs under the teacher of a distillation
VALUES = "values"  # the value head's estimate, at the start of the version, of the state before the token was sampled
RETURNS = "returns"  # the return from that state: the target of the value head
ENTROPY = "entropy"  # of the token's distribution under the policy at the start of the version
REWARDS = "rewards"  # the token's own reward, from which `gae` computes advantages and returns
COMPUTED = (PROXIMAL, REFERENCE, TEACHER, VALUES, ENTROPY)  # by the trainer, if the batch lacks them
