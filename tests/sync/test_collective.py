"""The collective transport between processes: whole parcels, and every way in which an end can fail."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headrace.errors import SyncError
from headrace.sync.collective.channel import accept
from headrace.sync.collective.transport import CollectiveTransport

DEADLINE = 3.0
LATEST = DEADLINE + 2.0
"""Seconds by which both ends have given up: the deadline, half a second for the sender's word, and a slow machine."""
BUCKET = 1 << 20
TOKEN = "of the test"
SETTINGS = {"token": TOKEN, "deadline": DEADLINE, "bucket": BUCKET}
LONG = 40 * BUCKET + 17
SLOW = 0.15


class Child:
    """A process with one end in it."""

    def __init__(self, name, **settings):
        self.name = name
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("collective_child.py")), name, json.dumps({**SETTINGS, **settings})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        )
        self._lines = queue.Queue()
        self._turn = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def tell(self, do, **command):
        self._turn += 1
        self.process.stdin.write(json.dumps({"do": do, "turn": self._turn, **command}) + "\n")
        self.process.stdin.flush()

    def wait_for(self, field, seconds=60.0):
        """The next answer to the last command that has the field; those before it are passed over."""
        until = time.monotonic() + seconds
        while True:
            answer = self._lines.get(timeout=max(until - time.monotonic(), 0.01))
            if answer["turn"] == self._turn and field in answer:
                return answer

    def end(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()


class Pool:
    """Processes that live as long as the module, made anew when a test has killed one."""

    def __init__(self):
        self._children = {}

    def get(self, *names):
        new = [name for name in names if name not in self._children or self._children[name].process.poll() is not None]
        for name in new:
            self._children[name] = Child(name)
        for name in new:
            self._children[name].wait_for("is_up")
        return [self._children[name] for name in names]

    def end(self):
        for child in self._children.values():
            child.end()


@pytest.fixture(scope="module")
def pool():
    pool = Pool()
    pool.get("a", "b", "c")  # together, not one after another
    yield pool
    pool.end()


@pytest.fixture
def sender():
    transport = CollectiveTransport(**SETTINGS)
    yield transport
    transport.close()


def parcel(sender, key, num_bytes):
    """Random bytes under the key: where, and their hash."""
    buffer = sender.allocate(key, num_bytes)
    assert buffer.dtype == torch.uint8 and buffer.shape == (num_bytes,) and buffer.data_ptr() % 256 == 0
    buffer.random_(0, 256)
    return sender.post(key, {"all": buffer}), hashlib.sha256(buffer.numpy().tobytes()).hexdigest()


def move(sender, key, num_bytes, children):
    """One whole transfer, and the id of the group it took."""
    place, sha = parcel(sender, key, num_bytes)
    for child in children:
        child.tell("fetch", place=place)
    sender.push(key, [child.name for child in children])
    answers = [child.wait_for("sha") for child in children]
    assert [(answer["error"], answer["sha"]) for answer in answers] == [("", sha)] * len(children)
    sender.free(key)
    return {answer["group"] for answer in answers}


class Push:
    """A push in a thread: when it ended, and of what."""

    def __init__(self, sender, key, receivers):
        self.error = None
        self._thread = threading.Thread(target=self._run, args=(sender, key, receivers))
        self._thread.start()

    def _run(self, sender, key, receivers):
        try:
            sender.push(key, receivers)
        except SyncError as error:
            self.error = str(error)
        self.ended_at = time.monotonic()

    def result(self, since):
        self._thread.join(120)
        assert not self._thread.is_alive()
        assert self.error is not None, "the push succeeded"
        return self.error, self.ended_at - since


def start_slowly(sender, children, key="slow", **options):
    """A transfer that is under way: every receiver has written something and would need six seconds more."""
    place, _ = parcel(sender, key, LONG)
    for child in children:
        child.tell("fetch", place=place, slow=SLOW, **options)
    push = Push(sender, key, [child.name for child in children])
    for child in children:
        child.wait_for("wrote")
    return push


def said_seconds(words, error):
    """How many an error says that something took."""
    found = re.search(rf"{words} (\d+\.\d) s", error)
    assert found, error
    return float(found[1])


@pytest.mark.parametrize("num_bytes", [0, 1, BUCKET - 1, BUCKET, 2 * BUCKET, 5 * BUCKET, 5 * BUCKET + 3])
def test_a_parcel_arrives_whole(sender, pool, num_bytes):
    move(sender, "one", num_bytes, pool.get("a"))
    move(sender, "three", num_bytes, pool.get("a", "b", "c"))


def test_the_group_is_kept_while_the_receivers_are_the_same(sender, pool):
    first = move(sender, "1", 3 * BUCKET, pool.get("a", "b"))
    assert move(sender, "2", 9 * BUCKET, pool.get("a", "b")) == first
    with_a_late_joiner = move(sender, "3", 3 * BUCKET, pool.get("a", "b", "c"))
    assert len(with_a_late_joiner) == 1 and with_a_late_joiner != first
    assert move(sender, "4", 3 * BUCKET, pool.get("c", "a")) not in (first, with_a_late_joiner)


def test_one_parcel_can_be_pushed_again(sender, pool):
    a, b = pool.get("a", "b")
    place, sha = parcel(sender, "again", 3 * BUCKET)
    for child in (a, b):
        child.tell("fetch", place=place)
        sender.push("again", [child.name])
        assert child.wait_for("sha")["sha"] == sha


def test_a_receiver_that_never_comes_is_named_at_both_ends(sender, pool):
    (a,) = pool.get("a")
    place, _ = parcel(sender, "absent", LONG)
    a.tell("fetch", place=place)
    began = time.monotonic()
    error, seconds = Push(sender, "absent", ["a", "nobody"]).result(began)
    assert "'nobody' has not come" in error and "1 of 2 receivers are here" in error
    assert DEADLINE <= seconds < LATEST
    answer = a.wait_for("error")
    assert answer["kind"] == "SyncError" and "'nobody' has not come" in answer["error"]
    assert answer["seconds"] < LATEST
    move(sender, "next", 2 * BUCKET, [a])


def test_the_target_is_asked_a_few_times_a_second(sender, pool):
    (a,) = pool.get("a")
    place, _ = parcel(sender, "later", BUCKET)
    a.tell("fetch", place=place)
    time.sleep(1.0)
    sender.push("later", ["a"])
    answer = a.wait_for("error")
    assert answer["error"] == "" and answer["checks"] >= 4


def test_a_sender_that_never_pushes(sender, pool):
    (a,) = pool.get("a")
    place, _ = parcel(sender, "idle", LONG)
    a.tell("fetch", place=place)
    answer = a.wait_for("error")
    assert "nothing has come from the sender for" in answer["error"]
    assert DEADLINE <= answer["seconds"] < LATEST


def test_a_receiver_killed_midway(sender, pool):
    a, b, c = pool.get("a", "b", "c")
    push = start_slowly(sender, [a, b, c])
    began = time.monotonic()
    a.process.kill()  # the rank that passes buckets on to another
    error, seconds = push.result(began)
    assert "receiver 'a' is gone" in error and "of 41 buckets" in error
    assert seconds < LATEST
    for child in (b, c):
        assert "receiver 'a' is gone" in child.wait_for("error")["error"]
    sender.free("slow")
    move(sender, "next", 5 * BUCKET, pool.get("a", "b", "c"))


def test_a_receiver_stopped_midway(sender, pool):
    a, b, c = pool.get("a", "b", "c")
    push = start_slowly(sender, [a, b, c])
    began = time.monotonic()
    b.process.send_signal(signal.SIGSTOP)
    try:
        error, seconds = push.result(began)
        assert DEADLINE <= said_seconds("receiver 'b' has not been heard from for", error) < LATEST
        assert "of 41 buckets written: a " in error and seconds < LATEST
        for child in (a, c):
            assert "receiver 'b'" in child.wait_for("error")["error"]
        sender.free("slow")
        move(sender, "without it", 5 * BUCKET, [a, c])
    finally:
        b.process.send_signal(signal.SIGCONT)
    assert b.wait_for("error")["kind"] == "SyncError"
    move(sender, "with it", 5 * BUCKET, [a, b, c])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sender_killed_or_stopped_midway(pool, how):
    a, b, sender = pool.get("a", "b", "sender")
    sender.tell("push", key="doomed", num_bytes=LONG, receivers=["a", "b"])
    place = sender.wait_for("place")["place"]
    for child in (a, b):
        child.tell("fetch", place=place, slow=SLOW)
    for child in (a, b):
        child.wait_for("wrote")
    began = time.monotonic()
    sender.process.send_signal(how)
    for child in (a, b):
        answer = child.wait_for("error")
        if how == signal.SIGKILL:
            assert "the sender is gone" in answer["error"]
        else:
            assert DEADLINE <= said_seconds("nothing has come from the sender for", answer["error"]) < LATEST
        assert answer["kind"] == "LinkError" and "of 41 buckets written by" in answer["error"]
    assert time.monotonic() - began < LATEST
    sender.end()
    healthy = CollectiveTransport(**SETTINGS)
    try:
        move(healthy, "next", 5 * BUCKET, [a, b])
    finally:
        healthy.close()


def test_half_a_bucket_holds_nobody_up():
    """gloo tells everyone that a connection was closed but who is in the middle of a message from it."""
    patient = {"token": TOKEN, "deadline": 90.0, "bucket": 64 << 20}
    receiver, sender = Child("a", **patient), CollectiveTransport(**patient)
    try:
        receiver.wait_for("is_up")
        place, _ = parcel(sender, "large", 4 * patient["bucket"])
        receiver.tell("fetch", place=place, slow=0.001, give_up_after=1)
        began = time.monotonic()
        error, seconds = Push(sender, "large", ["a"]).result(began)
        assert "gave up (this engine is leaving) after" in error and seconds < patient["deadline"]
        assert receiver.wait_for("error")["seconds"] < patient["deadline"]
    finally:
        sender.close()
        receiver.end()


@pytest.mark.parametrize("end", ["free", "close"])
def test_given_up_by_the_sender_midway(sender, pool, end):
    """It is what ends the transfer: that has six seconds to go, and the deadline would be named."""
    a, b = pool.get("a", "b")
    push = start_slowly(sender, [a, b])
    if end == "free":
        sender.free("slow")
    else:
        sender.close()
    error, _ = push.result(time.monotonic())
    reason = {"free": "it was given up", "close": "the sender closed"}[end]
    assert reason in error
    for child in (a, b):
        assert reason in child.wait_for("error")["error"]
    if end == "free":
        move(sender, "next", 5 * BUCKET, [a, b])


def test_freed_before_it_is_pushed(sender, pool):
    (a,) = pool.get("a")
    place, _ = parcel(sender, "early", LONG)
    a.tell("fetch", place=place)
    time.sleep(0.2)
    sender.free("early")
    assert "it was given up" in a.wait_for("error")["error"], "not that nothing came by the deadline"
    with pytest.raises(SyncError, match="early: it is not on offer"):
        sender.push("early", ["a"])
    sender.free("early")
    later, _ = parcel(sender, "early", 5)  # the same key again: the old place is still not it
    assert later["attempt"] != place["attempt"]
    a.tell("fetch", place=place)
    assert "it was given up" in a.wait_for("error")["error"]


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"give_up_after": 3}, "SyncError", "this engine is leaving"),
        ({"fail_after": 3}, "OSError", "the disk is full"),
    ],
)
def test_a_target_given_up_midway(sender, pool, options, kind, reason):
    a, b = pool.get("a", "b")
    place, _ = parcel(sender, "slow", LONG)
    a.tell("fetch", place=place, slow=SLOW)
    b.tell("fetch", place=place, slow=SLOW, **options)
    began = time.monotonic()
    error, seconds = Push(sender, "slow", ["a", "b"]).result(began)
    assert f"receiver 'b' gave up ({reason}) after" in error and seconds < LATEST
    answer = b.wait_for("error")
    assert (answer["kind"], answer["error"]) == (kind, reason)
    assert "receiver 'b' gave up" in a.wait_for("error")["error"]
    sender.free("slow")
    move(sender, "next", 5 * BUCKET, [a, b])


def test_a_target_given_up_while_it_waits_frees_the_sender(sender, pool):
    a, b = pool.get("a", "b")
    place, _ = parcel(sender, "waiting", LONG)
    b.tell("fetch", place=place, give_up_after=0)
    assert b.wait_for("error")["error"] == "this engine is leaving"
    a.tell("fetch", place=place)
    error, seconds = Push(sender, "waiting", ["a", "b"]).result(time.monotonic())
    assert "'b' has not come" in error and seconds < LATEST
    a.wait_for("error")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bytes": 7}, "7 bytes were posted"),
        ({"backend": "nccl"}, "sent over nccl"),
        ({"port": 1}, "cannot be reached"),
        ({"bucket": 0}, "make no sense"),
        ({"attempt": "1"}, "no place of this transport"),
    ],
)
def test_a_place_that_is_wrong(sender, change, message):
    place, _ = parcel(sender, "place", 5)
    receiver = CollectiveTransport(**SETTINGS)

    class Target:
        num_bytes = 5

        def check(self):
            pass

    with pytest.raises(SyncError, match=message):
        receiver.fetch({**place, **change}, Target(), receiver="a")
    receiver.close()


def test_pushes_that_make_no_sense(sender):
    with pytest.raises(SyncError, match="nothing: it is not on offer"):
        sender.push("nothing", ["a"])
    sender.allocate("k", 3)
    with pytest.raises(SyncError, match="k: it was not posted"):
        sender.push("k", ["a"])
    with pytest.raises(SyncError, match="k: it is on offer already"):
        sender.allocate("k", 3)
    sender.post("k", {})
    with pytest.raises(SyncError, match="two receivers have one name"):
        sender.push("k", ["a", "a"])
    sender.push("k", [])
    sender.close()
    with pytest.raises(SyncError, match="closed"):
        sender.allocate("l", 3)


def test_nothing_is_left_after_close(pool):
    """Neither after success nor after a failure midway, at either end."""
    a, b, sender = pool.get("a", "last", "sender")
    for key, options in (("whole", {}), ("broken", {"give_up_after": 3})):
        sender.tell("push", key=key, num_bytes=LONG, receivers=["a", "last"])
        place = sender.wait_for("place")["place"]
        for child in (a, b):
            child.tell("fetch", place=place, slow=0.001, **options)
        for child in (a, b, sender):
            assert bool(child.wait_for("error")["error"]) == bool(options)
    for child in (b, sender):
        child.tell("close")
        answer = child.wait_for("after")
        assert (answer["names"], answer["after"]) == ([], answer["before"]), child.name
        child.process.stdin.close()
        assert child.process.wait(timeout=60) == 0


def test_a_transport_that_nobody_holds_is_not_kept_until_the_exit():
    transport = CollectiveTransport(**SETTINGS)
    held = weakref.ref(transport)
    del transport
    gc.collect()
    assert held() is None


def test_reports_of_a_long_wait_do_not_fill_the_socket():
    """A sender reads none before it pushes."""
    end, told = CollectiveTransport(**{**SETTINGS, "deadline": 1000.0}), []
    target = SimpleNamespace(num_bytes=1, views={}, check=lambda: None)

    def fetch(place):
        with pytest.raises(SyncError, match="enough"):
            end.fetch(place, target, receiver="a")

    def give_up():
        raise SyncError("enough")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = {"key": "k", "bytes": 1, "bucket": 1, "attempt": 1, "backend": "gloo"}
        fetching = threading.Thread(target=fetch, args=({**place, "host": "127.0.0.1", "port": listening.getsockname()[1]},))
        fetching.start()
        connection, _ = listening.accept()
        with connection:
            channel = accept(connection, token=TOKEN, is_closed=threading.Event())
            until = time.monotonic() + 0.6
            while time.monotonic() < until:
                told += channel.read(0.1)
            target.check = give_up
            told.append(channel.receive(10.0))
        fetching.join(10)
    end.close()
    assert len(told) == 2 and "gave_up" in told[1] and not fetching.is_alive()


def test_exit_is_not_held_up(pool):
    """A process that ends without `close`, with a group and its line still open."""
    a, sender = pool.get("a", "sender")
    sender.tell("push", key="k", num_bytes=LONG, receivers=["a"])
    a.tell("fetch", place=sender.wait_for("place")["place"])
    assert a.wait_for("error")["error"] == ""
    assert sender.wait_for("error")["error"] == ""
    sender.process.stdin.close()
    assert sender.process.wait(timeout=60) == 0
