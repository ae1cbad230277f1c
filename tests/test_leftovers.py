"""What killed runs leave behind: removed by the next one, and only if it provably belongs to nobody."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import leftovers
from headrace.leftovers import Claim, sweep

PREFIX = "headrace-12345-abcd"


def names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def fill(place: Path, prefix: str = PREFIX) -> None:
    """A segment, a folder with a socket in it, and a link to something precious."""
    (place / f"{prefix}-1-0").write_bytes(b"weights")
    (place / f"{prefix}-sockets" / "deep").mkdir(parents=True)
    (place / f"{prefix}-sockets" / "s").touch()
    (place / f"{prefix}-link").symlink_to(place / "precious", target_is_directory=True)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    return tmp_path


def dead(place: Path, prefix: str = PREFIX) -> None:
    """A run whose processes are all gone: the system let go of its lock."""
    claim = Claim(place, prefix)
    fill(place, prefix)
    assert claim._descriptor is not None
    os.close(claim._descriptor)


def test_what_a_dead_run_left_is_removed_and_nothing_else(place: Path) -> None:
    dead(place)
    others = {f"{PREFIX}0-1-0", "headrace-12345-1-0", "headrace-bench", "headrace-x.lock", "psm_0"}
    for name in others:
        (place / name).touch()
    sweep(place)
    assert names(place) == others | {"precious"} and (place / "precious" / "file").exists()


def test_a_living_runs_are_kept_whatever_their_age_or_number(place: Path) -> None:
    claim = Claim(place, PREFIX)  # no process has that number
    fill(place)
    for path in (*place.iterdir(), place):
        os.utime(path, (0, 0), follow_symlinks=False)
    before = names(place)
    sweep(place)
    assert names(place) == before
    claim.release()
    assert names(place) == {"precious"}


@pytest.mark.parametrize("whose", ["another user's", "another host's", "nobody's", "a link"])
def test_what_is_not_provably_this_users_on_this_host_is_kept(place: Path, monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    dead(place)
    lock = place / f"{PREFIX}.lock"
    if whose == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    elif whose == "another host's":  # whose locks this one may not see
        lock.write_text("elsewhere\n0-0-0")
    elif whose == "nobody's":
        lock.unlink()
    else:
        lock.rename(place / "elsewhere")
        lock.symlink_to(place / "elsewhere")
    before = names(place)
    sweep(place)
    assert names(place) == before


@pytest.mark.parametrize(
    ("theirs", "is_removed"),
    [
        ("here\nthis boot", True),
        ("a container\nthis boot", True),
        ("here\nanother boot", False),  # another host of that name, or the same one before it was started anew
        ("here", True),
        ("elsewhere", False),
        ("", False),
    ],
)
def test_a_host_is_told_by_its_boot_and_by_its_name_where_there_is_none(
    place: Path, monkeypatch: pytest.MonkeyPatch, theirs: str, is_removed: bool
) -> None:
    dead(place)
    (place / f"{PREFIX}.lock").write_text(theirs)
    monkeypatch.setattr(leftovers, "_this_host", lambda: ["here", "this boot"])
    sweep(place)
    assert (f"{PREFIX}-1-0" not in names(place)) == is_removed


def test_a_lock_that_a_sweep_removes_before_it_is_taken_is_made_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really, swept = fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not swept:
            swept.append(True)
            (place / f"{PREFIX}.lock").unlink()
        really(descriptor, how)

    monkeypatch.setattr(leftovers.fcntl, "flock", late)
    claim = Claim(place, PREFIX)
    fill(place)
    sweep(place)
    assert f"{PREFIX}-1-0" in names(place)
    claim.release()


def test_a_file_system_without_locks_is_named_and_hinders_nobody(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(leftovers.fcntl, "flock", none)
    claim = Claim(place, PREFIX)
    fill(place)
    sweep(place)
    assert f"{PREFIX}-1-0" in names(place) and f"{PREFIX}.lock" not in names(place)
    assert f"{place} cannot be locked" in caplog.text and f"remove {PREFIX}-*" in caplog.text
    claim.release()
    assert names(place) == {"precious"}


def test_a_killed_process_holds_nothing(place: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from headrace.leftovers import Claim
place = Path({str(place)!r})
claim = Claim(place, {PREFIX!r})
(place / "{PREFIX}-1-0").touch()
print("held", flush=True)
time.sleep(600)
"""
    root = str(Path(__file__).parents[1])
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root})
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"held\n"
        sweep(place)
        assert f"{PREFIX}-1-0" in names(place)
        process.send_signal(signal.SIGKILL)
        process.wait()
    sweep(place)
    assert names(place) == {"precious"}


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    sweep(tmp_path / "none")
