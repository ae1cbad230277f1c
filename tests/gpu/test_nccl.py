"""NCCL as far as one GPU goes: a group of one rank, and the refusal of a second on the same GPU. In processes of their own,
because what is at stake is also that a failure does not end the process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ONE_RANK = """
import os, threading, time, torch
from headrace.sync.collective.group import Group
device = torch.device("cuda", 0)
group = Group("g", rank=0, size=1, device=device, host="127.0.0.1", deadline=20.0, share=lambda key, value: None)
group.form(lambda: None, key="k")
assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
assert not torch.distributed.is_initialized()
data = torch.arange(1 << 20, device="cuda").to(torch.uint8)
before = data.clone()
for _ in range(3):
    group.start(data)
    while not group.finish(0.1):
        pass
assert torch.equal(before, data)
try:
    group.start(torch.zeros(3, dtype=torch.uint8))
except AssertionError:
    print("refused")
group.abort("over")
until = time.monotonic() + 10
while any("headrace" in thread.name for thread in threading.enumerate()) and time.monotonic() < until:
    time.sleep(0.05)
assert not any("headrace" in thread.name for thread in threading.enumerate())
print("fine")
"""

TWO_RANKS = """
import threading, time, torch
from headrace.errors import SyncError
from headrace.sync.collective.transport import CollectiveTransport

class Target:
    def __init__(self, num_bytes):
        self.num_bytes, self.buffer = num_bytes, torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
        self.views = {"all": self.buffer}
    def write(self, start, piece):
        self.buffer[start:start + piece.numel()].copy_(piece)
        torch.cuda.current_stream().synchronize()
    def check(self):
        pass

def fetch(receiver, place, name):
    try:
        receiver.fetch(place, Target(place["bytes"]), receiver=name)
    except SyncError as error:
        errors.append(str(error))

sender, receiver = (CollectiveTransport(token="t", device="cuda", deadline=20.0) for _ in range(2))
errors = []
for key in ("first", "second"):
    room = sender.allocate(key, 1 << 20)
    assert room.is_cuda and room.data_ptr() % 256 == 0
    place = sender.post(key, {})
    assert place["backend"] == "nccl"
    thread = threading.Thread(target=fetch, args=(receiver, place, "a"))
    thread.start()
    began = time.monotonic()
    try:
        sender.push(key, ["a"])
    except SyncError as error:
        errors.append(str(error))
    thread.join(30)
    sender.free(key)
    print(f"{key}: {time.monotonic() - began:.1f} s")
print("\\n".join(errors))
assert len(errors) == 4 and all("Duplicate GPU" in error for error in errors), errors
empty = sender.allocate("empty", 0)
place = sender.post("empty", {})
thread = threading.Thread(target=fetch, args=(receiver, place, "a"))
thread.start()
sender.push("empty", ["a"])
thread.join(30)
assert len(errors) == 4, errors
sender.close()
receiver.close()
time.sleep(1.0)
print("alive")
"""


def run(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=150)


def test_a_group_of_one_rank_on_its_own_stream():
    done = run(ONE_RANK)
    assert done.returncode == 0 and done.stdout.split() == ["refused", "fine"], done.stdout + done.stderr


def test_a_second_rank_on_one_gpu_is_refused_at_both_ends_and_harms_nothing():
    done = run(TWO_RANKS)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("alive"), done.stdout + done.stderr
    print(done.stdout)
