"""The benchmark of weight sync runs, on small weights; its figures are not looked at."""

from __future__ import annotations

import pytest
import torch

from headrace.bench import sync, sync_http


def test_parcels_over_http_are_measured_every_way_there_is(monkeypatch) -> None:
    monkeypatch.setattr(sync_http, "NUM_BYTES", 50_000_010)
    rows = {row.name: row.value for row in sync_http.rows(quick=True)}
    assert len(rows) == 4 and all(value > 0 for value in rows.values())


@pytest.mark.long
def test_a_publication_is_measured_over_each_transport_and_nothing_is_left(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sync, "shared_folder", lambda: tmp_path)
    with sync.Paths("small", torch.device("cpu"), ["shared_memory", "files"]) as paths:
        seconds = paths.rounds(1)
        rows = sync._published(seconds, paths.num_bytes, "small")
    assert {"publish", "offer", "pack", "fetch", "receive", "swap", "copy here", "copy there"} <= seconds["files"].keys()
    assert all(row.value > 0 for row in rows) and sum(row.goal == "≥ 0.8" for row in rows) == 2
    assert not list(tmp_path.iterdir())
