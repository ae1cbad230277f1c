"""Parcels over HTTP: what arrives is what was posted, whoever drops out on the way, or it is refused with a reason."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter

import pytest
import torch
from hypothesis import given, strategies as st

from headrace.errors import LinkError, SyncError
from headrace.proof import proof
from headrace.sync.http.server import ServedBuffers, authorization, write_head
from headrace.sync.http.transport import HttpTransport, relay_places
from headrace.tls import make_certificate

TOKEN = "a token of this run"
PIECE = 64 << 10
LONG = 64 * PIECE + 11
SOON = 60.0
"""Seconds in which whatever a test waits for must have come, also on a busy machine."""
AT_ONCE = SOON / 10
"""And what must not wait for a deadline of so many."""


class Bucket:
    """A target, with a record of what was written when."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.views = num_bytes, {}
        self.flat = torch.zeros(num_bytes, dtype=torch.uint8)
        self.starts: list[int] = []
        self.num_checks = 0
        self.at = 0
        self.gate = threading.Event()
        """Cleared, it holds whoever writes."""
        self.gate.set()
        self.given_up: SyncError | None = None

    def write(self, start, piece):
        assert self.gate.wait(SOON)
        self.flat[start : start + len(piece)] = piece
        self.starts.append(start)
        self.at = start + len(piece)

    def check(self):
        self.num_checks += 1
        if self.given_up is not None:
            raise self.given_up


class Job(threading.Thread):
    """A fetch in a thread of its own."""

    def __init__(self, transport, place, bucket=None, *, receiver="engine-0"):
        super().__init__(daemon=True)
        self.transport, self.place, self.receiver = transport, place, receiver
        self.bucket = bucket or Bucket(place["bytes"])
        self.error: Exception | None = None
        self.start()

    def run(self):
        try:
            self.transport.prepare([self.place])
            self.transport.fetch(self.place, self.bucket, receiver=self.receiver)
        except SyncError as error:
            self.error = error

    def end(self) -> Bucket:
        """What was received."""
        self.join(SOON)
        assert not self.is_alive(), "the fetch did not end"
        if self.error:
            raise self.error
        return self.bucket


class Proxy:
    """Stands before a server and spoils what it sends: `cuts` are the bytes after which one connection after the other is
    dropped, and past `hold` bytes nothing goes on until `gate` opens.
    With `drip` no more than so many bytes go on at a time, fifty times a second."""

    def __init__(self, url, *, cuts=(), hold=None, drip=0):
        self.upstream = int(url.rpartition(":")[2])
        self.cuts, self.hold, self.drip = iter(cuts), hold, drip
        self.gate = threading.Event()
        self.ranges: list[str] = []
        self.num_down = 0
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listening.accept()
                server = socket.create_connection(("127.0.0.1", self.upstream))
                threading.Thread(target=self.up, args=(client, server), daemon=True).start()
                arguments = (server, client, next(self.cuts, None))
                threading.Thread(target=self.down, args=arguments, daemon=True).start()

    def up(self, client, server):
        with contextlib.suppress(OSError):
            while some := client.recv(1 << 16):
                lines = some.decode(errors="replace").split("\r\n")
                if any(line.startswith("Authorization") for line in lines):
                    self.ranges += [line.removeprefix("Range: ") for line in lines if line.startswith("Range")]
                server.sendall(some)

    def down(self, server, client, cut):
        passed = 0
        with contextlib.suppress(OSError), server, client:
            while some := bytearray(server.recv(self.drip or 1 << 15)):
                time.sleep(0.02 if self.drip else 0)
                if self.hold is not None and passed + len(some) > self.hold:
                    self.gate.wait(30)
                if cut is not None and passed + len(some) > cut:
                    client.sendall(some[: cut - passed])
                    self.num_down += cut - passed
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(some)
                passed += len(some)
                self.num_down += len(some)


@pytest.fixture
def made():
    """Make transports and proxies that are closed at the end."""
    things = []

    def make(kind=HttpTransport, *arguments, **settings):
        if kind is HttpTransport:
            settings = {"token": TOKEN, "deadline": SOON, "piece_bytes": PIECE, **settings}
        things.append(kind(*arguments, **settings))
        return things[-1]

    yield make
    for thing in things:
        if isinstance(thing, Proxy):
            thing.gate.set()
            thing.listening.close()
        else:
            thing.close()


@pytest.fixture
def sender(made):
    return made()


@pytest.fixture
def silent():
    """The address of something that accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def post(sender, key="v1", num_bytes=LONG):
    content = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    sender.allocate(key, num_bytes).copy_(content)
    return content, sender.post(key, {"all": content})


def soon(condition):
    until = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < until, "did not come to be"
        time.sleep(0.005)


# What arrives


@pytest.mark.parametrize("num_bytes", [0, 1, 4097, PIECE - 1, PIECE, 3 * PIECE + 7])
@pytest.mark.parametrize("is_relay", [False, True])
def test_a_parcel_arrives_whole_and_in_order(made, sender, num_bytes, is_relay):
    content, place = post(sender, num_bytes=num_bytes)
    bucket = Job(made(is_relay=is_relay), json.loads(json.dumps(place))).end()  # a place is plain data
    assert torch.equal(bucket.flat, content)
    assert bucket.starts == list(range(0, num_bytes, PIECE))
    soon(lambda: sender.bytes_served == num_bytes)


SENDER = """
import sys, json, torch
from headrace.sync.http.transport import HttpTransport
sender = HttpTransport(token=sys.argv[1], deadline=10.0)
sender.allocate("v1", 9_000_001).copy_(torch.arange(9_000_001) % 251)
print(json.dumps(sender.post("v1", {})), flush=True)
sys.stdin.read()
sender.close()
"""
RELAY = """
import sys, json, torch
from headrace.sync.http.transport import HttpTransport
class Bucket:
    num_bytes, views = int(sys.argv[2]), {}
    def write(self, start, piece): pass
    def check(self): pass
relay = HttpTransport(token=sys.argv[1], deadline=60.0, is_relay=True, piece_bytes=int(sys.argv[3]))
print(relay.relay_url, flush=True)
relay.fetch(json.loads(sys.stdin.readline()), Bucket(), receiver="relay")
sys.stdin.read()
"""


@contextlib.contextmanager
def process(code, *arguments):
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def test_a_parcel_arrives_from_another_process(made):
    with process(SENDER, TOKEN) as running:
        place = json.loads(running.stdout.readline())
        bucket = Job(made(), place).end()
        assert torch.equal(bucket.flat, (torch.arange(9_000_001) % 251).to(torch.uint8))
        running.stdin.close()
        assert running.wait(SOON) == 0


# Who drops out on the way


def test_a_broken_connection_is_resumed_where_it_broke(made, sender):
    content, place = post(sender)
    proxy = made(Proxy, sender.relay_url, cuts=[3 * PIECE + 1000, 5 * PIECE])
    bucket = Job(made(), {**place, "sources": [proxy.url]}).end()
    assert torch.equal(bucket.flat, content)
    starts = [int(wanted.removeprefix("bytes=").removesuffix("-")) for wanted in proxy.ranges]
    assert starts[0] == 0 and len(starts) == 3
    assert 3 * PIECE < starts[1] < 3 * PIECE + 1000 and starts[1] % PIECE, "in the midst of a piece"
    assert LONG <= proxy.num_down < LONG + 6 * 1000, "no byte travels twice"
    assert bucket.starts == list(range(0, LONG, PIECE))


def test_between_hosts_all_of_it_is_encrypted(made):
    """A connection that breaks is resumed, a relay serves what it has, and peers with another certificate are not read from."""
    ours, theirs = make_certificate(), make_certificate()
    sender, relay, impostor = made(certificate=ours), made(certificate=ours, is_relay=True), made(certificate=theirs)
    content, place = post(sender)
    proxy = made(Proxy, sender.relay_url, cuts=[3 * PIECE + 1000, 5 * PIECE])
    source = proxy.url.replace("http:", "https:")
    child = Job(made(certificate=ours), {**place, "sources": [relay.relay_url, sender.relay_url]})
    parent = Job(relay, {**place, "sources": [source]})
    for job in (parent, child):
        assert torch.equal(job.end().flat, content)
    assert not proxy.ranges, "the proxy can read a request"
    post(impostor)
    with pytest.raises(SyncError, match="another certificate"):
        Job(made(certificate=ours, deadline=0.5), {**place, "sources": [impostor.relay_url]}).end()
    with pytest.raises(SyncError, match="must be https://HOST:PORT"):
        Job(made(certificate=ours), {**place, "sources": [sender.relay_url.replace("https", "http")]}).end()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_child_goes_on_without_its_parent(made, sender, end):
    """A killed parent is left at once, one that says nothing after a share of the deadline."""
    content, place = post(sender)
    proxy = made(Proxy, sender.relay_url, hold=20 * PIECE)
    with process(RELAY, TOKEN, LONG, PIECE) as parent:
        url = parent.stdout.readline().strip()
        own, childs = relay_places({**place, "sources": [proxy.url]}, [url, "http://127.0.0.1:9"], fan_out=1)
        parent.stdin.write(json.dumps(own) + "\n")
        parent.stdin.flush()
        child = Job(made(deadline=30.0 if end == signal.SIGKILL else 3.0), {**childs, "sources": [url, sender.relay_url]})
        soon(lambda: child.bucket.at >= 15 * PIECE)
        served = sender.bytes_served
        assert child.bucket.at < 21 * PIECE, "what its parent has"
        began = time.monotonic()
        parent.send_signal(end)
        bucket = child.end()
        assert end == signal.SIGSTOP or time.monotonic() - began < AT_ONCE
    assert torch.equal(bucket.flat, content)
    assert bucket.starts == list(range(0, LONG, PIECE))
    assert sender.bytes_served - served <= LONG - 15 * PIECE + (1 << 20), "it did not begin again"


def test_a_parent_that_gives_up_is_left(made, sender):
    content, place = post(sender)
    proxy = made(Proxy, sender.relay_url, hold=20 * PIECE)
    relay = made(is_relay=True)
    parent = Job(relay, {**place, "sources": [proxy.url]})
    child = Job(made(), {**place, "sources": [relay.relay_url, sender.relay_url]})
    soon(lambda: child.bucket.at >= 15 * PIECE)
    parent.bucket.given_up = SyncError("enough")
    assert torch.equal(child.end().flat, content)
    with pytest.raises(SyncError, match="enough"):
        parent.end()


def test_a_child_reads_while_its_parent_still_receives(made, sender):
    content, place = post(sender)
    proxy = made(Proxy, sender.relay_url, hold=20 * PIECE)
    relay = made(is_relay=True)
    child = Job(made(), {**place, "sources": [relay.relay_url, "http://127.0.0.1:9"]})  # asks before its parent has heard of it
    time.sleep(0.2)
    parent = Job(relay, {**place, "sources": [proxy.url]})
    soon(lambda: child.bucket.at >= 15 * PIECE)
    assert parent.is_alive() and parent.bucket.at < 21 * PIECE
    proxy.gate.set()
    for job in (parent, child):
        assert torch.equal(job.end().flat, content)
    soon(lambda: relay.bytes_served == LONG)


@pytest.mark.parametrize("num_bytes", [0, LONG])
def test_nobody_in_a_tree_serves_more_than_its_fan_out(made, sender, num_bytes):
    content, place = post(sender, num_bytes=num_bytes)
    relays = [made(is_relay=True) for _ in range(7)]
    places = relay_places(place, [relay.relay_url for relay in relays], fan_out=2)
    pairs = list(zip(relays, places, strict=True))
    jobs = [Job(relay, place) for relay, place in reversed(pairs)]  # children first: they wait for their parents
    for job in jobs:
        assert torch.equal(job.end().flat, content)
    served = [num_bytes * copies for copies in (2, 2, 2, 1, 0, 0, 0, 0)]
    soon(lambda: sum(end.bytes_served for end in (sender, *relays)) == 7 * num_bytes)
    assert [end.bytes_served for end in (sender, *relays)] == served


def test_children_stay_with_a_parent_that_looks_for_another_source(made, sender, silent):
    """The grandparent falls silent for all at the same time; only its own child turns to the sender."""
    content, place = post(sender)
    parent, child = made(is_relay=True, deadline=3.0), made(deadline=3.0)
    places = relay_places(place, [silent, parent.relay_url, "http://127.0.0.1:9"], fan_out=1)
    jobs = [Job(parent, places[1]), Job(child, places[2])]
    for job in jobs:
        assert torch.equal(job.end().flat, content)
    soon(lambda: sender.bytes_served + parent.bytes_served == 2 * LONG)
    assert sender.bytes_served == LONG


def test_two_engines_of_one_relay_fetch_the_same_parcel(made, sender):
    content, place = post(sender)
    relay = made(is_relay=True)
    for job in [Job(relay, place, receiver=f"engine-{index}") for index in range(4)]:
        assert torch.equal(job.end().flat, content)
    assert torch.equal(Job(made(), {**place, "sources": [relay.relay_url, "http://127.0.0.1:9"]}).end().flat, content)


def test_a_fetch_that_begins_does_not_end_one_that_writes_its_last_piece(made, sender):
    (first, there), (second, other) = post(sender, "first", num_bytes=PIECE), post(sender, "second", num_bytes=PIECE)
    relay, held, is_writing = made(is_relay=True), Bucket(PIECE), threading.Event()
    held.gate.clear()
    held.gate.wait = lambda seconds, wait=held.gate.wait: is_writing.set() or wait(seconds)
    job = Job(relay, there, held)
    assert is_writing.wait(SOON)
    assert torch.equal(Job(relay, other, receiver="engine-1").end().flat, second)
    held.gate.set()
    assert torch.equal(job.end().flat, first)


def test_what_cannot_be_written_is_no_fault_of_the_source(made, sender):
    """It must not be tried again from the next byte on."""
    _, place = post(sender)
    bucket = Bucket(LONG)

    def write(start, piece):
        raise OSError(28, "No space left on device")

    bucket.write = write
    with pytest.raises(SyncError, match=r"cannot be written: .*No space left"):
        Job(made(), place, bucket).end()


# What ends a fetch


def test_what_the_sender_frees_midway_ends_everywhere(made, sender):
    _, place = post(sender, num_bytes=64 << 20)
    relay = made(is_relay=True)
    bucket = Bucket(64 << 20)
    bucket.gate.clear()
    parent = Job(relay, place, bucket)
    child = Job(made(deadline=10.0), {**place, "sources": [relay.relay_url, sender.relay_url]})
    soon(lambda: child.bucket.at)
    began = time.monotonic()
    sender.free("v1")
    assert time.monotonic() - began < AT_ONCE
    bucket.gate.set()
    for job in (parent, child):
        with pytest.raises(SyncError, match="sender has freed it") as caught:
            job.end()
        assert not isinstance(caught.value, LinkError), "another attempt would fail too"
    assert sender.bytes_served < 64 << 20
    content, place = post(sender, "v2")  # the next one starts clean
    assert torch.equal(Job(relay, place).end().flat, content)


@pytest.mark.parametrize("is_relay", [False, True])
@pytest.mark.parametrize("how", ["free", "close"])
def test_a_fetch_is_given_up_from_another_thread(made, sender, silent, is_relay, how):
    _, place = post(sender)
    receiver = made(is_relay=is_relay)
    job = Job(receiver, {**place, "sources": [silent]})
    soon(lambda: job.bucket.num_checks)
    receiver.free("v1") if how == "free" else receiver.close()
    began = time.monotonic()
    with pytest.raises(SyncError, match="given up here"):
        job.end()
    assert time.monotonic() - began < AT_ONCE


def test_a_target_that_gives_up_ends_it(made, sender):
    _, place = post(sender)
    proxy = made(Proxy, sender.relay_url, hold=20 * PIECE)
    relay = made(is_relay=True)
    job = Job(relay, {**place, "sources": [proxy.url]})
    soon(lambda: job.bucket.at >= 15 * PIECE)
    num_checks, began = job.bucket.num_checks, time.monotonic()
    time.sleep(0.6)
    soon(lambda: job.bucket.num_checks - num_checks >= 2)
    assert job.bucket.num_checks - num_checks <= 50 * (time.monotonic() - began), "a few times a second"
    began = time.monotonic()
    job.bucket.given_up = reason = SyncError("the run is over")
    job.join(SOON)
    assert job.error is reason and time.monotonic() - began < AT_ONCE
    assert ask(relay.relay_url, "/weights/v1").status == 410


def test_who_says_nothing_is_named_within_the_deadline(made, sender, silent):
    _, place = post(sender)
    began = time.monotonic()
    with pytest.raises(LinkError, match=rf"engine-0: 'v1' from {silent}: .*nothing for [34]\.\d s; 0 of {LONG:,} bytes"):
        Job(made(deadline=3.0), {**place, "sources": [silent]}).end()
    assert 3.0 <= time.monotonic() - began < 6.0


def test_who_falls_silent_midway_is_named_within_the_deadline(made, sender):
    _, place = post(sender)
    proxy = made(Proxy, sender.relay_url, hold=20 * PIECE)
    job = Job(made(deadline=2.0), {**place, "sources": [proxy.url]})
    with pytest.raises(SyncError, match=rf"{proxy.url}: .*nothing for [23]\.\d s; 1,\d\d\d,\d\d\d of {LONG:,} bytes had come"):
        job.end()


def test_nobody_at_the_address_is_an_error_within_the_deadline(made, sender):
    _, place = post(sender)
    with pytest.raises(SyncError, match="Connection refused"):
        Job(made(deadline=1.0), {**place, "sources": ["http://127.0.0.1:9"]}).end()


def test_silent_sources_are_passed_over(made, sender, silent):
    content, place = post(sender)
    job = Job(made(deadline=4.0), {**place, "sources": [silent, silent, "http://127.0.0.1:9", sender.relay_url]})
    assert torch.equal(job.end().flat, content)


def test_slow_progress_is_progress(made, sender):
    content, place = post(sender, num_bytes=4 * PIECE)
    bucket = Bucket(4 * PIECE)
    write = bucket.write
    bucket.write = lambda start, piece: (time.sleep(1.2), write(start, piece))
    assert torch.equal(Job(made(deadline=1.0), place, bucket).end().flat, content)


def test_a_target_is_looked_at_while_bytes_trickle_in(made, sender):
    _, place = post(sender)
    proxy = made(Proxy, sender.relay_url, drip=500)
    job = Job(made(deadline=1.0), {**place, "sources": [proxy.url]})
    time.sleep(1.5)
    assert job.is_alive() and not job.bucket.starts
    job.bucket.given_up = SyncError("enough")
    began = time.monotonic()
    with pytest.raises(SyncError, match="enough"):
        job.end()
    assert time.monotonic() - began < AT_ONCE


# Who may ask, and for what


def ask(url, path, *, token=TOKEN, method="GET", **headers):
    """The answer to a request with a proof, by a client that is not ours."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=SOON)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    assert answer.status == 401 and not answer.read()
    scheme, challenge = answer.headers["WWW-Authenticate"].split()
    assert scheme == "Headrace"
    given = authorization(token, challenge, "nonce", path, headers.get("Range", "")) if token else "Bearer " + TOKEN
    connection.request(method, path, headers={**headers, "Authorization": given})
    answer = connection.getresponse()
    answer.body = answer.read()
    connection.close()
    return answer


def test_ranges_are_what_http_says(sender):
    content, _ = post(sender, num_bytes=1000)
    whole = bytes(content.numpy())
    answer = ask(sender.relay_url, "/weights/v1")
    assert answer.status == 200 and answer.body == whole
    answer = ask(sender.relay_url, "/weights/v1", Range="bytes=10-")
    assert answer.status == 206 and answer.body == whole[10:] and answer.headers["Content-Range"] == "bytes 10-999/1000"
    answer = ask(sender.relay_url, "/weights/v1", Range="bytes=10-19")
    assert answer.status == 206 and answer.body == whole[10:20]
    for wrong in ("bytes=1000-", "bytes=20-10", "bytes=-5", "bytes=0-1,5-6", "bytes=x-", "rows=0-", "bytes=" + "9" * 30 + "-"):
        answer = ask(sender.relay_url, "/weights/v1", Range=wrong)
        assert answer.status == 416 and answer.headers["Content-Range"] == "bytes */1000" and not answer.body


def test_who_does_not_know_the_token_learns_nothing(sender):
    post(sender)
    answers = [ask(sender.relay_url, path, token=token) for path in ("/weights/v1", "/weights/v2") for token in ("another", "")]
    assert {answer.status for answer in answers} == {401}
    assert not any(answer.body for answer in answers)
    known, unknown = ([name for name, _ in answer.getheaders()] for answer in answers[1:3])
    assert known == unknown


def test_a_proof_is_good_for_one_connection_one_path_and_one_range(sender):
    post(sender)
    host = sender.relay_url.removeprefix("http://")

    def answered(change):
        connection = http.client.HTTPConnection(host, timeout=SOON)
        connection.request("GET", "/weights/v1")
        asked = connection.getresponse()
        asked.read()
        challenge, path, wanted = change(asked.headers["WWW-Authenticate"].split()[1])
        given = authorization(TOKEN, challenge, "nonce", path, wanted)
        connection.request("GET", "/weights/v1", headers={"Authorization": given, "Range": "bytes=5-"})
        status = connection.getresponse().status
        connection.close()
        return status

    assert answered(lambda challenge: (challenge, "/weights/v1", "bytes=5-")) == 206
    assert answered(lambda challenge: ("0" * 32, "/weights/v1", "bytes=5-")) == 401
    assert answered(lambda challenge: (challenge, "/weights/v2", "bytes=5-")) == 401
    assert answered(lambda challenge: (challenge, "/weights/v1", "bytes=0-")) == 401


def test_only_parcels_on_offer_are_found(sender):
    post(sender, "a/b", 10)
    sender.allocate("unfinished", 10)
    assert ask(sender.relay_url, "/weights/a%2Fb").status == 200
    for path in ("/weights/unfinished", "/weights/v9", "/weights/", "/", "/weights/../../etc/passwd", "/weights/%2e%2e%2fetc"):
        assert ask(sender.relay_url, path).status == 404
    sender.free("a/b")
    assert ask(sender.relay_url, "/weights/a%2Fb").status == 410


def test_what_is_no_request_is_turned_away(sender):
    post(sender)
    port = int(sender.relay_url.rpartition(":")[2])
    for sent, status in [
        (b"GET /weights/v1 HTTP/1.1\r\nX: " + b"x" * 8192, b"431"),
        (b"GET /weights/v1 HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % i for i in range(2000)), b"431"),
        (b"\x16\x03\x01\xff\r\n\r\n", b"400"),
        (b"GET /weights/v1 HTTP/1.1\r\nno colon\r\n\r\n", b"400"),
        (b"GET /weights/v1 HTTP/1.1\r\nRange: bytes=0-\r\nrange: bytes=5-\r\n\r\n", b"400"),
        (b"GET /weights/v1 HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", b"400"),
        (b"GET /weights/v1 HTTP/1.0\r\n\r\n", b"400"),
        (b"POST /weights/v1 HTTP/1.1\r\n\r\n", b"401"),
    ]:
        with socket.create_connection(("127.0.0.1", port), timeout=SOON) as connection:
            connection.sendall(sent)
            assert connection.recv(1000).split()[1] == status, sent[:60]


def test_a_wrong_token_is_said(made, sender):
    _, place = post(sender)
    with pytest.raises(SyncError, match="does not know this run's token"):
        Job(made(token="another"), place).end()
    assert sender.bytes_served == 0


@pytest.mark.parametrize("num_bytes", [LONG - 1, LONG + 1])
def test_another_length_is_refused(made, sender, num_bytes):
    _, place = post(sender)
    began = time.monotonic()
    with pytest.raises(SyncError, match="another length"):
        Job(made(), {**place, "bytes": num_bytes}).end()
    with pytest.raises(SyncError, match="are expected"):
        Job(made(), place, Bucket(num_bytes)).end()
    assert time.monotonic() - began < 2 * AT_ONCE


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 206 OK\r\nContent-Length: 10\r\nContent-Range: bytes 0-9/10\r\n\r\n0123456789", "does not speak"),
        (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\nWWW-Authenticate: Basic\r\n\r\n", "does not speak"),
        (b"220 mail.example ESMTP\r\n\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\nWWW-Authenticate: Headrace 00\r\n\r\n"
         b"HTTP/1.1 206 OK\r\nContent-Length: 10\r\nContent-Range: bytes 0-9/10\r\n\r\n0123456789", "does not prove"),
    ],
)  # fmt: skip
def test_an_impostor_is_refused(made, sender, answer, reason):
    """And what it sends reaches nobody."""
    _, place = post(sender, num_bytes=10)

    def pretend(listening):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                connection.recv(1000)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=pretend, args=(listening,), daemon=True).start()
        job = Job(made(), {**place, "sources": [f"http://127.0.0.1:{listening.getsockname()[1]}"]})
        with pytest.raises(SyncError, match=reason):
            job.end()
        listening.shutdown(socket.SHUT_RDWR)
    assert not job.bucket.starts


@pytest.mark.parametrize(("length", "span"), [(9, "0-9/10"), (11, "0-9/10"), (10, "0-9/11"), (10, "1-10/10"), (10, "")])
def test_one_that_knows_the_token_and_sends_another_length_is_refused(made, sender, length, span):
    _, place = post(sender, num_bytes=10)
    content_range = f"bytes {span}" if span else ""

    def answer(listening):
        connection, _ = listening.accept()
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\nWWW-Authenticate: Headrace 00\r\n\r\n")
        nonce = connection.recv(1000).decode().split("Authorization: Headrace ")[1].split()[0]
        given = proof(TOKEN, "weights", "answer", nonce, "/weights/v1", "206", str(length), content_range)
        headers = {"Content-Length": length, "Headrace-Proof": given, **({"Content-Range": content_range} if span else {})}
        connection.sendall(write_head("HTTP/1.1 206 Partial Content", headers) + b"x" * length)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=answer, args=(listening,), daemon=True).start()
        job = Job(made(), {**place, "sources": [f"http://127.0.0.1:{listening.getsockname()[1]}"]})
        with pytest.raises(SyncError, match="another length"):
            job.end()
    assert not job.bucket.starts


def test_what_is_no_place_is_refused(made):
    for place in ({}, {"key": "v1", "bytes": 10, "sources": [], "share": 0.5}):
        with pytest.raises(SyncError, match="no place of this transport"):
            made().fetch(place, Bucket(10), receiver="engine-0")


def test_settings_that_cannot_work_are_refused(made):
    with pytest.raises(ValueError, match="token is empty"):
        HttpTransport(token="")
    with pytest.raises(SyncError, match=r"cannot listen on 192\.0\.2\.1"):
        made(host="192.0.2.1", is_relay=True)


# Memory, threads and sockets


def test_buffers_serve_one_key_after_the_other(made, sender):
    relay, plain = made(is_relay=True), made()
    places, held = set(), set()
    for version in range(8):
        content, place = post(sender, f"v{version}", LONG - version)
        places.add(sender._buffers.find(f"v{version}").bytes.data_ptr())
        assert torch.equal(Job(relay, place).end().flat, content)
        assert torch.equal(Job(plain, place).end().flat, content)
        held.add(relay._buffers.find(f"v{version}").bytes.data_ptr())
        assert list(relay._buffers.held) == [f"v{version}"], "it keeps the last one"
        sender.free(f"v{version - 1}")
    assert len(places) == 2 and len(held) == 1
    assert all(place % 256 == 0 for place in places | held)


def test_memory_is_not_used_again_while_somebody_reads_it(sender):
    """Somebody connects, asks, and takes nothing: `free` cuts them off and the memory serves the next."""
    content, _ = post(sender, "v1", 64 << 20)
    before = sender._buffers.find("v1").bytes.data_ptr()
    host, port = "127.0.0.1", int(sender.relay_url.rpartition(":")[2])
    with socket.create_connection((host, port)) as stuck:
        stuck.sendall(b"GET /weights/v1 HTTP/1.1\r\n\r\n")
        challenge = stuck.recv(1000).decode().split("Headrace ")[1].split()[0]
        given = authorization(TOKEN, challenge, "nonce", "/weights/v1", "")
        stuck.sendall(f"GET /weights/v1 HTTP/1.1\r\nAuthorization: {given}\r\n\r\n".encode())
        soon(lambda: sender.bytes_served)
        served = -1
        while served != (served := sender.bytes_served):
            time.sleep(0.3)
        began = time.monotonic()
        sender.free("v1")
        soon(lambda: sender._buffers._spare._spare is not None)
        assert time.monotonic() - began < AT_ONCE
        room = sender.allocate("v2", 64 << 20)
        assert room.data_ptr() == before
        room.copy_(~content)
        read = b"".join(iter(lambda: stuck.recv(1 << 20), b"")).partition(b"\r\n\r\n")[2]
        assert 0 < len(read) < 64 << 20 and read == bytes(content[: len(read)].numpy()), "nothing of the next"


def test_memory_waits_for_its_last_user_and_is_never_shared():
    buffers = ServedBuffers()
    first = buffers.add("v1", 1000, is_offered=True)
    with first.in_use():
        buffers.drop(first)
        assert first.is_over
        second = buffers.add("v2", 1000, is_offered=True)
        assert second.buffer is not first.buffer
    assert buffers.add("v3", 1000, is_offered=True).buffer is first.buffer
    with pytest.raises(SyncError, match="freed"), first.in_use():
        pass


def descriptors():
    return Counter(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in os.listdir("/proc/self/fd") if _is_open(fd))


def _is_open(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open sockets")
def test_nothing_is_left_after_close(silent):
    before, threads = descriptors()["socket"], set(threading.enumerate())
    ends = [HttpTransport(token=TOKEN, deadline=SOON, is_relay=is_relay) for is_relay in (False, True, False)]
    sender, relay, plain = ends
    _, place = post(sender, num_bytes=16 << 20)
    Job(relay, place).end()
    stopped = Job(plain, {**place, "sources": [silent]})
    port = int(sender.relay_url.rpartition(":")[2])
    buffers = [weakref.ref(end._buffers.find("v1").buffer.tensor) for end in (sender, relay)]
    with socket.create_connection(("127.0.0.1", port)):  # says nothing
        began = time.monotonic()
        for end in ends:
            end.close()
            end.close()
        assert time.monotonic() - began < 2 * AT_ONCE
    stopped.join(SOON)
    assert set(threading.enumerate()) <= threads
    assert descriptors()["socket"] == before
    assert not any(buffer() for buffer in buffers)
    socket.create_server(("127.0.0.1", port)).close()
    for late in (lambda: sender.allocate("v2", 10), lambda: Job(plain, place).end(), lambda: Job(relay, place).end()):
        with pytest.raises(SyncError, match="closed"):
            late()


# Pure functions


@given(num_receivers=st.integers(0, 40), fan_out=st.integers(1, 5))
def test_a_tree_serves_everybody_from_the_sender(num_receivers, fan_out):
    urls = [f"http://e{index}:1" for index in range(num_receivers)]
    places = relay_places({"key": "v1", "bytes": 5, "sources": ["http://t:1"]}, urls, fan_out=fan_out)
    assert len(places) == num_receivers
    assert all(count <= fan_out for count in Counter(place["sources"][0] for place in places).values())
    sources = dict(zip(urls, (place["sources"] for place in places), strict=True))
    shares = dict(zip(urls, (place["share"] for place in places), strict=True))
    for url, (parent, *others) in sources.items():
        assert (parent == "http://t:1" and not others) or others == sources[parent]
        assert 0 < shares[url] < 1 and (not others or shares[parent] < shares[url])
    depth = max(map(len, sources.values()), default=0)
    assert depth <= 1 or fan_out == 1 or num_receivers >= fan_out ** (depth - 1)


@given(hosts=st.lists(st.integers(0, 5), max_size=40), fan_out=st.integers(1, 3))
def test_each_host_gets_one_copy_over_the_network(hosts, fan_out):
    urls = [f"http://h{host}:{port}" for port, host in enumerate(hosts, 1)]  # the trainer's is h0
    places = relay_places({"key": "v1", "bytes": 5, "sources": ["http://h0:99"]}, urls, fan_out=fan_out)
    served = Counter((place["sources"][0], host) for host, place in zip(hosts, places, strict=True))
    near, far = Counter[str](), Counter[str]()
    for (source, host), count in served.items():
        (near if source.startswith(f"http://h{host}:") else far)[source] += count
    assert far.total() == len({0, *hosts}) - 1
    assert max([*near.values(), *far.values()], default=0) <= fan_out
    sources = dict(zip(urls, (place["sources"] for place in places), strict=True))
    shares = dict(zip(urls, (place["share"] for place in places), strict=True))
    for url, (parent, *others) in sources.items():
        assert (parent == "http://h0:99" and not others) or others == sources[parent], "its ancestors, then the trainer"
        assert 0 < shares[url] < 1 and (not others or shares[parent] < shares[url]), "a parent switches first"
