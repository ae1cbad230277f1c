"""Rollouts, batches and episodes as columns, the form in which they are sent and saved.

Encoding each rollout alone would cost a header of twenty fields and a check of each. In columns, the tokens of all rollouts are
concatenated and checked together. `frames.encode` takes what `pack_rollouts` returns:

    rollouts                    one list per field (id, episode, …, length), with a value per rollout
    token_ids … versions        [sum of lengths] arrays with the dtypes they have in a rollout
    calls, parent, rewards …    one list per field, with a value per call, parent or reward; `row` is its rollout
    settings                    the distinct samplings of the calls

`unpack_rollouts` rejects what `Rollout` itself rejects (`headrace.records.check`), with a `WireError`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.records.batch import Batch
from headrace.records.check import TOKEN_ARRAYS, check_calls, check_optional_fields, check_tokens
from headrace.records.episode import Episode
from headrace.records.frames import WireError
from headrace.records.rollout import Rollout
from headrace.records.sampling import Call, FinishReason, InfraAbort, Invalid, Sampling, SamplingMask, Scored
from headrace.records.validate import frozen, unchecked_many

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace.records.sampling import Outcome
    from headrace.records.validate import Array

_TABLES: dict[str, dict[str, type | tuple[type, ...]]] = {
    "rollouts": {"id": str, "episode": str, "group": str, "index": int, "policy": str, "lineage": str, "length": int},
    "calls": {
        "row": int,
        "start": int,
        "stop": int,
        "engine": str,
        "finish_reason": str,
        "started": float,
        "finished": float,
        "settings": int,
        "seed": int,
    },
    "parent": {"row": int, "id": str, "at": int},
    "rewards": {"row": int, "name": str, "value": float},
    "step_rewards": {"row": int, "at": int, "value": float},
    "outcome": {"row": int, "value": (float, Invalid, InfraAbort)},
    "expert_routing": {"row": int, "array": np.ndarray},
    "sampling_mask": {"row": int, "mask": SamplingMask},
    "columns": {"row": int, "name": str, "array": np.ndarray},
}
"""Columns and value types of each table. Empty tables are not sent."""
_REQUIRED = {"rollouts", "settings", *TOKEN_ARRAYS}
_REASONS = {reason.value: reason for reason in FinishReason}
_SETTINGS = tuple(field.name for field in dataclasses.fields(Sampling) if field.name != "seed")
_settings_of = attrgetter(*_SETTINGS)
_BATCH_SETTINGS = {field.name for field in dataclasses.fields(Batch)} - {"rollouts", "advantages", "weights"}
_EPISODE_FIELDS = tuple(field.name for field in dataclasses.fields(Episode) if field.name != "rollouts")


# Packing


def pack_rollouts(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """The columns of these rollouts. Raises `WireError` for a value of the wrong type."""
    rows = list(enumerate(rollouts))
    calls = [(row, call) for row, r in rows for call in r.calls]
    settings, codes = _distinct([call.sampling for _, call in calls])
    tables: dict[str, list[tuple[Any, ...]]] = {
        "rollouts": [(r.id, r.episode, r.group, r.index, r.policy, r.lineage, len(r.token_ids)) for r in rollouts],
        "calls": [
            (row, c.start, c.stop, c.engine, c.finish_reason.value, float(c.started), float(c.finished), code, c.sampling.seed)
            for (row, c), code in zip(calls, codes, strict=True)
        ],
        "parent": [(row, *r.parent) for row, r in rows if r.parent is not None],
        "rewards": [(row, name, value) for row, r in rows for name, value in r.rewards.items()],
        "step_rewards": [(row, at, value) for row, r in rows for at, value in r.step_rewards],
        "outcome": [(row, r.outcome if r.reward is None else float(r.reward)) for row, r in rows if r.outcome is not None],
        "expert_routing": [(row, r.expert_routing) for row, r in rows if r.expert_routing is not None],
        "sampling_mask": [(row, r.sampling_mask) for row, r in rows if r.sampling_mask is not None],
        "columns": [(row, name, array) for row, r in rows for name, array in r.columns.items()],
    }
    packed: dict[str, Any] = {name: _table(name, table) for name, table in tables.items() if table or name == "rollouts"}
    packed |= {name: _joined(list(map(attrgetter(name), rollouts)), dtype) for name, dtype in TOKEN_ARRAYS.items()}
    return {**packed, "settings": settings}


def pack_samplings(samplings: Sequence[Sampling]) -> dict[str, Any]:
    """The distinct settings, the index of each sampling's settings, and the seeds."""
    settings, codes = _distinct(samplings)
    seeds = [sampling.seed for sampling in samplings]
    return {"settings": settings, "codes": codes, "seeds": _checked_list(seeds, int, "seeds")}


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


def _table(name: str, rows: list[tuple[Any, ...]]) -> dict[str, list[Any]]:
    kinds = _TABLES[name]
    columns = map(list, zip(*rows, strict=True)) if rows else ([] for _ in kinds)
    return {
        column: _checked_list(values, kind, f"{name}: {column}")
        for (column, kind), values in zip(kinds.items(), columns, strict=True)
    }


def _distinct(samplings: Sequence[Sampling]) -> tuple[list[Sampling], list[int]]:
    """The distinct samplings, ignoring seeds, and the index of each one's."""
    keys = list(map(_settings_of, samplings))
    codes = {key: code for code, key in enumerate(dict.fromkeys(keys))}
    last = dict(zip(keys, samplings, strict=True))
    return [last[key].with_seed(0) for key in codes], list(map(codes.__getitem__, keys))


def _joined(arrays: Sequence[Array], dtype: type) -> Array:
    joined: Array = np.concatenate(arrays) if len(arrays) else np.zeros(0, dtype=dtype)
    joined.flags.writeable = False
    return joined


# Unpacking: the input may be malformed


def unpack_rollouts(packed: Any) -> list[Rollout]:  # noqa: ANN401  (unchecked input)
    """The inverse of `pack_rollouts`; token arrays are views of the columns."""
    with _wire_errors("rollouts"):
        _check_keys(packed, _REQUIRED, optional=_TABLES.keys())
        ids, episodes, groups, indexes, policies, lineages, lengths = _read_table(packed, "rollouts")
        if min(lengths, default=0) < 0:
            raise WireError("rollouts: length must be ≥ 0")
        total = sum(lengths)
        tokens = {name: _read_array(packed[name], dtype, total, name) for name, dtype in TOKEN_ARRAYS.items()}
        offsets = np.cumsum([0, *lengths])
        check_tokens(tokens, ids=ids, offsets=offsets)
        calls = _read_calls(packed, source=tokens["source"], ids=ids, offsets=offsets)
        slices = list(map(slice, offsets[:-1].tolist(), offsets[1:].tolist()))
        optional = _read_optional_fields(packed, num=len(ids))
        columns: dict[str, Sequence[Any]] = {
            "id": ids,
            "episode": episodes,
            "group": groups,
            "index": indexes,
            "policy": policies,
            "lineage": lineages,
            **{name: list(map(array.__getitem__, slices)) for name, array in tokens.items()},
            "calls": calls,
            "finish_reason": [each[-1].finish_reason if each else None for each in calls],
            **optional,
            "media": [None] * len(ids),
        }
        rollouts = unchecked_many(Rollout, columns, num=len(ids))
        for row in {row for name in optional if name in packed for row in packed[name]["row"]}:
            check_optional_fields(rollouts[row])
        return rollouts


def unpack_samplings(packed: Any) -> list[Sampling]:  # noqa: ANN401
    """The inverse of `pack_samplings`."""
    with _wire_errors("samplings"):
        _check_keys(packed, {"settings", "codes", "seeds"})
        codes, seeds = (_checked_list(packed[name], int, name) for name in ("codes", "seeds"))
        return _read_samplings(packed["settings"], codes, seeds)


def unpack_batch(packed: Any) -> Batch:  # noqa: ANN401
    """The inverse of `pack_batch`."""
    with _wire_errors("batch"):
        _check_keys(packed, {"rollouts", "advantages", "weights", "settings"})
        _check_keys(packed["settings"], _BATCH_SETTINGS)
        rollouts = unpack_rollouts(packed["rollouts"])
        total = sum(map(len, rollouts))
        arrays = {name: _read_array(packed[name], np.float32, total, name) for name in ("advantages", "weights")}
        return Batch.from_columns(rollouts, **arrays, **packed["settings"])


def unpack_episodes(packed: Any) -> list[Episode]:  # noqa: ANN401
    """The inverse of `pack_episodes`."""
    with _wire_errors("episodes"):
        _check_keys(packed, {"episodes", "num_rollouts", "rollouts"})
        rollouts = unpack_rollouts(packed["rollouts"])
        counts = _checked_list(packed["num_rollouts"], int, "num_rollouts")
        if min(counts, default=0) < 0 or sum(counts) != len(rollouts):
            raise WireError(f"num_rollouts must be ≥ 0 and add up to {len(rollouts)}")
        episodes, rest = _checked_list(packed["episodes"], dict, "episodes"), iter(rollouts)
        for fields in episodes:
            _check_keys(fields, set(_EPISODE_FIELDS))
        return [Episode(**fields, rollouts=tuple(islice(rest, count))) for fields, count in zip(episodes, counts, strict=True)]


def _read_calls(packed: dict[str, Any], *, source: Array, ids: list[str], offsets: Array) -> list[tuple[Call, ...]]:
    rows, starts, stops, engines, reasons, started, finished, codes, seeds = _read_table(packed, "calls", num=len(ids))
    whole = [np.array(column, dtype=np.int64) for column in (rows, starts, stops)]
    check_calls(*whole, source=source, ids=ids, offsets=offsets)
    columns: dict[str, Sequence[Any]] = {
        "start": starts,
        "stop": stops,
        "engine": engines,
        "sampling": _read_samplings(packed["settings"], codes, seeds),
        "finish_reason": list(map(_REASONS.__getitem__, reasons)),
        "started": started,
        "finished": finished,
    }
    calls = iter(unchecked_many(Call, columns, num=len(rows)))
    return [tuple(islice(calls, count)) for count in np.bincount(whole[0], minlength=len(ids)).tolist()]


def _read_optional_fields(packed: dict[str, Any], *, num: int) -> dict[str, list[Any]]:
    """The fields that only some rollouts have, with defaults for the others; lengths are not checked yet."""
    fields: dict[str, list[Any]] = {name: [None] * num for name in _OPTIONAL}
    fields["rewards"], fields["columns"] = [{} for _ in range(num)], [{} for _ in range(num)]
    fields["step_rewards"] = [()] * num
    for name, build in _OPTIONAL.items():
        rows, *columns = _read_table(packed, name, num=num)
        entries: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
        for row, entry in zip(rows, zip(*columns, strict=True), strict=True):
            entries[row].append(entry)
        for row, of_rollout in entries.items():
            fields[name][row] = build(of_rollout)
    return fields


def _one(entries: list[tuple[Any, ...]]) -> Any:  # noqa: ANN401
    if len(entries) > 1:
        raise WireError("a rollout has two values of a field")
    return entries[0] if len(entries[0]) > 1 else entries[0][0]


def _by_name(entries: list[tuple[Any, ...]]) -> dict[str, Any]:
    named = {name: frozen(value, None, name) if isinstance(value, np.ndarray) else value for name, value in entries}
    if len(named) < len(entries):
        raise WireError(f"a rollout has two values of one name, out of {', '.join(named)}")
    return named


def _outcome(entries: list[tuple[Any, ...]]) -> Outcome:
    value: Outcome | float = _one(entries)
    return Scored(value) if isinstance(value, float) else value


_OPTIONAL: dict[str, Callable[[list[tuple[Any, ...]]], Any]] = {
    "parent": _one,
    "rewards": _by_name,
    "step_rewards": tuple,
    "outcome": _outcome,
    "expert_routing": lambda entries: frozen(_one(entries), None, "expert_routing"),
    "sampling_mask": _one,
    "columns": _by_name,
}
"""Makes a field's value from its rollout's table entries."""


def _read_samplings(settings: object, codes: list[int], seeds: list[int]) -> list[Sampling]:
    distinct = _checked_list(settings, Sampling, "settings")
    if codes and not 0 <= min(codes) <= max(codes) < len(distinct):
        raise WireError(f"settings: a code is none of the {len(distinct)} there are")
    chosen = list(map(distinct.__getitem__, codes))
    columns: dict[str, Sequence[Any]] = {name: list(map(attrgetter(name), chosen)) for name in _SETTINGS}
    if len(seeds) != len(codes) or (seeds and not -(1 << 63) <= min(seeds) <= max(seeds) < 1 << 63):
        raise WireError(f"seeds must be {len(codes)} numbers of 64 bits")
    return unchecked_many(Sampling, {**columns, "seed": seeds}, num=len(codes))


def _read_table(packed: dict[str, Any], name: str, *, num: int | None = None) -> list[list[Any]]:
    """The columns of a table, in the order of `_TABLES`. `row` must index `num` rollouts, in rising order."""
    kinds = _TABLES[name]
    if name not in packed:
        return [[] for _ in kinds]
    _check_keys(packed[name], kinds.keys(), where=f"{name}: ")
    columns = [_checked_list(packed[name][column], kind, f"{name}: {column}") for column, kind in kinds.items()]
    if len(set(map(len, columns))) > 1:
        raise WireError(f"{name}: its columns must be equally long")
    if num is not None and columns[0]:
        rows = columns[0]
        if rows[0] < 0 or rows[-1] >= num or rows != sorted(rows):
            raise WireError(f"{name}: rows must name {num} rollouts in order")
    return columns


def _read_array(value: object, dtype: type, length: int, name: str) -> Array:
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.shape != (length,):
        raise WireError(f"{name} must be an array of {length} {np.dtype(dtype).name}")
    return frozen(value, dtype, name)


def _checked_list(values: Any, kind: type | tuple[type, ...], name: str) -> list[Any]:  # noqa: ANN401
    """Return `values`, or raise unless they are a list of exactly these types."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(values, list) or not set(kinds).issuperset(map(type, values)):
        raise WireError(f"{name} must be a list of {' or '.join(each.__name__ for each in kinds)}")
    return values


def _check_keys(packed: Any, required: Any, *, optional: Any = frozenset(), where: str = "") -> None:  # noqa: ANN401
    if not isinstance(packed, dict):
        raise WireError(f"{where}must be a dict, not a {type(packed).__name__}")
    if not required <= packed.keys() <= required | optional:
        odd = sorted(map(str, (required - packed.keys()) | (packed.keys() - required - optional)))
        raise WireError(f"{where}missing or unknown keys: {', '.join(odd)}")


@contextlib.contextmanager
def _wire_errors(what: str) -> Iterator[None]:
    """Turn any error that malformed data causes into a `WireError`."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise WireError(f"packed {what}: {error}") from error
