"""Many rollouts as columns: one value that `wire.encode` takes in one frame, and that is checked in one go.

A rollout alone costs a header of twenty fields and a check of each. In columns the tokens of all lie one after another
and so do their calls, and a check runs over the whole length; what few rollouts have is there for those few.

    ids, episodes, groups       one text per rollout
    numbers                     [5, R] int64: index, length, which policy, which lineage, how many calls
    policies, lineages          the distinct ones
    token_ids … versions        [sum of lengths], each of the dtype it has in a rollout
    calls                       the same for the calls of all rollouts: numbers, times, distinct engines and settings
    parent, rewards, step_rewards, scored, unscored, routing, mask, columns     only where a rollout has one

What is small lies together in few arrays, for an array costs microseconds on its way whatever its size.
`unpack_rollouts` refuses whatever `Rollout` itself would refuse, with a `WireError` that names the rollout.
"""

from __future__ import annotations

from collections import defaultdict
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.records.frames import WireError
from headrace.records.read_columns import ESCAPES, OPTIONAL, REASONS, SETTINGS, unpack_batch, unpack_rollouts, unpack_samplings
from headrace.records.rollout import TOKEN_ARRAYS
from headrace.records.sampling import Scored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headrace.records.batch import Batch
    from headrace.records.rollout import Rollout
    from headrace.records.sampling import Sampling
    from headrace.records.validate import Array

__all__ = ["pack_batch", "pack_rollouts", "pack_samplings", "unpack_batch", "unpack_rollouts", "unpack_samplings"]


def pack_rollouts(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Columns of these rollouts, in order. Raises `WireError` for a field that no column holds without loss."""
    policies, policy = _coded([rollout.policy for rollout in rollouts], "policy")
    lineages, lineage = _coded([rollout.lineage for rollout in rollouts], "lineage")
    packed = {
        "ids": _texts([rollout.id for rollout in rollouts], "id"),
        "episodes": _texts([rollout.episode for rollout in rollouts], "episode"),
        "groups": _texts([rollout.group for rollout in rollouts], "group"),
        "policies": policies,
        "lineages": lineages,
        "numbers": _table(
            index=[rollout.index for rollout in rollouts],
            length=[len(rollout.token_ids) for rollout in rollouts],
            policy=policy,
            lineage=lineage,
            calls=[len(rollout.calls) for rollout in rollouts],
        ),
    }
    for name, dtype in TOKEN_ARRAYS.items():
        packed[name] = _joined(list(map(attrgetter(name), rollouts)), dtype)
    for name, pack in _PACK_OPTIONAL.items():
        column = pack(rollouts)
        if column is not None:
            packed[name] = column
    return packed


def pack_samplings(samplings: Sequence[Sampling]) -> dict[str, Any]:
    """The distinct settings, which of them each is, and the seeds."""
    settings, codes = _distinct(samplings)
    return {"settings": settings, "numbers": _table(sampling=codes, seed=[sampling.seed for sampling in samplings])}


def _distinct(samplings: Sequence[Sampling]) -> tuple[list[Sampling], list[int]]:
    """Settings that differ in more than their seed, and which of them each is."""
    keys = list(map(_settings_of, samplings))
    codes = {key: code for code, key in enumerate(dict.fromkeys(keys))}
    last = dict(zip(keys, samplings, strict=True))
    return [last[key].with_seed(0) for key in codes], list(map(codes.__getitem__, keys))


def pack_batch(batch: Batch) -> dict[str, Any]:
    """A batch with its rollouts in columns."""
    return {
        "rollouts": pack_rollouts(batch.rollouts),
        "advantages": _joined(batch.advantages, np.float32),
        "weights": _joined(batch.weights, np.float32),
        "loss": batch.loss,
        "constants": batch.constants,
        "correction": batch.correction,
        "correction_constants": batch.correction_constants,
        "kl": batch.kl,
        "kl_weight": batch.kl_weight,
        "version": batch.version,
    }


_settings_of = attrgetter(*SETTINGS)
_REASON_CODES = {reason: code for code, reason in enumerate(REASONS)}


def _pack_calls(rollouts: Sequence[Rollout]) -> dict[str, Any] | None:
    calls = [call for rollout in rollouts for call in rollout.calls]
    if not calls:
        return None
    engines, engine = _coded([call.engine for call in calls], "engine")
    settings, sampling = _distinct([call.sampling for call in calls])
    return {
        "engines": engines,
        "settings": settings,
        "numbers": _table(
            start=[call.start for call in calls],
            stop=[call.stop for call in calls],
            engine=engine,
            reason=[_REASON_CODES[call.finish_reason] for call in calls],
            sampling=sampling,
            seed=[call.sampling.seed for call in calls],
        ),
        "times": _floats([[call.started for call in calls], [call.finished for call in calls]], "time of a call"),
    }


def _pack_parent(rollouts: Sequence[Rollout]) -> dict[str, Any] | None:
    found = [(row, *rollout.parent) for row, rollout in enumerate(rollouts) if rollout.parent is not None]
    if not found:
        return None
    rows, ids, places = map(list, zip(*found, strict=True))
    return {"rows": _whole(rows, "row"), "ids": _texts(ids, "parent"), "at": _whole(places, "parent")}


def _pack_rewards(rollouts: Sequence[Rollout]) -> dict[str, Any] | None:
    found = [(row, name, value) for row, rollout in enumerate(rollouts) for name, value in rollout.rewards.items()]
    if not found:
        return None
    rows, names, values = map(list, zip(*found, strict=True))
    distinct, codes = _coded(names, "reward")
    return {"names": distinct, "numbers": _table(row=rows, name=codes), "values": _floats(values, "reward")}


def _pack_step_rewards(rollouts: Sequence[Rollout]) -> dict[str, Any] | None:
    found = [(row, at, value) for row, rollout in enumerate(rollouts) for at, value in rollout.step_rewards]
    if not found:
        return None
    rows, places, values = map(list, zip(*found, strict=True))
    return {"rows": _whole(rows, "row"), "at": _whole(places, "step reward"), "values": _floats(values, "step reward")}


def _pack_scored(rollouts: Sequence[Rollout]) -> dict[str, Any] | None:
    found = [(row, rollout.outcome.reward) for row, rollout in enumerate(rollouts) if isinstance(rollout.outcome, Scored)]
    if not found:
        return None
    rows, values = map(list, zip(*found, strict=True))
    return {"rows": _whole(rows, "row"), "values": _floats(values, "outcome")}


def _pack_unscored(rollouts: Sequence[Rollout]) -> dict[str, Any] | None:
    found = [(row, r.outcome) for row, r in enumerate(rollouts) if r.outcome is not None and not isinstance(r.outcome, Scored)]
    if not found:
        return None
    rows, outcomes = map(list, zip(*found, strict=True))
    return {"rows": _whole(rows, "row"), "outcomes": outcomes}


def _pack_routing(rollouts: Sequence[Rollout]) -> list[dict[str, Any]] | None:
    return _blocks((row, "", r.expert_routing) for row, r in enumerate(rollouts) if r.expert_routing is not None)


def _pack_columns(rollouts: Sequence[Rollout]) -> list[dict[str, Any]] | None:
    return _blocks((row, name, array) for row, r in enumerate(rollouts) for name, array in r.columns.items())


def _pack_mask(rollouts: Sequence[Rollout]) -> dict[str, Any] | None:
    found = [(row, rollout.sampling_mask) for row, rollout in enumerate(rollouts) if rollout.sampling_mask is not None]
    if not found:
        return None
    return {
        "rows": _whole([row for row, _ in found], "row"),
        "counts": _joined([np.diff(mask.offsets) for _, mask in found], np.int64),
        "ids": _joined([mask.ids for _, mask in found], np.int32),
    }


_PACK_OPTIONAL: dict[str, Callable[[Sequence[Rollout]], Any]] = {
    "calls": _pack_calls,
    "parent": _pack_parent,
    "rewards": _pack_rewards,
    "step_rewards": _pack_step_rewards,
    "scored": _pack_scored,
    "unscored": _pack_unscored,
    "routing": _pack_routing,
    "mask": _pack_mask,
    "columns": _pack_columns,
}
assert _PACK_OPTIONAL.keys() == OPTIONAL


def _blocks(arrays: Iterable[tuple[int, str, Array]]) -> list[dict[str, Any]] | None:
    """Arrays of one name, dtype and shape of a row, one after another."""
    alike: dict[tuple[Any, ...], list[tuple[int, Array]]] = defaultdict(list)
    for row, name, array in arrays:
        alike[name, array.dtype.str, array.shape[1:]].append((row, array))
    blocks = [
        {
            "name": name,
            "rows": _whole([row for row, _ in members], "row"),
            "values": _joined([array for _, array in members], members[0][1].dtype.type),
        }
        for (name, *_), members in alike.items()
    ]
    return blocks or None


def _texts(values: list[str], name: str) -> list[str]:
    if not all(isinstance(value, str) for value in values):
        raise WireError(f"{name} must be text to travel")
    return values


def _coded(values: list[str], name: str) -> tuple[list[str], list[int]]:
    """The distinct ones, and which of them each is."""
    codes = {value: code for code, value in enumerate(dict.fromkeys(_texts(values, name)))}
    return list(codes), list(map(codes.__getitem__, values))


def _table(**columns: list[int]) -> Array:
    """[columns, rows] int64."""
    values = list(columns.values())
    table = np.array(values) if values[0] else np.zeros((len(values), 0), dtype=np.int64)
    if table.dtype != np.int64:
        for name, column in columns.items():
            _whole(column, name)
    table.flags.writeable = False
    return table


def _whole(values: list[int], name: str) -> Array:
    """As int64, refusing what would be rounded or cut off."""
    array = np.array(values) if values else np.zeros(0, dtype=np.int64)
    if array.dtype != np.int64:
        raise WireError(f"{name} must be a whole number of 64 bits to travel")
    array.flags.writeable = False
    return array


def _floats(values: list[float] | list[list[float]], name: str) -> Array:
    try:
        array = np.array(values, dtype=np.float64)
    except ESCAPES:
        raise WireError(f"{name} must be a number to travel") from None
    array.flags.writeable = False
    return array


def _joined(arrays: Sequence[Array], dtype: type) -> Array:
    joined: Array = np.concatenate(arrays) if len(arrays) else np.zeros(0, dtype=dtype)
    joined.flags.writeable = False
    return joined
