"""The benchmark of parcels runs, on a small one; its figures are not looked at."""

from __future__ import annotations

from headrace.bench import parcels


def test_it_measures_every_way_there_is() -> None:
    rows = {row.name: row.value for row in parcels.run(num_bytes=5_000_001, rounds=1)}
    assert len(rows) == 6 and all(value > 0 for value in rows.values())
