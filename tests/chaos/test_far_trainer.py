"""A trainer on hosts that share no folder with the launcher, nor with each other, and reach both over TCP alone."""

from __future__ import annotations

import contextlib
import json

import pytest
from faults import again, family, is_alive, start, wait_until
from helpers import mismatches
from test_hosts import TOKEN, free_port, other_host

from headrace.observe.sinks import read_metrics


@pytest.mark.long
def test_ranks_on_two_hosts_are_lost_with_one_and_start_again_with_a_third(tmp_path, monkeypatch):
    """Then one rank on the launcher's host resumes from the checkpoint that they wrote."""
    monkeypatch.setenv("HEADRACE_TOKEN", TOKEN)
    port, output = free_port(), tmp_path / "output"
    settings = ("--cluster.trainer_joins=true", "--train.parallel.shard=2", "--device=cpu", "--checkpoint.every=2")
    with contextlib.ExitStack() as stack:
        run = start(tmp_path, "--steps=100000", f"--cluster.listen=127.0.0.1:{port}", *settings, output=output)
        stack.callback(run.process.kill)
        hosts = [other_host(tmp_path / name, port, "--role=trainer") for name in ("first", "second")]
        for host in hosts:
            stack.callback(host.kill)

        def says(words: str) -> None:
            assert wait_until(lambda: words in output.read_text(), seconds=240), output.read_text()

        run.wait_for_version(4)
        says("trainer-1 on")
        assert wait_until(lambda: any((run.folder / "checkpoints").glob("step-*"))), "no checkpoint has arrived"
        ranks = [rank for host in hosts for rank in family(host.pid)]
        assert len(ranks) == 2
        hosts[0].kill()
        says("which is gone")
        assert wait_until(lambda: not any(map(is_alive, ranks))), "ranks of the lost trainer stay"
        stack.callback(other_host(tmp_path / "third", port, "--role=trainer").kill)
        says("resumed    version")
        run.wait_for_version(run.version + 3)
        run.process.terminate()
        run.process.wait(240)
        assert run.summary["status"] == "interrupted", output.read_text()
        assert run.summary["restarts"] == {"trainer-0": 1, "trainer-1": 1}
        assert not run.leftovers()
        logs = [tmp_path / name / "logs" for name in ("second", "third")]
        assert wait_until(lambda: not any(path.is_dir() for folder in logs for path in folder.iterdir())), "checkpoints stay"

    version, newest = (
        run.summary["version"],
        max((run.folder / "checkpoints").glob("step-*"), key=lambda path: path.stat().st_mtime),
    )
    files = json.loads((newest / "manifest.json").read_text())["files"]
    assert {"trainer/optimizer-00000.safetensors", "trainer/optimizer-00001.safetensors"} <= files.keys()
    here = ("--cluster.trainer_joins=false", "--cluster.listen=", "--train.parallel.shard=1")
    run = again(run, f"--steps={version + 2}", *here)
    said = run.finish()
    rows = read_metrics(run.folder / "metrics.jsonl")
    assert run.process.returncode == 0 and f"resumed    version {version}" in said, said
    assert [row["version"] for row in rows] == list(range(1, version + 3))
    assert max(mismatches(rows)) < 1e-4 and max(row["canary"] for row in rows) < 1e-4
