"""Weights over NCCL to what plays a vLLM worker, on one GPU: two processes that NCCL takes for two hosts, over sockets.

The worker is vLLM's own code where it can be imported, else as much of it as a few calls of NCCL are. Run with -s to see times.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm_server import vllm_python

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SETTINGS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "WARN",
}

WORKER = r"""
import ctypes, glob, hashlib, json, os, pickle, signal, sys, time, types
import torch

mode = sys.argv[1]
torch.cuda.set_device(0)
torch.zeros(1, device="cuda")

class ncclUniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]

def say(**what):
    print("@@" + json.dumps(what), flush=True)

class Group:
    # As vLLM's communicator: joins, sums one number, takes broadcasts on the current stream.
    def __init__(self, info):
        name = "vllm.distributed.device_communicators.pynccl_wrapper"
        for end in ("vllm", "vllm.distributed", "vllm.distributed.device_communicators", name):
            sys.modules[end] = types.ModuleType(end)
        sys.modules[name].ncclUniqueId, ncclUniqueId.__module__ = ncclUniqueId, name
        self.store = torch.distributed.TCPStore(
            info["master_address"], info["master_port"], info["world_size"], False, use_libuv=False)
        unique = pickle.loads(self.store.get("broadcast_from/0/0"))
        assert type(unique) is ncclUniqueId
        if mode == "silent":
            say(kind="silent")
            time.sleep(60)
        try:
            self.library = ctypes.CDLL("libnccl.so.2")
        except OSError:
            import nvidia.nccl
            self.library = ctypes.CDLL(glob.glob(list(nvidia.nccl.__path__)[0] + "/lib/libnccl.so.2")[0])
        self.communicator = ctypes.c_void_p()
        self.check(self.library.ncclCommInitRank(ctypes.byref(self.communicator), info["world_size"], unique, 1))
        one = torch.zeros(1, device="cuda")
        where, stream = ctypes.c_void_p(one.data_ptr()), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.check(self.library.ncclAllReduce(where, where, ctypes.c_size_t(1), 7, 0, self.communicator, stream))
        torch.cuda.synchronize()
    def check(self, status):
        self.library.ncclGetErrorString.restype = ctypes.c_char_p
        assert status == 0, self.library.ncclGetErrorString(status)
    def broadcast(self, tensor, src):
        where, stream = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.check(self.library.ncclBroadcast(where, where, ctypes.c_size_t(tensor.numel()), 1, src, self.communicator, stream))
        if mode == "dying":
            torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)
    def destroy(self):
        self.library.ncclCommAbort(self.communicator)

def consume(described, group, load, buffer_bytes, num_buffers):
    left = list(described)
    while left:
        taken, total = [], 0
        while left and total <= buffer_bytes:
            name, (shape, dtype) = left.pop(0)
            size = torch.Size(shape).numel() * dtype.itemsize
            taken.append((name, shape, dtype, size))
            total += size
        packed = torch.empty(total, dtype=torch.uint8, device="cuda")
        group.broadcast(packed, src=0)
        parts = packed.split([size for *_, size in taken])
        load([(name, part.view(dtype).view(shape)) for (name, shape, dtype, _), part in zip(taken, parts)])

def vllms(info):
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor
    group = nccl_common.stateless_init_process_group(
        info["master_address"], info["master_port"], info["rank_offset"], info["world_size"], device=0)
    assert not group.disabled
    def take(described, group, load, buffer_bytes, num_buffers):
        packed_tensor.packed_nccl_broadcast_consumer(
            iterator=iter(described), group=group, src=0, post_unpack_func=load,
            buffer_size_bytes=buffer_bytes, num_buffers=num_buffers, device="cuda:0")
    return group, take

try:
    if mode != "good":
        raise ImportError
    import vllm.distributed.weight_transfer.packed_tensor
    kind = "vLLM " + vllm.__version__
except ImportError:
    kind = "a few calls of NCCL"
say(ready=kind)
info = json.loads(sys.stdin.readline())
group, consume = vllms(info) if kind.startswith("vLLM") else (Group(info), consume)
say(joined=True)
for line in sys.stdin:
    update, received = json.loads(line), {}
    described = [(n, (s, getattr(torch, d))) for n, d, s in zip(update["names"], update["dtype_names"], update["shapes"])]
    consume(described, group, lambda named: received.update({name: tensor.clone() for name, tensor in named}),
            update["packed_buffer_size_bytes"], update["packed_num_buffers"])
    torch.cuda.synchronize()
    say(digests={n: hashlib.sha256(t.cpu().view(-1).view(torch.uint8).numpy()).hexdigest() for n, t in received.items()})
group.destroy()
"""

SENDER = r"""
import hashlib, json, os, subprocess, sys, threading, time
import torch
from headrace.engine.vllm.nccl import NcclHandover
from headrace.errors import SyncError

python, script = sys.argv[1:]
device = torch.device("cuda", 0)

class Worker:
    def __init__(self, mode):
        environment = os.environ | {"NCCL_HOSTID": "worker-" + mode}
        self.process = subprocess.Popen(
            [python, script, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    def tell(self, what):
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
    def hear(self):
        for line in self.process.stdout:
            if line.startswith("@@"):
                return json.loads(line[2:])
        raise SystemExit(f"the worker ended: {self.process.wait()}")

def failure(call, *arguments):
    began = time.monotonic()
    try:
        call(*arguments)
    except SyncError as error:
        return f"{time.monotonic() - began:.2f} s: {error}", time.monotonic() - began
    raise SystemExit("nothing failed")

def weights(seed):
    draw = torch.Generator(device).manual_seed(seed)
    def bits(*shape):
        return torch.randint(-(1 << 62), 1 << 62, shape, generator=draw, device=device)
    made = {f"layer.{n}": bits(1024, 512).view(torch.bfloat16) for n in range(48)}  # 4 MiB each
    made |= {"embedding": bits(4096, 2500).view(torch.bfloat16), "odd": bits(1001).view(torch.bfloat16)[:4001].clone()}
    made |= {"router": bits(333).view(torch.float32)[:665].clone(), "turned": bits(64, 64).view(torch.bfloat16).T}
    made |= {"bytes": bits(7).view(torch.uint8)[:53].clone(), "empty": torch.empty(0, 3, device=device)}
    return made

def digests(tensors):
    return {n: hashlib.sha256(t.cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest() for n, t in tensors.items()}

def sender_of(deadline):
    made = NcclHandover(device, host="127.0.0.1", deadline=deadline, buffer_bytes=32 << 20)
    made.told = made.init_info(1, "0.26.0")
    return made

began = time.monotonic()
workers = {mode: Worker(mode) for mode in ("good", "dying", "silent")}
torch.zeros(1, device=device)
threads = len(os.listdir("/proc/self/task"))
kinds = {mode: worker.hear()["ready"] for mode, worker in workers.items()}
print(f"the worker is {kinds['good']}; ready after {time.monotonic() - began:.1f} s")

sender = sender_of(60.0)
good = workers["good"]
began = time.monotonic()
good.tell(sender.told)
sender.join()
assert good.hear() == {"joined": True}
print(f"joined in {time.monotonic() - began:.2f} s")
for number, where in enumerate(["the GPU", "pinned memory", "the GPU"]):
    tensors = weights(number)
    if where != "the GPU":
        tensors = {name: tensor.cpu().pin_memory() for name, tensor in tensors.items()}
    expected = digests(tensors)
    total = sum(tensor.nbytes for tensor in tensors.values())
    good.tell(sender.update_info(tensors))
    began = time.monotonic()
    sender.send(tensors)
    seconds = time.monotonic() - began
    assert good.hear()["digests"] == expected, where
    print(f"{total / 1e6:.0f} MB from {where}: {seconds:.3f} s, {total / seconds / 1e9:.2f} GB/s, bit for bit")
began = time.monotonic()
sender.close()
print(f"closed in {time.monotonic() - began:.2f} s")
good.process.stdin.close()
assert good.process.wait(20) == 0

sender = sender_of(15.0)
workers["dying"].tell(sender.told)
sender.join()
assert workers["dying"].hear() == {"joined": True}
tensors = weights(9)
workers["dying"].tell(sender.update_info(tensors))
said, seconds = failure(sender.send, tensors)
print("a worker that is killed after its first broadcast:", said)
assert seconds < 20 and workers["dying"].process.wait(5) == -9
torch.cuda.synchronize()  # hangs if a kernel was left behind
assert failure(sender.send, tensors)[1] < 1

sender = sender_of(4.0)
workers["silent"].tell(sender.told)
said, seconds = failure(sender.join)
print("a worker that takes the id and does not join:", said)
assert 3.5 < seconds < 8
workers["silent"].process.kill()

sender = sender_of(60.0)
ending = threading.Timer(0.5, sender.close, args=("the server answered 500",))
ending.start()
said, seconds = failure(sender.join)
assert seconds < 3 and said.endswith("the server answered 500")
ending.join()
until = time.monotonic() + 10
while any("vllm-nccl" in thread.name for thread in threading.enumerate()) and time.monotonic() < until:
    time.sleep(0.05)
left = [thread.name for thread in threading.enumerate() if "vllm-nccl" in thread.name]
assert not left, left
torch.cuda.synchronize()
assert torch.ones(1000, device=device).sum().item() == 1000
print(f"threads of the process: {threads} before, {len(os.listdir('/proc/self/task'))} after")
print("fine")
"""


def test_a_worker_gets_weights_bit_for_bit_and_its_death_is_noticed(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    root = str(Path(__file__).parents[2])
    environment = os.environ | SETTINGS | {"NCCL_HOSTID": "sender", "PYTHONPATH": root}
    environment.pop("NCCL_COMM_ID", None)
    python = vllm_python() or sys.executable
    done = subprocess.run(
        [sys.executable, "-c", SENDER, python, str(script)], env=environment, capture_output=True, text=True, timeout=120
    )
    print(done.stdout)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("fine"), done.stdout + done.stderr[-8000:]
