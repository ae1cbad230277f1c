"""Runs Python that a model wrote, away from everything else, and says how it went. docs/security.md has the threat model.

Each program runs in a cell of its own (`headrace.score.cell`): Linux namespaces without privileges, resource limits, an empty
environment. Without these nothing is run: `SandboxUnavailable` says what is missing. What decides is never in the same cell as
the code: expected output is compared here, and tests written in Python run in a second cell (`headrace.score.cell_programs`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.score.signature import RewardError

if TYPE_CHECKING:
    from collections.abc import Sequence

_SETUP_SECONDS = 30.0
"""For a cell to be built, which is not the program's time."""
_END_SECONDS = 20.0
"""For the kernel to end all processes of a cell."""
_GRACE_SECONDS = 0.3
"""For the code to end after its tests: how it ended may say why they failed."""
_ROOM = "/cell.py"
"""Where cells have `cell_programs.py`."""


class SandboxUnavailable(RewardError):
    """The isolation that code needs cannot be had on this machine, so no code is run."""


class SandboxError(RuntimeError):
    """The sandbox failed, or the tests did; not the code."""


class Verdict(enum.StrEnum):
    """How a run of code ended."""

    PASSED = "passed"
    FAILED = "failed"
    """It raised, exited with another status than 0, printed too much, or did not pass its tests."""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    CRASHED = "crashed"
    """It was killed by a signal."""


@dataclass(frozen=True)
class CodeResult:
    verdict: Verdict
    passed: int
    """Tests passed; without tests, 1 if the program ended with status 0."""
    total: int
    output: str = ""
    """What the last program printed, of the first bytes that were allowed."""
    errors: str = ""
    """The end of what it wrote to stderr, or what its first failed test said."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one program."""

    seconds: float = 10.0
    """Wall-clock time, and CPU time of each process; from when the cell is ready."""
    memory_mb: int = 512
    """Address space of each process."""
    processes: int = 4
    """Processes and threads at once."""
    disk_mb: int = 16
    """Of /tmp, its only writable folder, which is held in memory."""
    files: int = 64
    """Open at once, by one process."""
    output_kb: int = 256
    """Printed to stdout, and to stderr."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise RewardError(f"code: {name} = {value!r}: must be a number above 0")


def run_code(
    code: str,
    *,
    tests: str | Sequence[str | dict[str, str]] = (),
    stdin: str = "",
    **limits: Any,  # noqa: ANN401
) -> CodeResult:
    """Run a program and judge it by `tests`, or by its exit status if there are none. A test is Python text that uses the names
    that the code defines and raises unless it is right (`assert add(1, 2) == 3`), or a dict: the `input` that the program reads
    from stdin and the `output` that it must print, but for blanks at the ends of lines. `limits` are fields of `Limits`: for
    each program with an input, and for all tests that are Python text together."""
    allowed, listed = Limits(**limits), [tests] if isinstance(tests, str) else list(tests)
    _check_available(dataclasses.replace(allowed, seconds=_SETUP_SECONDS))
    texts = [test for test in listed if isinstance(test, str)]
    pairs = [test for test in listed if not isinstance(test, str)]
    if not listed:
        return _run_alone(code, stdin, allowed)
    results = [_compared(_run_alone(code, pair["input"], allowed), pair["output"]) for pair in pairs]
    if texts:
        results.append(_run_tests(code, texts, allowed))
    worst = next((result for result in results if result.verdict is not Verdict.PASSED), results[-1])
    passed, total = (sum(getattr(result, name) for result in results) for name in ("passed", "total"))
    return CodeResult(worst.verdict, passed, total, worst.output, worst.errors)


def _run_alone(code: str, stdin: str, limits: Limits) -> CodeResult:
    order = {"command": [*_python(), "/tmp/main.py"], "texts": {"main.py": code}, "stdin": stdin}
    with contextlib.ExitStack() as stack:
        cell = stack.enter_context(_Cell(order, limits))
        _watch([cell], seconds=limits.seconds)
    verdict = cell.verdict()
    return CodeResult(verdict, int(verdict is Verdict.PASSED), 1, cell.text(1), cell.text(2)[-2000:])


def _compared(result: CodeResult, expected: str) -> CodeResult:
    if result.verdict is not Verdict.PASSED or _lines(result.output) == _lines(expected):
        return result
    return CodeResult(Verdict.FAILED, 0, 1, result.output, "its output is not the one expected")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _run_tests(code: str, tests: list[str], limits: Limits) -> CodeResult:
    """The code and the tests in a cell each."""
    asked = {"command": [*_python(), _ROOM, "code"], "texts": {"solution.py": code}, "stdin": ""}
    texts = {f"test_{number}.py": test for number, test in enumerate(tests)}
    asking = {"command": [*_python(), _ROOM, "tests", str(len(tests))], "texts": texts, "stdin": ""}
    with contextlib.ExitStack() as stack:
        ours, theirs = (stack.enter_context(each) for each in socket.socketpair())
        source, verdicts = os.pipe()
        stack.callback(os.close, source)
        tested = stack.enter_context(_Cell(asked, limits, gets=[theirs.fileno()]))
        tester = stack.enter_context(_Cell(asking, limits, gets=[ours.fileno(), verdicts]))
        for each in (ours, theirs):
            each.close()  # so that the tests see when the code ends
        os.close(verdicts)
        tester.streams[source] = bytearray()
        _watch([tester, tested], seconds=limits.seconds)
        said = [json.loads(line) for line in tester.streams[source].splitlines() if line.endswith(b"}")]
    for each in said:
        if "broken" in each:
            raise SandboxError(f"the tests cannot be run: {each['broken']}")
    passed = sum("passed" in each for each in said)
    if passed == len(tests):
        return CodeResult(Verdict.PASSED, passed, passed, tested.text(1))
    found = [cell.verdict() for cell in (tester, tested)]
    verdict = next((each for each in (Verdict.TIMEOUT, Verdict.MEMORY, Verdict.CRASHED) if each in found), Verdict.FAILED)
    why = next((each["failed"] for each in said if "failed" in each), "") or tested.text(2)[-2000:]
    return CodeResult(verdict, passed, len(tests), tested.text(1), why)


class _Cell:
    """A process that builds a cell around itself and runs one program in it. Leaving it kills all of that."""

    def __init__(self, order: dict[str, Any], limits: Limits, *, gets: Sequence[int] = ()) -> None:
        """`gets`: descriptors for the program, which sees them as 3 and on."""
        self._order = {**order, **_surroundings(), "limits": _plain(limits)}
        self._most = limits.output_kb * 1024
        self.status: int | None = None
        self.is_late = self.has_flooded = self.has_started = self.has_hung_up = False
        self.streams: dict[int, bytearray] = {}
        """What came from each descriptor."""
        self._report, report = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("cell.py")), str(report), *map(str, gets)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                cwd="/",
                pass_fds=[report, *gets],
                start_new_session=True,
            )
        except OSError:
            os.close(self._report)
            raise
        finally:
            os.close(report)
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._places = {1: self._process.stdout.fileno(), 2: self._process.stderr.fileno()}
        self.streams |= {place: bytearray() for place in (self._report, *self._places.values())}

    def __enter__(self) -> _Cell:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        os.close(self._report)
        for pipe in (self._process.stdout, self._process.stderr):
            pipe.close()  # type: ignore[union-attr]

    def end(self) -> None:
        """Have the cell killed, and wait until nothing of it is left."""
        with contextlib.suppress(OSError):  # it did not read its order
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def text(self, place: int) -> str:
        return bytes(self.streams[self._places[place]]).decode(errors="replace")

    def verdict(self) -> Verdict:
        if self.is_late or self.status == -signal.SIGXCPU:
            return Verdict.TIMEOUT
        if self.has_flooded or self.status is None:
            return Verdict.FAILED
        if self.status > 0 and "MemoryError" in self.text(2)[-200:]:
            return Verdict.MEMORY
        return Verdict.PASSED if self.status == 0 else Verdict.FAILED if self.status > 0 else Verdict.CRASHED

    def read(self, place: int) -> bool:
        """Take what a descriptor has; False at its end, or if the program has printed too much."""
        data = os.read(place, 65536)
        self.streams[place] += data
        if place == self._report:
            self.has_hung_up = not data
            while b"\n" in self.streams[place]:
                line, _, rest = bytes(self.streams[place]).partition(b"\n")
                self.streams[place] = bytearray(rest)
                self._hear(line)
        elif len(self.streams[place]) > self._most:
            del self.streams[place][self._most :]
            self.has_flooded = True
        return bool(data)

    def _hear(self, line: bytes) -> None:
        if line == b"unshared":
            self._map_users()
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(self._order).encode() + b"\n")
            self._process.stdin.flush()
            return
        message = json.loads(line)
        if "error" in message:
            raise SandboxUnavailable(f"code cannot be isolated here: {message['error']}. {_ADVICE}")
        self.has_started |= "started" in message
        self.status = message.get("status")

    def _map_users(self) -> None:
        """Root becomes nobody; any other user is shown as nobody, which is the only mapping it may make."""
        folder, user, group = Path(f"/proc/{self._process.pid}"), os.geteuid(), os.getegid()
        try:
            if user == 0:
                (folder / "uid_map").write_text("0 0 1\n65534 65534 1\n")
                (folder / "gid_map").write_text("0 0 1\n65534 65534 1\n")
            else:
                (folder / "setgroups").write_text("deny")
                (folder / "uid_map").write_text(f"65534 {user} 1\n")
                (folder / "gid_map").write_text(f"65534 {group} 1\n")
        except OSError as error:
            raise SandboxUnavailable(f"code cannot be isolated here: mapping its user: {error}. {_ADVICE}") from error

    def check(self, *, is_over: bool) -> None:
        """Raise if it has ended without a word, or was not ready when the time for that was over."""
        if self.has_hung_up and self.status is None:
            raise SandboxError(f"a sandbox was killed: {self.text(2)[-500:]}")
        if is_over and not self.has_started:
            raise SandboxError(f"a sandbox was not ready within {_SETUP_SECONDS:g} s: {self.text(2)[-500:]}")


def _watch(cells: list[_Cell], *, seconds: float) -> None:
    """Until the program of the first cell ends, one of them has printed too much, or their time is over."""
    with selectors.DefaultSelector() as selector:
        for cell in cells:
            for place in cell.streams:
                selector.register(place, selectors.EVENT_READ, cell)
        setup = time.monotonic() + _SETUP_SECONDS
        deadline = math.inf
        while cells[0].status is None and not any(cell.has_flooded for cell in cells):
            now = time.monotonic()
            if deadline == math.inf and all(cell.has_started for cell in cells):
                deadline = now + seconds
            for cell in cells:
                cell.is_late = now >= deadline
            if now >= deadline:
                break
            _take(selector, min(deadline, setup if deadline == math.inf else math.inf) - now)
            for cell in cells:
                cell.check(is_over=time.monotonic() >= setup)
        grace = time.monotonic() + _GRACE_SECONDS
        while not cells[0].is_late and (left := grace - time.monotonic()) > 0 and any(cell.status is None for cell in cells):
            _take(selector, left)
        for cell in cells:
            cell.end()
        while selector.get_map() and not any(cell.has_flooded for cell in cells):
            _take(selector, 0.0)  # all have ended, so that each descriptor has an end


def _take(selector: selectors.BaseSelector, timeout: float) -> bool:
    """Read what has come; False if nothing did."""
    ready = selector.select(max(0.0, timeout))
    for key, _ in ready:
        if not key.data.read(key.fd):
            selector.unregister(key.fd)
    return bool(ready)


def _plain(limits: Limits) -> dict[str, int]:
    return {
        "cpu_seconds": math.ceil(limits.seconds) + 1,  # for children of which nobody waits; the clock ends the others first
        "memory": int(limits.memory_mb) << 20,
        "disk": int(limits.disk_mb) << 20,
        "files": int(limits.files),
        "processes": int(limits.processes),
    }


def _python() -> list[str]:
    """The interpreter's command as a cell sees it, links in its path resolved."""
    prefix, path = Path(sys.prefix), Path(sys.executable)
    path = prefix.resolve() / path.relative_to(prefix) if path.is_relative_to(prefix) else path.resolve()
    return [str(path), "-I", "-u"]


@functools.cache
def _surroundings() -> dict[str, Any]:
    """What a cell sees of this machine: the interpreter with its packages, system libraries, and harmless devices."""
    folders = {Path("/usr"), *(Path(each).resolve() for each in (sys.prefix, sys.base_prefix))}
    binds, links = [], [["/dev/shm", "/tmp"]]
    for top in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", top)
        if path.is_symlink():
            links.append([str(path), str(path.readlink())])
        elif path.is_dir():
            folders.add(path)
    kept = [path for path in folders if not any(path != other and path.is_relative_to(other) for other in folders)]
    files = ["/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
    binds = [[str(path), str(path)] for path in (*sorted(kept), *map(Path, files)) if path.exists()]
    binds.append([str(Path(__file__).with_name("cell_programs.py")), _ROOM])
    environment = {"HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"binds": binds, "links": links, "environment": environment, "is_root": os.geteuid() == 0}


@functools.lru_cache(maxsize=64)
def _check_available(limits: Limits) -> None:
    """Raise unless a program that does nothing passes under these limits, so that what is amiss here is not blamed on code."""
    if sys.platform != "linux":
        raise SandboxUnavailable(f"code cannot be isolated on {sys.platform}: it needs Linux namespaces")
    result = _run_alone("print('ready')", "", limits)
    if result.output != "ready\n":
        raise SandboxUnavailable(f"Python does not start in a sandbox with {limits}: {result.verdict}, {result.errors}")


_ADVICE = (
    "It needs Linux 5.14 or newer and unprivileged user namespaces: sysctl user.max_user_namespaces above 0, on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns = 0, in Docker --security-opt seccomp=unconfined"
)
