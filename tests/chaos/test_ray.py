"""Engines and a trainer that Ray places on several nodes: nodes are lost while the run trains."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

import pytest
from faults import command_of, family, start, wait_until

ray = pytest.importorskip("ray")


def process_of_trainer() -> tuple[int, int]:
    """Of Ray, and its child."""
    workers = [worker for raylet in family(os.getpid()) for worker in family(raylet)]
    [found] = [(each, pid) for each in workers for pid in family(each) if command_of(pid).endswith("child trainer")]
    return found


@pytest.mark.long
def test_a_run_goes_on_when_nodes_are_lost(tmp_path, monkeypatch):
    """Four raylets on this host: the head, and one node for each engine and the trainer. The run, bound by its engine, asks for
    another, and gives it back while its trainer binds it. Ray starts what is lost on a node that comes, first an engine, then
    the trainer, which then leaves and comes back."""
    from ray.cluster_utils import Cluster

    output = tmp_path / "output"
    with contextlib.ExitStack() as stack:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        stack.callback(cluster.shutdown)
        of_trainer, lost, _ = (cluster.add_node(num_cpus=count) for count in (2, 1, 1))
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        places = (
            "--orchestrate=ray",
            "--cluster.listen=127.0.0.1:0",
            "--device=cpu",
            "--train.threads=2",
            "--engine.max_count=2",
            "--staleness.max_lag=4",  # enough to do for an engine while others are scored
        )
        run = start(tmp_path, "--steps=100000", *places, output=output)
        stack.callback(run.process.kill)

        def says(words: str) -> None:
            assert wait_until(lambda: re.search(words, output.read_text()), seconds=240), output.read_text()

        says("engine-0 joined on")
        says(r"asking Ray for one more \(1 \+ 1\)")
        says("engine-1 joined on")

        def gives_back() -> bool:
            """With a trainer that is stopped for most of the time, and so binds the run."""
            os.kill(process_of_trainer()[1], signal.SIGSTOP)
            time.sleep(3)
            os.kill(process_of_trainer()[1], signal.SIGCONT)
            run.wait_for_version(run.version + 1)
            return "the engines idle: one of 2 is given back" in output.read_text()

        assert wait_until(gives_back, seconds=240), output.read_text()
        says("engine-1 on .* has left")
        says("engine-2 joined on")  # asked for again, it has the place of the other
        run.wait_for_version(run.version + 1)
        cluster.remove_node(lost)
        says(r"the run goes on with 1 of 2 engines|engine-[02] on .* has left")  # it leaves if Ray asks its process first
        has_left = output.read_text().count(" has left") > 1  # later the run may give one back that idles
        run.wait_for_version(run.version + 3)
        cluster.add_node(num_cpus=1)
        says("engine-3 joined on")
        run.wait_for_version(run.version + 3)
        assert wait_until(lambda: any((run.folder / "checkpoints").glob("step-*"))), "no checkpoint has arrived"

        def times_waited() -> int:
            return output.read_text().count("hosts offer 0 of the trainer's 1 ranks")

        before = times_waited()
        cluster.remove_node(of_trainer)
        assert wait_until(lambda: times_waited() > before, seconds=240), output.read_text()
        cluster.add_node(num_cpus=2)
        says("resumed    version")
        run.wait_for_version(run.version + 3)
        os.kill(process_of_trainer()[0], signal.SIGTERM)  # it leaves, and joins again
        says(r"resumed    version[\s\S]*resumed    version")
        run.wait_for_version(run.version + 3)
        run.process.terminate()
        run.process.wait(120)

    summary = run.summary
    assert summary["status"] == "interrupted"
    assert len(summary["engines_given_up"]) == 1 - has_left
    assert summary["restarts"] == {"trainer": 2}
    accounting = {
        name: value if isinstance(value, int) else sum(value.values()) for name, value in summary["accounting"].items()
    }
    submitted = accounting.pop("submitted")
    assert submitted == sum(value for name, value in accounting.items() if name != "evaluation") > 0
