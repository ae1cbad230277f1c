"""The inside of the sandbox, part one: builds a cell around itself, and starts one program in it (`headrace.score.sandbox`).

Run by path, as `python -I -S cell.py REPORT [DESCRIPTOR …]`, with nothing in its environment; so it imports nothing of ours. A
cell is a user, mount, process, network, IPC, host name and cgroup namespace of its own:

    launcher ── orders (stdin) ──► this process ── fork ──► init of the cell ── fork, exec ──► the program
             ◄─ "unshared", {"started"}, {"status"} or {"error"}: lines through REPORT ──┘

The program has no capability, no descriptor but its own, and a filter on its system calls. It sees the folders of the
interpreter, read-only, and an empty /tmp of bounded size. It has no network and no other process to see or signal. When its
init ends, the kernel kills all that is left in the cell. The init ends with the program, and is killed with this process; this
process ends with its launcher.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import select
import signal
import socket
import stat
import struct
import sys
from typing import Any

_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
"""CLONE_NEWUSER, NEWNS, NEWPID, NEWNET, NEWIPC, NEWUTS and NEWCGROUP."""
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_READ_ONLY, _NO_SETUID, _RECURSIVE, _HERE = 1, 2, 0x8000, -100
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_MNT_DETACH = 2
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_JOIN_SESSION_KEYRING = 1
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS = {
    "socket": (41, 198), "clone": (56, 220), "clone3": (435, 435), "mount_setattr": (442, 442), "pivot_root": (155, 41),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432), "fspick": (433, 433),
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "open_by_handle_at": (304, 265), "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104),
}  # fmt: skip
"""Numbers of system calls, on x86-64 and on ARM."""
NOBODY = 65534

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    report, *given = (_moved(int(text)) for text in sys.argv[1:])
    step = "a user namespace"
    try:
        _checked(libc.unshare(_NAMESPACES))
        os.write(report, b"unshared\n")
        order = json.loads(sys.stdin.buffer.readline())  # after the launcher has mapped the users
        step = "its folders"
        _build(order)
        step = "giving up rights"
        _give_up_rights(is_root=order["is_root"])
        step = "its init"
        alive, held = os.pipe()
        init = os.fork()
    except BaseException as error:  # noqa: BLE001  (told to the launcher, whatever it is)
        _tell(report, {"error": f"{step}: {error}"})
        os._exit(1)
    if init == 0:
        os.close(held)
        _be_init(order, report, given, alive)
    for descriptor in (1, 2, *given, report):
        os.close(descriptor)  # so that the launcher sees when the program closes them
    poll = select.poll()
    poll.register(0, 0)  # hangs up when the launcher is gone
    poll.register(os.pidfd_open(init), select.POLLIN)
    poll.poll()
    os.kill(init, signal.SIGKILL)
    os.waitpid(init, 0)  # returns when no process of the cell is left
    os._exit(0)


def _moved(descriptor: int) -> int:
    """Out of the way of those that the program gets, and closed when it starts."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100)
    os.close(descriptor)
    return high


def _be_init(order: dict[str, Any], report: int, given: list[int], alive: int) -> None:
    """Process 1 of the cell: starts the program and waits for it; when it ends, so do all others."""
    os.setsid()  # else the program could signal the process outside, which is of the same group and user
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the program may not trace it
    poll = select.poll()
    poll.register(alive, 0)
    if poll.poll(0):  # the parent ended before the first line
        os._exit(1)
    _tell(report, {"started": True})
    program = os.fork()
    if program == 0:
        try:
            _be_program(order, given)
        except BaseException as error:  # noqa: BLE001
            if isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM:
                os.write(2, b"MemoryError: under these limits no program starts\n")  # the order's fault, not the machine's
            else:
                _tell(report, {"error": f"its program: {error}"})
        os._exit(1)
    for descriptor in (0, 1, 2, *given):
        os.close(descriptor)
    while True:
        ended, status = os.wait()
        if ended == program:
            _tell(report, {"status": os.waitstatus_to_exitcode(status)})
            os._exit(0)


def _be_program(order: dict[str, Any], given: list[int]) -> None:
    os.setsid()
    source = os.open("/dev/null", os.O_RDONLY)
    if order["stdin"]:
        source = os.memfd_create("stdin", 0)
        with open(source, "wb", closefd=False) as file:
            file.write(order["stdin"].encode(errors="surrogatepass"))
        os.lseek(source, 0, os.SEEK_SET)
    os.dup2(source, 0)
    for place, descriptor in enumerate(given, start=3):
        os.dup2(descriptor, place)
    limits = order["limits"]
    for kind, soft, more in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_CPU, limits["cpu_seconds"], 1),
        (resource.RLIMIT_AS, limits["memory"], 0),
        (resource.RLIMIT_FSIZE, limits["disk"], 0),
        (resource.RLIMIT_NOFILE, limits["files"], 0),
        (resource.RLIMIT_NPROC, limits["processes"] + 2, 0),  # the two around it are of the same user
        (resource.RLIMIT_MEMLOCK, 0, 0),
    ):
        resource.setrlimit(kind, (soft, soft + more))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what it starts would too
        signal.signal(number, signal.SIG_DFL)
    _filter_calls()
    os.execve(order["command"][0], order["command"], order["environment"])


def _build(order: dict[str, Any]) -> None:
    """A new root with only what the order lists, in place of the old one."""
    sources = [(os.open(path, os.O_PATH), target) for path, target in order["binds"]]  # before /tmp is covered
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=1m")
    os.mkdir("/tmp/tmp")
    disk = order["limits"]["disk"]
    _mount("tmpfs", "/tmp/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=777,size={disk},nr_inodes=4096")
    for descriptor, target in sources:  # which may lie in /tmp, such as an environment that was made there
        place = f"/tmp{target}"
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.makedirs(place, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.close(os.open(place, os.O_CREAT | os.O_RDONLY))
        _mount(f"/proc/self/fd/{descriptor}", place, "", _MS_BIND | _MS_REC)
        _set_flags(place, _READ_ONLY | _NO_SETUID, _RECURSIVE)
        os.close(descriptor)
    for target, link in order["links"]:
        os.symlink(link, f"/tmp{target}")
    for name, text in order["texts"].items():
        with open(f"/tmp/tmp/{name}", "w", errors="surrogatepass") as file:
            file.write(text)
    os.chdir("/tmp")
    _checked(libc.syscall(_number("pivot_root"), b".", b"."))
    _checked(libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")
    _set_flags("/", _READ_ONLY, 0)
    os.chdir("/tmp")


def _give_up_rights(*, is_root: bool) -> None:
    if is_root:  # otherwise the cell knows no other user than nobody, who is the launcher's
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    # The launcher's keyring would be inherited. Where the call is forbidden, so it is to the program.
    libc.syscall(_number("keyctl"), _JOIN_SESSION_KEYRING, None)
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _checked(libc.capset(header, none))
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    result = libc.mount(source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None)
    _checked(result, target)


def _set_flags(path: str, flags: int, how: int) -> None:
    """Beside those that a mount has; `mount` would have to name these again."""
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    _checked(libc.syscall(_number("mount_setattr"), _HERE, path.encode(), how, attributes, ctypes.c_size_t(32)), path)


def _filter_calls() -> None:
    """Forbid system calls that programs do not need and attacks do: namespaces, tracing, keyrings, new kinds of sockets (one of
    them reaches the host of a virtual machine, whatever the network namespace). Other architectures' calls end the process."""
    load, equal, at_least, any_of, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000
    of = {name: _number(name) for name in _CALLS}
    rules = [(load, 0, 0, 4), (equal, 1, 0, _ARCHITECTURES[platform.machine()]), (give, 0, 0, kill), (load, 0, 0, 0)]
    rules += [(at_least, 0, 1, 0x40000000), (give, 0, 0, kill)]  # x86's third set of calls
    rules += [(equal, 0, 4, of["clone"]), (load, 0, 0, 16), (any_of, 0, 1, _NAMESPACES), (give, 0, 0, refuse | errno.EPERM)]
    rules += [(give, 0, 0, allow)]
    rules += [(equal, 0, 1, of["clone3"]), (give, 0, 0, refuse | errno.ENOSYS)]  # its flags cannot be seen; libc has the other
    families = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
    rules += [(equal, 0, len(families) + 3, of["socket"]), (load, 0, 0, 16)]
    rules += [(equal, len(families) - place, 0, family) for place, family in enumerate(families)]
    rules += [(give, 0, 0, refuse | errno.EAFNOSUPPORT), (give, 0, 0, allow)]
    for name in of.keys() - {"clone", "clone3", "socket"}:
        rules += [(equal, 0, 1, of[name]), (give, 0, 0, refuse | errno.EPERM)]
    program = b"".join(struct.pack("HBBI", *rule) for rule in [*rules, (give, 0, 0, allow)])
    held = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    _checked(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(header), 0, 0), "seccomp")


def _number(name: str) -> int:
    return _CALLS[name][platform.machine() != "x86_64"]


def _checked(result: int, what: str = "") -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what or None)


def _tell(report: int, message: dict[str, Any]) -> None:
    os.write(report, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
