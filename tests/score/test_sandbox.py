"""Code that a model wrote: what it may not do, and that nothing it does makes it pass."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
from test_rewards import make_episode, make_sample

from headrace.records import InfraAbort, Scored
from headrace.score import (
    RewardError,
    RewardFunction,
    RewardScorer,
    RewardSettings,
    RewardWorkers,
    SandboxError,
    SandboxUnavailable,
    Verdict,
    code_tests,
    run_code,
    sandbox,
)
from headrace.score.code import find_code
from headrace.score.metric_log import MetricLog


@pytest.fixture(scope="module", autouse=True)
def _isolation():
    try:
        run_code("")
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def run(code: str, **how):
    return run_code(textwrap.dedent(code), **how)


def in_tmp() -> list[str]:
    """What a program sees in /tmp: itself, and this environment if it was made there."""
    prefixes = [Path(each).resolve() for each in (sys.prefix, sys.base_prefix)]
    return sorted({"main.py", *(each.parts[2] for each in prefixes if each.is_relative_to("/tmp"))})


def processes_with(text: str) -> list[str]:
    """Those on this machine whose arguments hold the text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_text()
        except OSError:
            continue
        found += [arguments] if text in arguments else []
    return found


# What a program may not do


def test_a_program_that_ends_well_passes_and_one_that_raises_fails() -> None:
    result = run("print(input())", stdin="ä\n")
    assert (result.verdict, result.passed, result.total, result.output) == (Verdict.PASSED, 1, 1, "ä\n")
    result = run("raise KeyError('bad')")
    assert result.verdict is Verdict.FAILED and "KeyError: 'bad'" in result.errors
    assert run("import sys; sys.exit(3)").verdict is Verdict.FAILED
    assert run("def f(:").verdict is Verdict.FAILED
    assert run("import sys; print(repr(sys.stdin.read()))").output == "''\n"  # it never waits for input


def test_usual_programs_run() -> None:
    code = """
        import asyncio, multiprocessing, sqlite3, subprocess, tempfile, threading
        found = []
        thread = threading.Thread(target=found.append, args=[1])
        thread.start()
        thread.join()
        asyncio.run(asyncio.sleep(0))
        with tempfile.TemporaryDirectory() as folder:
            sqlite3.connect(f"{folder}/base").execute("create table t (x)")
        with multiprocessing.Lock():
            process = multiprocessing.Process(target=exit)
        process.start()
        process.join()
        print(found, process.exitcode, subprocess.run(["/usr/bin/env", "true"]).returncode)
    """
    assert run(code).output == "[1] 0 0\n"


def test_packages_may_lie_in_the_temporary_folder(monkeypatch) -> None:
    """As those of an environment that was made there."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        Path(folder, "package").write_text("here")
        seen = sandbox._surroundings()
        monkeypatch.setattr(sandbox, "_surroundings", lambda: {**seen, "binds": [*seen["binds"], [folder, folder]]})
        assert run(f"print(open('{folder}/package').read(), open('/tmp/mine', 'w').write('abc'))").output == "here 3\n"
        assert "Read-only file system" in run(f"open('{folder}/package', 'w')").errors


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)", "input = __import__('time').sleep(60)"])
def test_a_program_that_does_not_end_is_ended(code) -> None:
    began = time.monotonic()
    assert run(code, seconds=0.5).verdict is Verdict.TIMEOUT
    assert time.monotonic() - began < 10


def test_memory_is_limited() -> None:
    assert run("held = [bytearray(10**7) for _ in range(10**6)]", memory_mb=128, seconds=20).verdict is Verdict.MEMORY


def test_memory_that_belongs_to_no_process_cannot_be_had() -> None:
    """It would outlive the process that took it, and count to none."""
    code = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        found = [libc.shmget(0, 1 << 20, 0o1777), libc.msgget(0, 0o1777), libc.semget(0, 1, 0o1777)]
        try:
            found.append(os.memfd_create("more"))
        except OSError:
            found.append(-1)
        print(found)
    """
    assert run(textwrap.dedent(code)).output.strip() == "[-1, -1, -1, -1]"


def test_a_crash_is_a_crash() -> None:
    assert run("import ctypes; ctypes.string_at(0)").verdict is Verdict.CRASHED


def test_output_is_limited() -> None:
    result = run("while True: print('x' * 1000)", output_kb=8)
    assert result.verdict is Verdict.FAILED and len(result.output) == 8 * 1024
    result = run("import sys\nwhile True: sys.stderr.write('x' * 1000)", output_kb=8)
    assert result.verdict is Verdict.FAILED and len(result.errors) <= 8 * 1024


def test_files_are_limited_in_size_and_number() -> None:
    big = run("file = open('/tmp/big', 'wb')\nwhile True: file.write(bytes(10**6))", disk_mb=4)
    assert big.verdict is Verdict.FAILED and "Error" in big.errors
    many = run("for number in range(10**6): open(f'/tmp/{number}', 'w').close()")
    assert many.verdict is Verdict.FAILED and "No space left" in many.errors
    held = run("held = [open('/dev/null') for _ in range(10**6)]")
    assert held.verdict is Verdict.FAILED and "Too many open files" in held.errors


def test_a_fork_bomb_stays_small() -> None:
    code = """
        import os, time
        children = 0
        for _ in range(1000):
            try:
                if os.fork() == 0:
                    time.sleep(60)
                children += 1
            except OSError:
                pass
        print(children)
    """
    assert run(code, processes=5).output == "4\n"
    assert run("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", seconds=0.5).verdict is Verdict.TIMEOUT


def test_it_sees_neither_the_environment_nor_the_files_nor_the_descriptors_of_its_launcher(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("A_SECRET", "hunter2")
    (tmp_path / "secret").write_text("hunter2")
    read_end, write_end = os.pipe()
    os.set_inheritable(read_end, True)
    code = f"""
        import os
        assert "A_SECRET" not in os.environ
        assert not os.path.exists("/proc") and not os.path.exists("/home") and not os.path.exists("/etc/passwd")
        assert not os.path.exists({str(tmp_path / "secret")!r}) and not os.path.exists({__file__!r})
        assert sorted(os.listdir("/tmp")) == {in_tmp()} and os.getcwd() == "/tmp"
        for number in range(3, 200):
            try:
                os.fstat(number)
            except OSError:
                continue
            raise AssertionError(number)
    """
    try:
        assert run(code).errors == ""
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of system calls")
def test_it_has_no_key_of_its_launcher() -> None:
    add_key, request_key, session = 248, 249, -3
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(add_key, b"user", b"headrace-test", b"hunter2", 7, session) < 0:
        pytest.skip("this machine forbids keyrings")
    assert libc.syscall(request_key, b"user", b"headrace-test", None, 0) > 0
    code = f"import ctypes; print(ctypes.CDLL(None).syscall({request_key}, b'user', b'headrace-test', None, 0))"
    assert run(code).output == "-1\n"


def test_it_reaches_no_network_not_even_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        result = run(f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5)")
    assert result.verdict is Verdict.FAILED and "unreachable" in result.errors


def test_it_reaches_no_other_process() -> None:
    code = """
        import os, signal
        assert os.getppid() == 1
        for target in (1, -1, os.getppid()):
            try:
                os.kill(target, signal.SIGKILL)
            except OSError:
                pass
        for number in range(3, 70_000):
            try:
                os.kill(number, 0)
            except OSError:
                continue
            raise AssertionError(number)
        print("alone")
        os.killpg(0, signal.SIGKILL)
    """
    result = run(code)
    assert result.output == "alone\n" and result.verdict is Verdict.CRASHED  # by its own hand


def test_it_has_no_rights() -> None:
    code = """
        import ctypes, errno, os, socket
        libc = ctypes.CDLL(None, use_errno=True)
        assert os.getuid() == os.geteuid() == 65534
        assert libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) < 0
        assert libc.unshare(0x00020000) < 0 and libc.unshare(0x10000000) < 0 and libc.ptrace(16, 1, 0, 0) < 0
        for family in ("AF_VSOCK", "AF_ALG", "AF_NETLINK", "AF_PACKET"):
            try:
                socket.socket(getattr(socket, family), socket.SOCK_RAW)
            except OSError as error:
                assert error.errno == errno.EAFNOSUPPORT
                continue
            raise AssertionError(family)
        socket.socketpair()
        for path in ("/usr/x", "/x", "/dev/x", "/cell.py"):
            try:
                open(path, "w")
            except OSError:
                continue
            raise AssertionError(path)
        for user in (0, 1000):
            try:
                os.setuid(user)
            except OSError:
                continue
            raise AssertionError(user)
    """
    assert run(code).errors == ""


def test_a_daemon_ends_with_its_program() -> None:
    code = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for descriptor in range(3):
                    os.close(descriptor)
                os.execv("/usr/bin/env", ["env", "sleep", "987.5"])
            os._exit(0)
        time.sleep(0.3)
        print("left one behind")
    """
    for how in ({}, {"seconds": 3.0}):
        result = run(code if not how else code + "\n        time.sleep(60)", **how)
        assert result.output == "left one behind\n"
        assert not processes_with("987.5")


def test_what_it_deletes_is_its_own_and_nothing_stays_for_the_next() -> None:
    code = f"""
        import os, shutil
        assert sorted(os.listdir(".")) == {in_tmp()}
        os.remove("main.py")
        open("/tmp/left", "w").write("x")
        shutil.rmtree("/usr/bin", ignore_errors=True)
        assert os.path.exists("/usr/bin/env")
    """
    assert run(code).errors == run(code).errors == ""


def test_the_code_ends_with_its_launcher(tmp_path) -> None:
    script = """
        from headrace.score import run_code
        run_code("print(1)")
        print("ready", flush=True)
        run_code("import os; os.execv('/usr/bin/env', ['env', 'sleep', '986.5'])", seconds=600)
    """
    launcher = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"
    _wait_for(lambda: processes_with("\0986.5"))
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    _wait_for(lambda: not processes_with("\0986.5"))


def _wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# Nothing but right answers passes

ADD = "def add(a, b):\n    return a + b\n"


def test_tests_see_what_the_code_defines() -> None:
    code = """
        import collections
        LIMIT = 7
        Point = collections.namedtuple("Point", "x y")
        class Solution:
            def __init__(self, start=0): self.start = start
            def twoSum(self, numbers, *, target): return [numbers.index(target - self.start), (1, {2}), b"x", 1j, None]
        def sort_in_place(values): values.sort()
        def fails(kind): raise {"value": ValueError, "own": Own}[kind]("no")
        class Own(Exception): pass
        def count(n):
            yield from range(n)
        def huge(): return 7 ** 20_000
        def inf(): return float("inf")
    """
    tests = """
        assert LIMIT == 7 and Point(1, 2) == (1, 2)
        assert Solution(1).twoSum([5, 6], target=7) == [1, (1, {2}), b"x", 1j, None]
        values = [3, 1, 2]
        sort_in_place(values)
        assert values == [1, 2, 3]
        assert list(count(3)) == [0, 1, 2] and huge() == 7 ** 20_000 and inf() > 1e308
        def check(candidate):
            try:
                candidate("value")
            except ValueError as error:
                assert str(error) == "no"
            else:
                raise AssertionError
        check(fails)
        try:
            fails("own")
        except RuntimeError as error:
            assert "Own" in str(error)
        assert Solution(5).start == 5
    """
    result = run(code, tests=textwrap.dedent(tests))
    assert (result.verdict, result.errors) == (Verdict.PASSED, "")


def test_each_test_is_counted() -> None:
    result = run(ADD, tests=["assert add(1, 2) == 3", "assert add(1, 1) == 3", "assert add([1], [2]) == [1, 2]", "add.x"])
    assert (result.verdict, result.passed, result.total) == (Verdict.FAILED, 2, 4)
    assert result.errors.startswith("AssertionError")


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "def add(a, b):\n    import sys; sys.exit(0)",
        "def add(a, b):\n    import os; os._exit(0)",
        "def add(a, b):\n    raise SystemExit(0)",
        "def add(a, b):\n    raise KeyboardInterrupt",
        "class Any:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b):\n    return Any()",
        "class Three(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b):\n    return Three(9)",
        "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.print = None\ndef add(a, b):\n    return 4",
        "print('{\"passed\": true}')\nprint('passed', flush=True)\ndef add(a, b):\n    return 4",
        "import os\nfor place in (1, 2, 3, 4, 5):\n"
        "    try: os.write(place, b'{\"passed\": true}\\n' * 9)\n    except OSError: pass\ndef add(a, b):\n    return 4",
        'import os\nos.write(3, b\'{"names": {"add": {"object": 0}}}\\n{"value": 4}\\n\' * 9)\nimport time; time.sleep(60)',
        "import os\nos.write(3, b'[' * 100000 + b'\\n')",
        'import os\nos.write(3, b\'{"names": {"add": 3, "assert": 1, "AssertionError": 5}}\\n\')',
        "open('/tmp/test_0.py', 'w').write('')\ndef add(a, b):\n    return 4",
        "",
    ],
)
def test_a_verdict_cannot_be_forged(code) -> None:
    result = run_code(code, tests=["assert add(1, 2) == 3"], seconds=3)
    assert result.verdict is not Verdict.PASSED and (result.passed, result.total) == (0, 1)


@pytest.mark.parametrize("test", ["abs(add(1, 2) - 3) < 1e-6", "math.isclose(add(1, 2), 3)", "all([add(1, 2) == 3])"])
def test_what_tests_judge_by_cannot_be_replaced(test) -> None:
    code = """
        import os
        def add(a, b): return 9
        def abs(value): return 0
        def all(values): return True
        class math:
            def isclose(*_): return True
    """
    assert run(code, tests=f"assert {test}").verdict is Verdict.FAILED
    forged = b'{"names": {"__builtins__": {"dict": []}, "add": 3, "abs": 0}}\n'
    assert run(f"import os; os.write(3, {forged!r})", tests="assert abs(add - 4) < 1e-6").verdict is Verdict.FAILED
    assert run("import math\ndef add(a, b): return a + b", tests=f"assert {test}").verdict is Verdict.PASSED


def test_what_a_test_cannot_read_of_the_codes_output_is_the_codes_failure() -> None:
    tests = ["import ast\nassert ast.literal_eval(said()) == 3"]
    assert run("def said():\n    return '3 +'", tests=tests).verdict is Verdict.FAILED
    assert run("def said():\n    return '3'", tests=tests).verdict is Verdict.PASSED


def test_code_cannot_turn_its_failure_into_one_of_the_sandbox() -> None:
    for kind in ("ImportError", "SyntaxError", "MemoryError", "OSError", "Broken", "Ended"):
        assert run(f"class Broken(Exception): pass\nEnded = Broken\ndef add(a, b): raise {kind}", tests="add(1, 2)").passed == 0


def test_limits_hold_while_tests_run() -> None:
    for body, verdict in (
        ("while True: pass", Verdict.TIMEOUT),
        ("return bytearray(1 << 40)", Verdict.MEMORY),
        ("__import__('ctypes').string_at(0)", Verdict.CRASHED),
        ("print('x' * 10**7)", Verdict.FAILED),
        ("return 'x' * (40 << 20)", Verdict.FAILED),
    ):
        result = run(f"def add(a, b):\n    {body}", tests=["assert add(1, 2) == 3"], seconds=1.0 if "while" in body else 20)
        assert result.verdict is verdict, (body, result)


def test_output_is_compared_where_the_code_cannot_see_it() -> None:
    tests = [{"input": "1 2\n", "output": "3\n"}, {"input": "4 4\n", "output": "8"}]
    right = run("print(sum(map(int, input().split())), ' ')", tests=tests)
    assert (right.verdict, right.passed, right.total) == (Verdict.PASSED, 2, 2)
    wrong = run("print(3)", tests=tests)
    assert (wrong.verdict, wrong.passed, wrong.total) == (Verdict.FAILED, 1, 2)
    assert run("print(3); raise SystemExit(1)", tests=tests).passed == 0


@pytest.mark.parametrize("tests", ["assert add(", "import no_such_module", "add(len, 1)"])
def test_tests_that_cannot_run_are_not_the_codes_fault(tests) -> None:
    with pytest.raises(SandboxError, match="the tests cannot be run"):
        run(ADD, tests=tests)


# Fails closed


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs the program unshare")
def test_without_namespaces_nothing_is_run_and_the_error_says_what_to_do() -> None:
    script = "from headrace.score import run_code; run_code('print(5)')"
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "SandboxUnavailable: code cannot be isolated here: a user namespace" in result.stderr
    assert "user.max_user_namespaces" in result.stderr and "5" not in result.stdout


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs the program unshare")
def test_a_user_without_privileges_gets_the_same_isolation() -> None:
    script = "from headrace.score import run_code; print(run_code('import os; print(os.getuid()); os.setuid(0)'))"
    command = ["unshare", "--user", "--map-user=1000", "--map-group=1000", sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "output='65534\\n'" in result.stdout and "Errno" in result.stdout, result.stderr


@pytest.mark.parametrize("memory_mb", [0.1, 1, 2, 4, 8])  # none at all, some for the fork but not for the program, …
def test_limits_that_python_cannot_start_under_are_refused(memory_mb) -> None:
    with pytest.raises(SandboxUnavailable, match="does not start"):
        run_code("", memory_mb=memory_mb)


def test_a_limit_must_be_above_zero() -> None:
    with pytest.raises(RewardError, match="seconds = 0: must be a number above 0"):
        run_code("", seconds=0)


# The reward


def test_code_is_found_in_a_completion() -> None:
    assert find_code("x = 1") == "x = 1"
    assert find_code("So:\n```python\na = 1\n```\nand\n```\nb = 2\n```\nThen\n```json\n{}\n```") == "b = 2\n"
    assert find_code("```py\ncut = 1\n") == "cut = 1\n"


def test_what_the_policy_causes_is_worth_nothing_and_what_the_tests_cause_is_not_scored() -> None:
    workers = RewardWorkers(2, timeout=60.0)
    answers = {0: ADD, 1: "def add(a, b): return 3", 2: "while True: pass", 3: ADD}
    tests = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
    episodes = [make_episode(number, tests=tests if number < 3 else ["import no_such_module"]) for number in answers]
    log = {}
    for share, rewards in ((False, [1.0, 0.0, 0.0]), (True, [1.0, 0.5, 0.0])):
        reward = RewardFunction(code_tests, options={"share": share, "seconds": 1.0})
        scorer = RewardScorer(
            [(reward, 1.0)],
            decode=lambda rollout: f"```python\n{answers[rollout.index]}\n```",
            settings=RewardSettings(attempts=1),
            workers=workers,
        )
        outcomes = [episode.outcome for episode in asyncio.run(scorer.score(episodes))]
        assert outcomes[:3] == list(map(Scored, rewards))
        assert isinstance(outcomes[3], InfraAbort) and "no_such_module" in outcomes[3].reason
        log = scorer.take_logged()
    assert log["code/passed"] == [1.0, 3] and log["code/failed"] == [1.0, 3] and log["code/timeout"] == [1.0, 3]
    workers.close()


def test_a_recipe_names_it_and_a_process_runs_it() -> None:
    workers = RewardWorkers(timeout=60.0, num_processes=1)
    reward = RewardFunction(code_tests, reference="headrace.score:code_tests")
    sample = make_sample(ADD, tests=["assert add(1, 2) == 3"])
    assert asyncio.run(reward.score([sample], attempts=1, workers=workers, log=MetricLog())) == [1.0]
    workers.close()


def test_many_run_at_once() -> None:
    results: list[Verdict] = []
    threads = [threading.Thread(target=lambda: results.append(run_code("print(1)").verdict)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [Verdict.PASSED] * 8
