"""`train.stream_parts`: in how many parts a batch is trained, and what needs it whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.algorithms import correction_traits
from headrace.buffer import buffer_policy
from headrace.staleness import corrections_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.config.recipe import Recipe

_USUAL = 4
"""A quarter of a batch lowers the lag nearly as much as single groups would, and its passes are still full."""
_FEWEST_GROUPS, _FEWEST_ROLLOUTS = 2, 4
"""Of a part: groups, and rollouts for each rank."""


def stream_parts(recipe: Recipe) -> int:
    """`train.stream_parts`, with 0 resolved."""
    train = recipe.train
    if train.stream_parts:
        return train.stream_parts
    lends = recipe.engine.lend  # one long wait for a batch is worth more to it than several short ones
    if lends or train.mini_batches > 1 or recipe.is_inline or next(whole_batch_reasons(recipe), None):
        return 1
    most = min(train.groups_per_batch // _FEWEST_GROUPS, train.batch // (_FEWEST_ROLLOUTS * train.parallel.ranks))
    return max(1, min(_USUAL, most))


def whole_batch_reasons(recipe: Recipe) -> Iterator[str]:
    """What does not go with a batch in parts."""
    train, policy = recipe.train, buffer_policy(recipe)
    if recipe.exact:
        yield "when a part is trained depends on timing, which exact = true does not allow"
    if policy.takes_turns:
        yield f"a {policy.name} buffer is for batches that are generated, then trained"
    yield from (f"train.{given} needs the whole batch before the first step" for given in train.looks_at_whole_batch)
    if train.stream_parts == train.mini_batches:
        return  # each part is a step of its own, whole when it begins
    for name in ("router_aux", "router_z"):
        if getattr(train, name):
            yield f"train.{name} = {getattr(train, name):g} is a mean over all tokens of a step"
    for name in corrections_of(recipe):
        if correction_traits(name).needs_whole_batch:
            yield f"the correction '{name}' compares all tokens of a step"
