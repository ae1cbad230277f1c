"""One end of a collective transport in a process of its own: commands come as lines of JSON, answers go back the same way."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time

import torch

from headrace.errors import SyncError
from headrace.sync.collective.transport import CollectiveTransport

_turn = 0
"""The command that is carried out; answers to an earlier one are nobody's."""


def say(**message):
    print(json.dumps({"turn": _turn, **message}), flush=True)


class Target:
    """Writes as slowly as it is told to, and may give up."""

    def __init__(self, num_bytes, *, slow=0.0, give_up_after=None, fail_after=None):
        self.num_bytes = num_bytes
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self.views = {"all": self.buffer}
        self.num_written = 0
        self.num_checks = 0
        self._slow, self._give_up_after, self._fail_after = slow, give_up_after, fail_after

    def write(self, start, piece):
        if self._fail_after is not None and self.num_written >= self._fail_after:
            raise OSError("the disk is full")
        self.buffer[start : start + piece.numel()] = piece
        self.num_written += 1
        if self._slow:
            say(wrote=self.num_written)
            time.sleep(self._slow)

    def check(self):
        self.num_checks += 1
        if self._give_up_after is not None and self.num_written >= self._give_up_after:
            raise SyncError("this engine is leaving")


def left():
    """Threads and sockets of this process."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "sockets": sum(link.startswith(("socket:", "anon_inode:[eventpoll]")) for link in links),
    }


def timed(work):
    began = time.monotonic()
    try:
        more = work()
    except (SyncError, OSError) as error:
        say(error=str(error), kind=type(error).__name__, seconds=time.monotonic() - began, sha="")
    else:
        say(error="", seconds=time.monotonic() - began, **more)


def fetch(transport, command, name):
    options = {key: command[key] for key in ("slow", "give_up_after", "fail_after") if key in command}
    target = Target(command["place"]["bytes"], **options)

    def work():
        transport.prepare([command["place"]])
        transport.fetch(command["place"], target, receiver=name)
        group = next(iter(transport.groups.values()), None)
        sha = hashlib.sha256(target.buffer.numpy().tobytes()).hexdigest()
        return {"sha": sha, "group": group.id if group else "", "checks": target.num_checks}

    timed(work)


def push(transport, command):
    key = command["key"]
    transport.allocate(key, command["num_bytes"]).fill_(7)
    say(place=transport.post(key, {}))

    def work():
        transport.push(key, command["receivers"])
        return {}

    timed(work)


def main():
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    torch.ones(4).sum()
    before = left()
    transport = CollectiveTransport(**settings)
    say(is_up=True)
    global _turn
    for line in sys.stdin:
        command = json.loads(line)
        _turn = command["turn"]
        if command["do"] == "fetch":
            fetch(transport, command, name)
        elif command["do"] == "push":
            push(transport, command)
        elif command["do"] == "close":
            began = time.monotonic()
            transport.close()
            seconds = time.monotonic() - began
            until = time.monotonic() + 30.0  # a thread that was joined leaves the system's list a moment later
            while left() != before and time.monotonic() < until:
                time.sleep(0.01)
            names = [thread.name for thread in threading.enumerate() if "headrace" in thread.name]
            say(before=before, after=left(), seconds=seconds, names=names)


if __name__ == "__main__":
    main()
