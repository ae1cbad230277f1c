"""Rollouts, batches and episodes as columns, the form in which they are sent and saved.

Encoding each rollout alone would cost a header of twenty fields and a check of each. In columns, the tokens of all rollouts are
concatenated and checked together. `frames.encode` takes what `pack_rollouts` returns:

    rollouts                one list per field (id, episode, …, length, num_calls), with a value per rollout; fields that only
                            some rollouts have are left out if none has them
    token_ids … versions    [sum of lengths] arrays with the dtypes they have in a rollout
    calls                   one list per field, with a value per call
    samplings               the distinct settings of the calls' samplings, which of them each call has, and its seed

`unpack_rollouts` rejects what `Rollout` itself rejects (`headrace.records.check`), with a `WireError`.
"""

from __future__ import annotations

import dataclasses
from itertools import chain, islice, repeat
from operator import attrgetter, is_not
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.records import frames
from headrace.records.batch import Batch
from headrace.records.check import TOKEN_ARRAYS, check_calls, check_tokens, read_fields
from headrace.records.episode import Episode
from headrace.records.frames import WireError, wire_errors
from headrace.records.rollout import Rollout
from headrace.records.sampling import Call, FinishReason, InfraAbort, Invalid, Sampling, SamplingMask, Scored
from headrace.records.validate import frozen, unchecked_many

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from headrace.records.validate import Array

Kinds = dict[str, tuple[type, ...]]
_ROLLOUTS: Kinds = {"id": (str,), "episode": (str,), "group": (str,), "index": (int,), "policy": (str,), "lineage": (str,)}
_COUNTS: Kinds = {"length": (int,), "num_calls": (int,)}
_OPTIONAL: Kinds = {
    "parent": (list, tuple, NoneType),
    "expert_routing": (np.ndarray, NoneType),
    "sampling_mask": (SamplingMask, NoneType),
    "rewards": (dict,),
    "step_rewards": (list, tuple),
    "columns": (dict,),
    "outcome": (float, Invalid, InfraAbort, NoneType),
}
"""Fields that only some rollouts have. The last type makes the value of a rollout without the field."""
_CALLS: Kinds = {**dict.fromkeys(("start", "stop"), (int,)), **dict.fromkeys(("started", "finished"), (float, int))}
_CALLS |= dict.fromkeys(("engine", "finish_reason"), (str,))
_FIXED_BYTES = 256
_REASONS = {reason.value: reason for reason in FinishReason}
_SETTINGS = [field.name for field in dataclasses.fields(Sampling) if field.name != "seed"]
_BATCH_SETTINGS = {field.name for field in dataclasses.fields(Batch)} - {"rollouts", "advantages", "weights"}
_EPISODE_FIELDS = {field.name for field in dataclasses.fields(Episode)} - {"rollouts"}


# Packing


def pack_rollouts(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """The columns of these rollouts. Raises `WireError` for a value of the wrong type."""
    table = {name: _values(rollouts, name) for name in _ROLLOUTS}
    tokens = {name: _values(rollouts, name) for name in TOKEN_ARRAYS}
    calls_of = _values(rollouts, "calls")
    table |= {"length": list(map(len, tokens["token_ids"])), "num_calls": list(map(len, calls_of))}
    for name, kinds in _OPTIONAL.items():
        column = _values(rollouts, name)
        if any(map(is_not, column, repeat(None)) if kinds[-1] is NoneType else column):
            table[name] = [float(value.reward) if isinstance(value, Scored) else value for value in column]
    calls = list(chain.from_iterable(calls_of))
    reasons = {"finish_reason": [call.finish_reason.value for call in calls]}
    return {
        "rollouts": _checked_table("rollouts", table, _ROLLOUTS | _COUNTS, optional=_OPTIONAL),
        **{name: _joined(tokens[name], dtype) for name, dtype in TOKEN_ARRAYS.items()},
        "calls": _checked_table("calls", {name: _values(calls, name) for name in _CALLS} | reasons, _CALLS),
        "samplings": pack_samplings(_values(calls, "sampling")),
    }


def portions(num_bytes: Sequence[int]) -> Iterator[slice]:
    """Consecutive rollouts, of which these are the bytes, that take about one piece of a frame together; a longer one is
    alone."""
    start = total = 0
    for at, size in enumerate(num_bytes):
        if at > start and total + _FIXED_BYTES + size > frames.PIECE:
            yield slice(start, at)
            start, total = at, 0
        total += _FIXED_BYTES + size
    if start < len(num_bytes):
        yield slice(start, len(num_bytes))


def pack_samplings(samplings: Sequence[Sampling]) -> dict[str, Any]:
    """The distinct settings, the index of each sampling's settings, and the seeds."""
    keys = list(map(attrgetter(*_SETTINGS), samplings))
    distinct = dict(zip(keys, samplings, strict=True))
    codes = {key: code for code, key in enumerate(distinct)}
    return {
        "settings": [sampling.with_seed(0) for sampling in distinct.values()],
        "codes": list(map(codes.__getitem__, keys)),
        "seeds": _values(samplings, "seed"),
    }


def pack_batch(batch: Batch) -> dict[str, Any]:
    """A batch with its rollouts as columns."""
    return {
        "rollouts": pack_rollouts(batch.rollouts),
        "advantages": _joined(batch.advantages, np.float32),
        "weights": _joined(batch.weights, np.float32),
        "settings": {name: getattr(batch, name) for name in _BATCH_SETTINGS},
    }


def pack_episodes(episodes: Sequence[Episode]) -> dict[str, Any]:
    """A dict per episode, and all their rollouts as columns."""
    return {
        "episodes": [{name: getattr(episode, name) for name in _EPISODE_FIELDS} for episode in episodes],
        "num_rollouts": [len(episode.rollouts) for episode in episodes],
        "rollouts": pack_rollouts([rollout for episode in episodes for rollout in episode.rollouts]),
    }


def _values(records: Sequence[Any], name: str) -> list[Any]:
    return list(map(attrgetter(name), records))


def _joined(arrays: Sequence[Array], dtype: npt.DTypeLike) -> Array:
    joined: Array = np.concatenate(arrays) if len(arrays) else np.zeros(0, dtype=dtype)
    joined.flags.writeable = False
    return joined


# Unpacking: the input may be malformed


def unpack_rollouts(packed: Any) -> list[Rollout]:  # noqa: ANN401  (unchecked input)
    """The inverse of `pack_rollouts`; token arrays are views of the columns."""
    with wire_errors("packed rollouts"):
        _check_keys(packed, {"rollouts", "calls", "samplings", *TOKEN_ARRAYS})
        table = _checked_table("rollouts", packed["rollouts"], _ROLLOUTS | _COUNTS, optional=_OPTIONAL)
        ids, lengths, num_calls = table["id"], table["length"], table["num_calls"]
        if min(lengths, default=0) < 0:
            raise WireError("rollouts: length must be ≥ 0")
        tokens = {name: _read_array(packed[name], dtype, sum(lengths), name) for name, dtype in TOKEN_ARRAYS.items()}
        where: dict[str, Any] = {"ids": ids, "offsets": np.array([0, *lengths]).cumsum()}
        check_tokens(tokens, **where)
        call_table = _checked_table("calls", packed["calls"], _CALLS)
        samplings = unpack_samplings(packed["samplings"])
        reasons = list(map(_REASONS.__getitem__, call_table["finish_reason"]))
        calls = unchecked_many(Call, call_table | {"finish_reason": reasons, "sampling": samplings}, num=len(samplings))
        calls_of = _split(calls, num_calls, "num_calls")
        starts, stops = (np.array(call_table[name], dtype=np.int64) for name in ("start", "stop"))
        check_calls(np.repeat(np.arange(len(ids)), num_calls), starts, stops, source=tokens["source"], **where)
        spans = list(map(slice, where["offsets"][:-1].tolist(), where["offsets"][1:].tolist()))
        columns: dict[str, Sequence[Any]] = {
            **{name: table[name] for name in _ROLLOUTS},
            **{name: list(map(array.__getitem__, spans)) for name, array in tokens.items()},
            "calls": calls_of,
            "finish_reason": [each[-1].finish_reason if each else None for each in calls_of],
            **_read_optional(table),
            "media": [None] * len(ids),
        }
        return unchecked_many(Rollout, columns, num=len(ids))


def _read_optional(table: dict[str, list[Any]]) -> dict[str, list[Any]]:
    given = {name: table[name] for name in _OPTIONAL if name in table}
    columns = {name: [kinds[-1]() for _ in table["id"]] for name, kinds in _OPTIONAL.items() if name not in given}
    if not given:
        return columns
    if "outcome" in given:
        given["outcome"] = [Scored(value) if isinstance(value, float) else value for value in given["outcome"]]
    fields = [
        read_fields(dict(zip(given, values, strict=True)), id=id, length=length)
        for id, length, *values in zip(table["id"], table["length"], *given.values(), strict=True)
    ]
    return columns | {name: [each[name] for each in fields] for name in given}


def unpack_samplings(packed: Any) -> list[Sampling]:  # noqa: ANN401
    """The inverse of `pack_samplings`."""
    with wire_errors("packed samplings"):
        _check_keys(packed, {"settings", "codes", "seeds"})
        settings = _checked_list(packed["settings"], (Sampling,), "settings")
        codes, seeds = (_checked_list(packed[name], (int,), name) for name in ("codes", "seeds"))
        if codes and not 0 <= min(codes) <= max(codes) < len(settings):
            raise WireError(f"settings: a code is none of the {len(settings)} there are")
        if len(seeds) != len(codes) or (seeds and not -(1 << 63) <= min(seeds) <= max(seeds) < 1 << 63):
            raise WireError(f"seeds must be {len(codes)} numbers of 64 bits")
        chosen = list(map(settings.__getitem__, codes))
        columns = {name: _values(chosen, name) for name in _SETTINGS}
        return unchecked_many(Sampling, {**columns, "seed": seeds}, num=len(codes))


def unpack_batch(packed: Any) -> Batch:  # noqa: ANN401
    """The inverse of `pack_batch`."""
    with wire_errors("packed batch"):
        _check_keys(packed, {"rollouts", "advantages", "weights", "settings"})
        _check_keys(packed["settings"], _BATCH_SETTINGS)
        rollouts = unpack_rollouts(packed["rollouts"])
        total = sum(map(len, rollouts))
        arrays = {name: _read_array(packed[name], np.float32, total, name) for name in ("advantages", "weights")}
        return Batch.from_columns(rollouts, **arrays, **packed["settings"])


def unpack_episodes(packed: Any) -> list[Episode]:  # noqa: ANN401
    """The inverse of `pack_episodes`."""
    with wire_errors("packed episodes"):
        _check_keys(packed, {"episodes", "num_rollouts", "rollouts"})
        counts = _checked_list(packed["num_rollouts"], (int,), "num_rollouts")
        members = _split(unpack_rollouts(packed["rollouts"]), counts, "num_rollouts")
        episodes = _checked_list(packed["episodes"], (dict,), "episodes")
        for fields in episodes:
            _check_keys(fields, _EPISODE_FIELDS)
        return [Episode(**fields, rollouts=rollouts) for fields, rollouts in zip(episodes, members, strict=True)]


def _split(items: Sequence[Any], counts: list[int], name: str) -> list[tuple[Any, ...]]:
    if min(counts, default=0) < 0 or sum(counts) != len(items):
        raise WireError(f"{name} must be ≥ 0 and add up to {len(items)}")
    rest = iter(items)
    return [tuple(islice(rest, count)) for count in counts]


def _read_array(value: object, dtype: npt.DTypeLike, length: int, name: str) -> Array:
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.shape != (length,):
        raise WireError(f"{name} must be an array of {length} {np.dtype(dtype).name}")
    return frozen(value, dtype, name)


def _checked_table(name: str, table: Any, kinds: Kinds, *, optional: Kinds | None = None) -> dict[str, list[Any]]:  # noqa: ANN401
    """Return `table`, or raise unless it has these columns, equally long."""
    known = kinds | (optional or {})
    _check_keys(table, kinds.keys(), optional=known.keys(), where=f"{name}: ")
    columns = {column: _checked_list(values, known[column], f"{name}: {column}") for column, values in table.items()}
    if len(set(map(len, columns.values()))) > 1:
        raise WireError(f"{name}: its columns must be equally long")
    return columns


def _checked_list(values: Any, kinds: tuple[type, ...], name: str) -> list[Any]:  # noqa: ANN401
    """Return `values`, or raise unless they are a list of exactly these types."""
    if not isinstance(values, list) or not set(kinds).issuperset(map(type, values)):
        raise WireError(f"{name} must be a list of {' or '.join(each.__name__ for each in kinds)}")
    return values


def _check_keys(packed: Any, required: Any, *, optional: Any = frozenset(), where: str = "") -> None:  # noqa: ANN401
    if not isinstance(packed, dict):
        raise WireError(f"{where}must be a dict, not a {type(packed).__name__}")
    if not required <= packed.keys() <= required | optional:
        odd = sorted(map(str, (required - packed.keys()) | (packed.keys() - required - optional)))
        raise WireError(f"{where}missing or unknown keys: {', '.join(odd)}")
