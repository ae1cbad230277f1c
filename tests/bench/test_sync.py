"""The benchmark of weight sync runs, on small weights; its figures are not looked at."""

from __future__ import annotations

import pytest

from headrace.bench import sync


@pytest.mark.long
def test_a_publication_is_measured_over_each_transport_and_nothing_is_left(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sync, "shared_folder", lambda: tmp_path)
    with sync.Paths("small", "cpu", ["shared_memory", "http"]) as paths:
        seconds = paths.rounds(1)
        rows = sync.publish_rows(seconds, "small")
        rows += sync.shared_memory_rows(seconds["shared_memory"], paths.num_bytes, "small")
    assert {"publish", "offer", "pack", "fetch", "receive", "swap", "sender's copy", "engine's copy", "socket"} <= seconds[
        "http"
    ].keys()
    assert all(row.value > 0 for row in rows) and sum(row.goal == "≥ 0.8" for row in rows) == 2
    assert not list(tmp_path.iterdir())
