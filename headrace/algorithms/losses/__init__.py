"""Losses: pure functions from per-token tensors to one loss per token. Yours is one more, named `module:name`.

A loss takes `TokenTensors` and its constants as keywords, and returns the loss of each token and what should be logged
(tensors of the same shape, averaged over tokens). Weighting, corrections, the KL and summing are not its work:

    def my_loss(tokens, *, clip=0.2):
        ratio = tokens.ratio()
        return -torch.minimum(ratio * tokens.advantages, ratio.clamp(1 - clip, 1 + clip) * tokens.advantages), {}

Corrections weigh the policy's term alone: a term they must leave as it is, such as a value loss, is returned third.
One that looks at a column of the rollouts says so, `my_loss.needs = ("teacher",)` or `@needs("teacher")`, and finds it in
`tokens.columns`. `policy` has the losses of a policy alone, `value` PPO with a value head, `apart` the distance to a
reference or a teacher.
"""

from headrace.algorithms.losses.apart import KL_ESTIMATORS, distill
from headrace.algorithms.losses.declare import needs
from headrace.algorithms.losses.naming import (
    LOSSES,
    call_loss,
    columns_to_bring,
    missing_column,
    needed_columns,
    resolve_loss,
)
from headrace.algorithms.losses.policy import (
    a3po,
    aipo,
    cispo,
    decoupled_ppo,
    dppo,
    grpo,
    gspo,
    m2po,
    reinforce,
    supervised,
    topr,
)
from headrace.algorithms.losses.tokens import TokenTensors
from headrace.algorithms.losses.value import ppo

__all__ = [
    "KL_ESTIMATORS",
    "LOSSES",
    "TokenTensors",
    "a3po",
    "aipo",
    "call_loss",
    "cispo",
    "columns_to_bring",
    "decoupled_ppo",
    "distill",
    "dppo",
    "grpo",
    "gspo",
    "m2po",
    "missing_column",
    "needed_columns",
    "needs",
    "ppo",
    "reinforce",
    "resolve_loss",
    "supervised",
    "topr",
]
