"""Processes of a run killed and stopped at moments nobody chose. Each test starts the command a user starts."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import numpy as np
import pytest
from faults import Running, again, command_of, family, is_alive, start, wait_until
from helpers import books_close, mismatches, same_weights, small_run

from headrace.errors import command
from headrace.observe.inspect import read_rollouts
from headrace.observe.sinks import read_metrics

ENDLESS = "--steps=100000"  # a run that a test ends: on a busy machine it may train many steps before the test sees the first


def check_finished(run: Running, output: str) -> None:
    """Every version was trained once, on tokens whose logprobs and versions are right."""
    assert run.process.returncode == 0, output
    summary, rows = run.summary, read_metrics(run.folder / "metrics.jsonl")
    assert summary["status"] == "finished" and books_close(summary) and summary["accounting"]["failed"] == 0
    assert [row["version"] for row in rows] == list(range(1, summary["steps"] + 1))
    assert max(mismatches(rows)) < 1e-4 and max(row["canary"] for row in rows) < 1e-4
    assert max(row["lag_max"] for row in rows) <= 1
    assert not run.leftovers() and not run.roles()


@pytest.mark.long
def test_a_killed_engine_is_started_again_and_its_rollouts_go_on(tmp_path):
    sizes = ("--model.context=4096", "--sampling.max_tokens=3000", "--sampling.min_tokens=3000")
    run = start(tmp_path, *sizes, "--train.batch=4", "--engine.slots=4", "--steps=4")
    run.wait_for_version(1)
    time.sleep(2)  # a rollout takes longer than the second after which it has been told of
    run.hit("engine-0", signal.SIGKILL)
    output = run.finish()
    check_finished(run, output)
    assert "engine-0" in output and "killed by SIGKILL" in output and "started again (1 of 3)" in output
    assert "logs/engine-0.log" in output
    resumed = 0
    for step in range(1, 5):
        for rollout in read_rollouts(run.folder, step=step)[1]:
            versions = rollout.versions[rollout.is_sampled]
            assert (np.diff(versions) >= 0).all() and rollout.num_sampled == 3000
            resumed += len(rollout.calls) > 1
    assert resumed, "no rollout was resumed from its prefix"


@pytest.mark.long
def test_an_engine_killed_at_any_moment_loses_nothing(tmp_path):
    """Six times, also while weights are on their way: they nearly always are, a version takes a few hundredths of a second."""
    run = start(tmp_path, "--engine.restarts=6", "--steps=60", "--engine.count=2")
    chance = random.Random(0)
    for _ in range(6):
        run.wait_for_version(run.version + 2)
        time.sleep(chance.random() * 0.2)
        name = f"engine-{chance.randrange(2)}"
        if run.process.poll() is not None:
            break
        try:
            pid = run.hit(name, signal.SIGKILL)
        except LookupError:  # it is being started again
            continue
        assert wait_until(lambda pid=pid: not is_alive(pid))
    output = run.finish()
    assert run.process.returncode == 0, output
    assert run.summary["status"] == "finished" and books_close(run.summary)
    assert not run.leftovers()


@pytest.mark.long
def test_an_engine_that_cannot_be_kept_ends_the_run_by_name(tmp_path):
    run = start(tmp_path, "--engine.restarts=0", ENDLESS)
    run.wait_for_version(2)
    run.hit("engine-0", signal.SIGKILL)
    output = run.finish()
    assert run.process.returncode == 1
    assert "engine-0" in output and "killed by SIGKILL" in output and "engine.restarts = 0 are spent" in output
    assert "resumes from version" in output and not run.leftovers() and not run.roles()


@pytest.mark.long
def test_a_stopped_engine_is_named_and_replaced(tmp_path):
    run = start(tmp_path, "--heartbeat=3")
    run.wait_for_version(3)
    pid = run.hit("engine-0", signal.SIGSTOP)
    began = time.monotonic()
    assert wait_until(lambda: not is_alive(pid), seconds=20), "it was neither named nor replaced"
    assert time.monotonic() - began < 12
    output = run.finish()
    check_finished(run, output)
    assert "engine-0" in output and "has not answered for" in output and "stopped by SIGSTOP" in output


@pytest.mark.parametrize(("number", "words"), [(signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSTOP, "has not answered for")])
@pytest.mark.long
def test_a_lost_trainer_without_restarts_ends_the_run_and_the_same_command_resumes(tmp_path, number, words):
    run = start(tmp_path, "--train.restarts=0", "--heartbeat=3")
    run.wait_for_version(6)
    run.hit("trainer", number)
    output = run.finish()
    assert run.process.returncode == 1
    assert "trainer" in output and words in output and "logs/trainer.log" in output and "train.restarts = 0 are spent" in output
    newest = max(int(path.name.removeprefix("step-")) for path in (run.folder / "checkpoints").glob("step-*"))
    assert newest >= 4 and newest % 4 == 0, "the checkpoint is every fourth version"
    assert f"the same command resumes from version {newest}: {command()} train {tmp_path / 'recipe.toml'}" in output
    assert not run.leftovers() and not run.roles()
    resumed = again(run)
    output = resumed.finish()
    check_finished(resumed, output)
    assert "resumed    version" in output


@pytest.mark.long
@pytest.mark.parametrize("version", [0, 6])
def test_a_killed_trainer_is_started_again_from_the_newest_checkpoint(tmp_path, version):
    """Also before the first one. The engine's process stays."""
    run = start(tmp_path)
    run.wait_for_version(max(version, 1))
    engine = run.role("engine-0")
    run.hit("trainer", signal.SIGKILL)
    run.wait_for_version(version + 8)
    assert run.role("engine-0") == engine
    output = run.finish()
    check_finished(run, output)
    assert "trainer" in output and "killed by SIGKILL" in output and "(1 of 2) in 1 s" in output
    assert "started again from version" in output and run.summary["restarts"] == {"trainer": 1}


@pytest.mark.long
def test_a_trainer_killed_at_any_moment_costs_no_rollout(tmp_path):
    """Also while it starts, while it saves, and while engines load its weights or start themselves."""
    run = start(tmp_path, "--engine.restarts=50", "--train.restarts=50", "--steps=60", "--engine.count=2")
    chance, trained = random.Random(1), 0
    for _ in range(8):
        run.wait_for_version(run.version + 1)
        time.sleep(chance.random())
        for name in chance.choice([("trainer",), ("trainer", "engine-0"), ("engine-1", "trainer")]):
            with contextlib.suppress(LookupError):
                run.hit(name, signal.SIGKILL)
                trained += name == "trainer"
    output = run.finish()
    check_finished(run, output)
    assert run.summary["restarts"]["trainer"] == trained and not run.summary["engines_given_up"]


@pytest.mark.long
def test_a_trainer_killed_between_two_parts_of_a_step_costs_no_group(tmp_path):
    """Killed when it has the gradient of a version's first part alone, as the second is about to be sent."""
    taken: list[tuple[int, list[str]]] = []

    class Killer:
        num_killed = 0

        def on_rollouts(self, state, groups):
            taken.append((state.version, [episode.id for group in groups for episode in group.episodes]))
            if state.version >= 3 and not self.num_killed and [version for version, _ in taken].count(state.version) == 2:
                time.sleep(1)  # it has trained the first, and the checkpoint is written
                (pid,) = [pid for pid in family(os.getpid()) if command_of(pid).endswith("headrace.launch.child trainer")]
                os.kill(pid, signal.SIGKILL)
                self.num_killed += wait_until(lambda: not is_alive(pid))

    def slow(completion: str, **_: object) -> float:
        time.sleep(0.02)  # so that groups come one after the other
        return 1.0 / (1 + len(completion))

    parts, killer = {"mini_batches": 1, "stream_parts": 4}, Killer()
    how = {"train": parts, "steps": 8, "staleness": {"max_lag": 1}, "checkpoint": {"every": 1}, "orchestrate": "local"}
    run = small_run(tmp_path / "run", callbacks=[killer], reward=slow, observe={"keep_rollouts_every": 1}, **how)
    assert killer.num_killed == 1 and run.summary["restarts"] == {"trainer": 1}
    assert run.summary["status"] == "finished" and books_close(run.summary)
    assert [row["version"] for row in read_metrics(run.folder / "metrics.jsonl")] == list(range(1, 9))
    trained = [rollout.episode for step in range(1, 9) for rollout in read_rollouts(run.folder, step=step)[1]]
    assert len(set(trained)) == len(trained) == run.summary["accounting"]["trained"] == 8 * 16
    assert {each for _, ids in taken for each in ids} == set(trained), "the parts that were lost are trained in the end"


@pytest.mark.long
def test_a_killed_trainer_changes_no_bit_of_an_exact_run(tmp_path):
    whole, broken = (start(tmp_path / name, "--exact=true", "--staleness.max_lag=0") for name in ("whole", "broken"))
    broken.wait_for_version(6)
    broken.hit("trainer", signal.SIGKILL)
    for run in (whole, broken):
        output = run.finish()
        assert run.process.returncode == 0, output
    assert broken.summary["restarts"] == {"trainer": 1}
    assert same_weights(whole.summary["checkpoint"], broken.summary["checkpoint"])


@pytest.mark.long
def test_with_its_restarts_spent_an_engine_is_done_without(tmp_path):
    run = start(tmp_path, "--engine.restarts=0", "--engine.count=2")
    run.wait_for_version(3)
    run.hit("engine-1", signal.SIGKILL)
    output = run.finish()
    check_finished(run, output)
    assert "engine.restarts = 0 are spent" in output and "the run goes on with 1 of 2 engines" in output
    assert run.summary["engines_given_up"] == ["engine-1"]
    assert read_metrics(run.folder / "metrics.jsonl")[-1]["engines"] == 1


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_saves_and_leaves_nothing(tmp_path, number):
    run = start(tmp_path, ENDLESS)
    run.wait_for_version(5)
    roles = run.roles()
    assert len(roles) == 2 and run.leftovers()
    run.process.send_signal(number)
    output = run.finish()
    assert run.process.returncode == 130 and "saved" in output, output
    assert run.summary["status"] == "interrupted" and run.summary["version"] >= 5
    assert not any(map(is_alive, roles)) and not run.leftovers()
    checkpoints = [path.name for path in (run.folder / "checkpoints").iterdir()]
    assert f"step-{run.summary['version']}" in checkpoints


@pytest.mark.long
def test_asked_twice_it_stops_at_once(tmp_path):
    assert start(tmp_path, "--heartbeat=300", ENDLESS).is_ended_by_the_second_signal()


@pytest.mark.long
def test_a_killed_launcher_leaves_nothing_either(tmp_path):
    run = start(tmp_path)
    run.wait_for_version(3)
    roles = run.roles()
    run.process.kill()
    run.process.wait()
    assert wait_until(lambda: not any(map(is_alive, roles))), "processes outlive their launcher"
    assert wait_until(lambda: not run.leftovers()), run.leftovers()
    resumed = again(run)  # the lock went with its holder
    check_finished(resumed, resumed.finish())


@pytest.mark.long
def test_what_a_killed_launcher_had_scored_is_in_the_journal(tmp_path):
    """Killed several times, between two checkpoints: what it had scored with weights of the last one is used."""
    settings = ("--buffer.journal_gb=0.1", "--staleness.max_lag=4", "--buffer.max_gb=2e-5")
    run = start(tmp_path, *settings)
    for version in (5, 9, 14):
        run.wait_for_version(version)
        run.process.kill()
        run.process.wait()
        assert list((run.folder / "journal").iterdir())
        run = again(run)
    output = run.finish()
    assert run.process.returncode == 0 and "groups in the journal that need not be generated again" in output, output
    summary, rows = run.summary, read_metrics(run.folder / "metrics.jsonl")
    assert summary["status"] == "finished" and books_close(summary) and summary["accounting"]["failed"] == 0
    assert summary["groups_from_journal"] > 0 and [row["version"] for row in rows] == list(range(1, summary["steps"] + 1))
    assert max(mismatches(rows)) < 1e-4 and max(row["lag_max"] for row in rows) <= 4
    assert not (run.folder / "journal").exists()


def test_stopped_while_it_starts_it_leaves_nothing(tmp_path):
    run = start(tmp_path)
    assert wait_until(lambda: len(run.roles()) == 2)
    roles = run.roles()
    run.process.send_signal(signal.SIGTERM)
    run.finish()
    assert run.process.returncode == 130
    assert not any(map(is_alive, roles)) and not run.leftovers()


@pytest.mark.long
def test_two_runs_in_one_folder_are_refused(tmp_path):
    run = start(tmp_path, ENDLESS)
    run.wait_for_version(1)
    second = again(run, ENDLESS)
    output = second.finish()
    assert second.process.returncode == 2 and "in use by another process" in output
    run.process.send_signal(signal.SIGINT)
    run.finish()
