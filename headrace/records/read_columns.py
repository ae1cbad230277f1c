"""The other half of `headrace.records.columns`: columns from elsewhere, checked as a whole and made rollouts again."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.records.batch import Batch
from headrace.records.frames import WireError
from headrace.records.rollout import MOST_LOGPROB, TOKEN_ARRAYS, Rollout
from headrace.records.sampling import Call, FinishReason, InfraAbort, Invalid, Sampling, SamplingMask, Scored, Source
from headrace.records.validate import frozen, trusted, trusted_many

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence, Set

    from headrace.records.sampling import Outcome
    from headrace.records.validate import Array

REASONS = tuple(FinishReason)
SETTINGS = tuple(f.name for f in dataclasses.fields(Sampling) if f.name != "seed")
OPTIONAL = frozenset({"calls", "parent", "rewards", "step_rewards", "scored", "unscored", "routing", "mask", "columns"})
ESCAPES = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
"""What a value of another shape than ours may raise on its way through; a `WireError` says so."""


def unpack_rollouts(packed: Any) -> list[Rollout]:  # noqa: ANN401  (whatever came)
    """The rollouts of `pack_rollouts`, each array a view of its column."""
    try:
        return _Unpacked(packed).rollouts()
    except WireError:
        raise
    except ESCAPES as error:
        raise WireError(f"not packed rollouts: {error}") from error


def unpack_samplings(packed: Any) -> list[Sampling]:  # noqa: ANN401
    """The samplings of `pack_samplings`."""
    try:
        _check_keys(packed, "samplings", required={"settings", "numbers"})
        numbers = _table(packed["numbers"], ("sampling", "seed"), None, "samplings: numbers")
        return _samplings(packed["settings"], codes=numbers["sampling"], seeds=numbers["seed"])
    except WireError:
        raise
    except ESCAPES as error:
        raise WireError(f"not packed samplings: {error}") from error


def unpack_batch(packed: Any) -> Batch:  # noqa: ANN401
    """The batch of `pack_batch`."""
    columns = ("advantages", "weights")
    settings = ("loss", "constants", "correction", "correction_constants", "kl", "kl_weight", "version")
    try:
        _check_keys(packed, "batch", required={"rollouts", *columns, *settings})
        _listed([packed["loss"], packed["correction"], packed["kl"]], (str,), "batch: loss, correction and kl")
        rollouts = unpack_rollouts(packed["rollouts"])
        total = sum(map(len, rollouts))
        arrays = {name: _column(packed[name], np.float32, total, f"batch: {name}") for name in columns}
        return Batch.from_columns(rollouts, **arrays, **{name: packed[name] for name in settings})
    except WireError:
        raise
    except ESCAPES as error:
        raise WireError(f"not a packed batch: {error}") from error


_REQUIRED = frozenset({"ids", "episodes", "groups", "policies", "lineages", "numbers", *TOKEN_ARRAYS})
_NUMBERS = ("index", "length", "policy", "lineage", "calls")
_CALL_NUMBERS = ("start", "stop", "engine", "reason", "sampling", "seed")
_NO_CALLS: dict[str, Any] = {
    "engines": [],
    "settings": [],
    "numbers": np.zeros((len(_CALL_NUMBERS), 0), dtype=np.int64),
    "times": np.zeros((2, 0)),
}


class _Unpacked:
    """Packed rollouts whose columns have been checked, as the constructor of `Rollout` would check each."""

    def __init__(self, packed: Any) -> None:  # noqa: ANN401
        _check_keys(packed, "rollouts", required=_REQUIRED, optional=OPTIONAL)
        self._packed: dict[str, Any] = packed
        self.ids: list[str] = _listed(packed["ids"], (str,), "ids")
        self._num = len(self.ids)
        self._numbers = _table(packed["numbers"], _NUMBERS, self._num, "numbers")
        self._lengths = self._numbers["length"]
        self._offsets = _offsets(self._lengths, "numbers: length", total=None)
        self._slices = list(map(slice, self._offsets[:-1].tolist(), self._offsets[1:].tolist()))
        total = int(self._offsets[-1])
        self._tokens = {name: _column(packed[name], dtype, total, name) for name, dtype in TOKEN_ARRAYS.items()}
        self._check_tokens()

    def rollouts(self) -> list[Rollout]:
        packed, num = self._packed, self._num
        columns: dict[str, Sequence[Any]] = {
            "id": self.ids,
            "episode": _listed(packed["episodes"], (str,), "episodes", length=num),
            "group": _listed(packed["groups"], (str,), "groups", length=num),
            "index": self._numbers["index"].tolist(),
            "policy": _chosen(_listed(packed["policies"], (str,), "policies"), self._numbers["policy"], "policy"),
            "lineage": _chosen(_listed(packed["lineages"], (str,), "lineages"), self._numbers["lineage"], "lineage"),
            "parent": self._parents(),
            **{name: self.split(array) for name, array in self._tokens.items()},
            **self._calls(),
            "expert_routing": self._routing(),
            "sampling_mask": self._masks(),
            "rewards": self._rewards(),
            "step_rewards": self._step_rewards(),
            "columns": self._columns(),
            "outcome": self._outcomes(),
            "media": [None] * num,
        }
        return trusted_many(Rollout, columns, num=num)

    def split(self, column: Array) -> list[Array]:
        """A column of tokens as one view for each rollout."""
        return list(map(column.__getitem__, self._slices))

    # What every rollout has

    def _check_tokens(self) -> None:
        """Each check is a reduction that holds no array; which token it was is looked up when there is one."""
        token_ids, source, loss_mask, logprobs, versions = self._tokens.values()
        if loss_mask.view(np.uint8).max(initial=0) > 1:
            self._refuse_token(loss_mask.view(np.uint8) > 1, "loss_mask holds a value that is neither true nor false")
        if source.view(np.uint8).max(initial=0) > max(Source):
            self._refuse_token(source.view(np.uint8) > max(Source), "source holds a value that is not a Source")
        if token_ids.min(initial=0) < 0:
            self._refuse_token(token_ids < 0, "token_ids holds a negative id")
        sampled = source == Source.SAMPLED
        if (wrong := loss_mask > sampled).any():
            self._refuse_token(wrong, "loss_mask is True on a token that was not sampled")
        if versions.min(initial=-1) < -1 or ((versions >= 0) != sampled).any():
            wrong = (versions < -1) | ((versions >= 0) != sampled)
            self._refuse_token(wrong, "versions must be ≥ 0 on sampled tokens and -1 elsewhere")
        is_in_range = logprobs.min(initial=0) > -np.inf and logprobs.max(initial=0) <= MOST_LOGPROB  # a NaN is not
        if not is_in_range or ((logprobs != 0) > sampled).any():
            wrong = ~np.isfinite(logprobs) | (logprobs > MOST_LOGPROB) | ((logprobs != 0) > sampled)
            self._refuse_token(wrong, "logprobs must be finite and ≤ 0 on sampled tokens and 0 elsewhere")
        self._num_sampled = np.zeros(len(sampled) + 1, dtype=np.int64)
        """How many of the tokens before each were sampled."""
        np.cumsum(sampled, out=self._num_sampled[1:])

    def _calls(self) -> dict[str, list[Any]]:
        packed = self._packed.get("calls", _NO_CALLS)
        _check_keys(packed, "calls", required=_NO_CALLS.keys())
        numbers = _table(packed["numbers"], _CALL_NUMBERS, None, "calls: numbers")
        start, stop, counts, total = numbers["start"], numbers["stop"], self._numbers["calls"], len(numbers["start"])
        self._check_spans(_offsets(counts, "numbers: calls", total=total), counts, start, stop)
        times = _table(packed["times"], ("started", "finished"), total, "calls: times", dtype=np.float64)
        columns: dict[str, Sequence[Any]] = {
            "start": start.tolist(),
            "stop": stop.tolist(),
            "engine": _chosen(_listed(packed["engines"], (str,), "calls: engines"), numbers["engine"], "calls: engine"),
            "sampling": _samplings(packed["settings"], codes=numbers["sampling"], seeds=numbers["seed"]),
            "finish_reason": _chosen(REASONS, numbers["reason"], "calls: reason"),
            "started": times["started"].tolist(),
            "finished": times["finished"].tolist(),
        }
        made = iter(trusted_many(Call, columns, num=total))
        calls = [tuple(islice(made, count)) for count in counts.tolist()]
        return {"calls": calls, "finish_reason": [each[-1].finish_reason if each else None for each in calls]}

    def _check_spans(self, offsets: Array, counts: Array, start: Array, stop: Array) -> None:
        """In order, apart, inside the rollout, and over exactly the sampled tokens."""
        row = np.repeat(np.arange(self._num), counts)
        before = np.zeros(len(start) + 1, dtype=np.int64)
        before[1:] = stop
        before[offsets[:-1]] = 0  # the first call of each rollout; where it has none, the next one's
        self._refuse_rows(row[start > stop], "a call ends before it starts")
        late = (start < before[:-1]) | (stop > self._lengths[row])
        self._refuse_rows(row[late], "a call overlaps another or runs past the end")
        first = self._offsets[row]
        inside = self._num_sampled[first + stop] - self._num_sampled[first + start]
        self._refuse_rows(row[inside != stop - start], "calls do not cover exactly the sampled tokens")
        covered = np.bincount(row, weights=inside, minlength=self._num)
        sampled = self._num_sampled[self._offsets[1:]] - self._num_sampled[self._offsets[:-1]]
        self._refuse_rows(np.flatnonzero(covered != sampled), "calls do not cover exactly the sampled tokens")

    # What some have

    def _parents(self) -> list[tuple[str, int] | None]:
        result: list[tuple[str, int] | None] = [None] * self._num
        if "parent" in self._packed:
            packed = self._packed["parent"]
            _check_keys(packed, "parent", required={"rows", "ids", "at"})
            rows = self._rows(packed["rows"], "parent", is_rising=True)
            ids = _listed(packed["ids"], (str,), "parent: ids", length=len(rows))
            places = _column(packed["at"], np.int64, len(rows), "parent: at")
            self._refuse_rows(rows[(places < 0) | (places > self._lengths[rows])], "forked at a token it does not have")
            for row, id, at in zip(rows.tolist(), ids, places.tolist(), strict=True):
                result[row] = (id, at)
        return result

    def _rewards(self) -> list[dict[str, float]]:
        result: list[dict[str, float]] = [{} for _ in self.ids]
        if "rewards" in self._packed:
            packed = self._packed["rewards"]
            _check_keys(packed, "rewards", required={"names", "numbers", "values"})
            numbers = _table(packed["numbers"], ("row", "name"), None, "rewards: numbers")
            rows = self._rows(numbers["row"], "rewards")
            names = _chosen(_listed(packed["names"], (str,), "rewards: names"), numbers["name"], "rewards: name")
            values = self._finite_rows(packed["values"], rows, "rewards")
            for row, name, value in zip(rows.tolist(), names, values, strict=True):
                if name in result[row]:
                    raise WireError(f"rollout {self.ids[row]!r}: reward {name!r} is there twice")
                result[row][name] = value
        return result

    def _step_rewards(self) -> list[tuple[tuple[int, float], ...]]:
        found: dict[int, list[tuple[int, float]]] = defaultdict(list)
        if "step_rewards" in self._packed:
            packed = self._packed["step_rewards"]
            _check_keys(packed, "step_rewards", required={"rows", "at", "values"})
            rows = self._rows(packed["rows"], "step_rewards")
            places = _column(packed["at"], np.int64, len(rows), "step_rewards: at")
            self._refuse_rows(rows[(places < 0) | (places >= self._lengths[rows])], "step reward at a token it does not have")
            values = _column(packed["values"], np.float64, len(rows), "step_rewards: values")
            for row, at, value in zip(rows.tolist(), places.tolist(), values.tolist(), strict=True):
                found[row].append((at, value))
        return [tuple(found.get(row, ())) for row in range(self._num)]

    def _outcomes(self) -> list[Outcome | None]:
        result: list[Outcome | None] = [None] * self._num
        if "scored" in self._packed:
            packed = self._packed["scored"]
            _check_keys(packed, "scored", required={"rows", "values"})
            rows = self._rows(packed["rows"], "scored", is_rising=True)
            for row, reward in zip(rows.tolist(), self._finite_rows(packed["values"], rows, "scored"), strict=True):
                result[row] = Scored(reward)
        if "unscored" in self._packed:
            packed = self._packed["unscored"]
            _check_keys(packed, "unscored", required={"rows", "outcomes"})
            rows = self._rows(packed["rows"], "unscored", is_rising=True)
            outcomes = _listed(packed["outcomes"], (Invalid, InfraAbort), "unscored: outcomes", length=len(rows))
            for row, outcome in zip(rows.tolist(), outcomes, strict=True):
                if result[row] is not None:
                    raise WireError(f"rollout {self.ids[row]!r} has two outcomes")
                result[row] = outcome
        return result

    def _routing(self) -> list[Array | None]:
        result: list[Array | None] = [None] * self._num
        for row, _, array in self._blocks("routing"):
            if array.dtype not in (np.uint8, np.int16) or array.ndim != 3 or result[row] is not None:
                raise WireError(f"rollout {self.ids[row]!r}: expert_routing must be one [T, layers, top_k] of uint8 or int16")
            result[row] = array
        return result

    def _columns(self) -> list[dict[str, Array]]:
        result: list[dict[str, Array]] = [{} for _ in self.ids]
        for row, name, array in self._blocks("columns"):
            if name in result[row]:
                raise WireError(f"rollout {self.ids[row]!r}: column {name!r} is there twice")
            result[row][name] = array
        return result

    def _masks(self) -> list[SamplingMask | None]:
        result: list[SamplingMask | None] = [None] * self._num
        if "mask" in self._packed:
            packed = self._packed["mask"]
            _check_keys(packed, "mask", required={"rows", "counts", "ids"})
            rows = self._rows(packed["rows"], "mask", is_rising=True)
            tokens = _offsets(self._lengths[rows], "mask", total=None)
            ids = _column(packed["ids"], np.int32, None, "mask: ids")
            counts = _column(packed["counts"], np.int64, int(tokens[-1]), "mask: counts")
            places = _offsets(counts, "mask: counts", total=len(ids))
            for row, start, stop in zip(rows.tolist(), tokens[:-1].tolist(), tokens[1:].tolist(), strict=True):
                offsets = places[start : stop + 1] - places[start]
                offsets.flags.writeable = False
                result[row] = trusted(SamplingMask, {"offsets": offsets, "ids": ids[places[start] : places[stop]]})
        return result

    def _blocks(self, key: str) -> Iterator[tuple[int, str, Array]]:
        """(rollout, name, array) of each array in the blocks under `key`."""
        for block in _listed(self._packed.get(key, []), (dict,), key):
            _check_keys(block, key, required={"name", "rows", "values"})
            (name,) = _listed([block["name"]], (str,), f"{key}: name")
            rows = self._rows(block["rows"], f"{key} {name!r}", is_rising=True)
            offsets = _offsets(self._lengths[rows], f"{key} {name!r}", total=None)
            values = block["values"]
            if not isinstance(values, np.ndarray) or values.ndim < 1 or len(values) != offsets[-1]:
                raise WireError(f"{key} {name!r}: values must have a row for each of {offsets[-1]} tokens")
            values = frozen(values, None, name)
            for row, start, stop in zip(rows.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
                yield row, name, values[start:stop]

    # Refusals

    def _rows(self, value: object, name: str, *, is_rising: bool = False) -> Array:
        """Which rollouts: each at most once where they must rise."""
        rows = _column(value, np.int64, None, f"{name}: rows")
        if len(rows) and (rows.min() < 0 or rows.max() >= self._num or (is_rising and bool((np.diff(rows) <= 0).any()))):
            raise WireError(f"{name}: rows do not name rollouts in order")
        return rows

    def _finite_rows(self, value: object, rows: Array, name: str) -> list[float]:
        values = _column(value, np.float64, len(rows), f"{name}: values")
        self._refuse_rows(rows[~np.isfinite(values)], f"{name} must be finite")
        numbers: list[float] = values.tolist()
        return numbers

    def _refuse_token(self, wrong: Array, why: str) -> None:
        self._refuse_rows(np.searchsorted(self._offsets, [wrong.argmax()], side="right") - 1, why)

    def _refuse_rows(self, rows: Array, why: str) -> None:
        if len(rows):
            raise WireError(f"rollout {self.ids[int(rows[0])]!r}: {why}")


def _check_keys(
    packed: Any,  # noqa: ANN401
    name: str,
    *,
    required: Set[str],
    optional: frozenset[str] = frozenset(),
) -> None:
    if not isinstance(packed, dict):
        raise WireError(f"packed {name} must be a dict, not a {type(packed).__name__}")
    if not required <= packed.keys() <= required | optional:
        odd = sorted(map(str, (required - packed.keys()) | (packed.keys() - required - optional)))
        raise WireError(f"packed {name}: missing or unknown keys: {', '.join(odd)}")


def _column(value: object, dtype: type, length: int | None, name: str) -> Array:
    """A read-only array of exactly this dtype and, where it is given, length."""
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1 or length not in (None, len(value)):
        wanted = "" if length is None else f" {length}"
        raise WireError(f"{name} must be an array of{wanted} {np.dtype(dtype).name}")
    return frozen(value, dtype, name)


def _table(value: object, names: tuple[str, ...], width: int | None, where: str, *, dtype: type = np.int64) -> dict[str, Array]:
    """The rows of a read-only array of exactly this dtype, by name."""
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 2 or len(value) != len(names):
        raise WireError(f"{where} must be an array of {len(names)} rows of {np.dtype(dtype).name}")
    if width not in (None, value.shape[1]):
        raise WireError(f"{where} must be {width} wide, not {value.shape[1]}")
    return dict(zip(names, frozen(value, dtype, where), strict=True))


def _samplings(settings: object, *, codes: Array, seeds: Array) -> list[Sampling]:
    chosen = _chosen(_listed(settings, (Sampling,), "settings"), codes, "sampling")
    columns: dict[str, Sequence[Any]] = {name: list(map(attrgetter(name), chosen)) for name in SETTINGS}
    return trusted_many(Sampling, {**columns, "seed": seeds.tolist()}, num=len(codes))


def _offsets(lengths: Array, name: str, *, total: int | None) -> Array:
    """[n + 1] where each part begins, of lengths that are not negative and come to `total`, where that is given."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # A negative length, or a sum past 64 bits, shows as a step down.
    if bool((offsets[1:] < offsets[:-1]).any()) or total not in (None, int(offsets[-1])):
        raise WireError(f"{name} must be ≥ 0 and come to {'less than 2**63' if total is None else total}")
    return offsets


def _listed(value: Any, kinds: tuple[type, ...], name: str, *, length: int | None = None) -> list[Any]:  # noqa: ANN401
    if not isinstance(value, list) or not set(kinds).issuperset(map(type, value)):
        raise WireError(f"{name} must be a list of {' or '.join(kind.__name__ for kind in kinds)}")
    if length is not None:
        _check_length(value, length, name)
    return value


def _check_length(values: Sequence[Any], length: int, name: str) -> None:
    if len(values) != length:
        raise WireError(f"{name}: {len(values)} where there should be {length}")


def _chosen(values: Sequence[Any], codes: Array, name: str) -> list[Any]:
    if len(codes) and (codes.min() < 0 or codes.max() >= len(values)):
        raise WireError(f"{name}: a code is none of the {len(values)} there are")
    return list(map(values.__getitem__, codes.tolist()))
