"""A run in which processes are killed at random, for as long as you like, and what it leaves.

    python tools/soak.py                      half an hour, a kill every 30 seconds or so
    python tools/soak.py --minutes 1 --every 10

Two engines and a trainer on the CPU, with a tiny model. Every few seconds the memory and descriptors of the processes and the
files of the run are counted. At the end it compares the peaks of both halves of the time, prints a table, and exits with
status 1 if the accounting does not close, something grows, or anything is left behind.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "chaos")]

from faults import Running, is_alive, start, wait_until  # noqa: E402

ROLES = ("engine-0", "engine-1", "trainer")
SETTINGS = ("--steps=100000000", "--engine.count=2", "--engine.restarts=100000", "--train.restarts=100000")
QUIET = ("--observe.keep_rollouts_every=0", "--observe.trace=false", "--checkpoint.every=5")
GROWS = {"MB": 25.0, "descriptors": 3.0, "files": 3.0, "folders": 1.0, "in shared memory": 3.0}
"""By how much the second half's peak may exceed the first's, besides a tenth of it."""


def measure(run: Running) -> dict[str, float]:
    """What there is now; a process that is being started again is left out."""
    found: dict[str, float] = {}
    for name in ("launcher", *ROLES):
        try:
            pid = run.process.pid if name == "launcher" else run.role(name)
            status = Path(f"/proc/{pid}/status").read_text()
            found[f"{name.partition('-')[0]}, MB"] = int(status.partition("VmRSS:")[2].split()[0]) / 1024
            found[f"{name.partition('-')[0]}, descriptors"] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except (OSError, LookupError, IndexError):
            continue
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    checkpoints = [path for path in files if "checkpoints" in path.parts]
    found["run folder but for checkpoints, files"] = len(files) - len(checkpoints)
    found["checkpoints, folders"] = len({path.parts[path.parts.index("checkpoints") + 1] for path in checkpoints})
    found["checkpoints, MB"] = sum(path.stat().st_size for path in checkpoints if path.exists()) / 1e6
    found["sockets and segments, in shared memory"] = sum(
        len(list(path.iterdir())) if path.is_dir() else 1 for path in run.leftovers()
    )
    return found


def soak(run: Running, *, seconds: float, every: float, chance: random.Random) -> tuple[Counter[str], list[dict[str, float]]]:
    """Kill until the time is up, then wait until all processes are back."""
    kills: Counter[str] = Counter()
    samples: list[dict[str, float]] = []
    began = time.monotonic()
    next_kill, next_sample = began + every, began + min(20.0, seconds / 10)
    while time.monotonic() < began + seconds and run.process.poll() is None:
        time.sleep(0.1)
        if time.monotonic() >= next_sample:
            next_sample += min(5.0, seconds / 20)
            samples.append(measure(run))
        if time.monotonic() >= next_kill:
            next_kill += every * (2 / 3 + chance.random() * 2 / 3)
            name = chance.choice(ROLES)
            try:
                run.hit(name, signal.SIGKILL)
                kills[name] += 1
            except LookupError:
                kills[f"{name}, while it was started again"] += 1
    wait_until(lambda: len(run.roles()) == len(ROLES) or run.process.poll() is not None, seconds=120)
    run.wait_for_version(run.version + 2)
    return kills, samples


def halves(samples: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """The peak of every figure in both halves; a process that has just been started again has yet to load most of it."""
    series: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.items():
            series[name].append(value)
    return {
        name: (max(values[: len(values) // 2]), max(values[len(values) // 2 :]))
        for name, values in series.items()
        if len(values) > 1
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two kills, on average")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        run = start(Path(folder), *SETTINGS, *QUIET, output=Path(folder) / "output.txt")
        try:
            run.wait_for_version(2)
            roles_before = run.roles()
            chance = random.Random(options.seed)
            kills, samples = soak(run, seconds=60 * options.minutes, every=options.every, chance=chance)
            roles = {*roles_before, *run.roles()}
            run.process.send_signal(signal.SIGINT)
            run.process.wait(timeout=120)
        finally:
            run.process.kill()
        is_gone = wait_until(lambda: not run.leftovers() and not any(map(is_alive, roles)))
        summary, output = run.summary, (Path(folder) / "output.txt").read_text()
    counts = summary["accounting"]
    settled = sum(count for name, count in counts.items() if name not in ("submitted", "evaluation"))
    checks = {
        f"ended by its interrupt (status {run.process.returncode})": run.process.returncode == 130,
        f"accounting: {counts['submitted']} submitted = {settled} in its terms": counts["submitted"] == settled,
        f"version {summary['version']} is trained": summary["version"] >= 2,
        f"{summary['restarts']} restarts": sum(summary["restarts"].values()) >= sum(map(kills.get, ROLES, [0] * 3)),
        "no process, socket or shared memory is left": is_gone,
    }
    print(f"{options.minutes:g} minutes, version {summary['version']}, killed: {dict(sorted(kills.items()))}")
    print(f"{'peak of':44} {'first half':>12} {'second half':>12}")
    for name, (before, after) in halves(samples).items():
        limit = 1.1 * before + GROWS[name.partition(", ")[2]]
        checks[f"{name} does not grow"] = after <= limit
        print(f"{name:44} {before:12.1f} {after:12.1f}")
    for what, holds in checks.items():
        print(f"{'ok' if holds else 'NOT SO':7} {what}")
    if not all(checks.values()):
        print(output[-5000:])
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
