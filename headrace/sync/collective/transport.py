"""The collective transport: one buffer to many receivers by broadcasts over NCCL (GPU) or gloo (CPU), in buckets.

The transport has its own process group; a trainer's groups are not touched. The sender is rank 0, the receivers of a push are
the other ranks. A few buckets are in flight at a time: a receiver writes one to its target while the next ones arrive.
The group is reused while the receivers stay the same. After any failure both ends drop it, and the next push forms a new one.

    sender                                    receiver
    allocate, post ── place, by the caller ─► fetch
    push: gathers ◄─── "I am here" ────────── (control connection: `channel.py`)
          forms   ───  rank, size ──────────►
          buckets ═══  group ═══════════════► writes, and reports several times a second
          returns ◄─── "I have it" ──────────

Neither end waits longer than `deadline` without progress. The sender hears from all receivers, so its error names the late
ones, and it passes the error on to them. Both ends of a control connection prove that they know the run's token without
sending it; the group's own connections, like all of torch.distributed's, trust the network.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from headrace.sync.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.collective.receiver import Receiver
    from headrace.sync.collective.sender import Sender
    from headrace.sync.transport import Target, TransportConfig

GPU_BUCKET = 64 << 20  # bytes
CPU_BUCKET = 4 << 20


class CollectiveTransport(Transport):
    """Both ends use the same kind of device. Only the sender listens, from its first post on."""

    name = "collective"
    crosses_hosts = True
    needs_gpu_per_end = True
    is_pushed = True
    listens = True

    def __init__(
        self,
        *,
        token: str,
        device: torch.device | str = "cpu",
        deadline: float = 60.0,
        host: str = "127.0.0.1",
        bucket: int | None = None,
    ) -> None:
        """`host` is the address at which receivers reach the sender; the sender's `bucket` (bytes) applies to both ends."""
        import torch

        from headrace.sync.collective.receiver import Receiver
        from headrace.sync.collective.sender import Sender

        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        bucket = bucket or (GPU_BUCKET if device.type == "cuda" else CPU_BUCKET)
        self._sender = Sender(token=token, device=device, host=host, deadline=deadline, bucket=bucket)
        self._receiver = Receiver(token=token, device=device, deadline=deadline)
        # Also runs at exit, while ending backend threads may still need the interpreter.
        self._closing = weakref.finalize(self, _close, self._sender, self._receiver)

    @classmethod
    def make(cls, config: TransportConfig, *, is_sender: bool, device: str) -> CollectiveTransport:
        return cls(token=config.token, device=device, host=config.host, deadline=config.deadline)

    def allocate(self, key: str, num_bytes: int) -> Tensor:
        return self._sender.allocate(key, num_bytes)

    def post(self, key: str, views: Mapping[str, Tensor]) -> dict[str, Plain]:
        return self._sender.post(key)

    def push(self, key: str, receivers: Sequence[str]) -> None:
        self._sender.push(key, receivers)

    def free(self, key: str) -> None:
        self._sender.free(key)

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        self._receiver.fetch(place, target, receiver=receiver)

    def close(self) -> None:
        self._closing()


def _close(sender: Sender, receiver: Receiver) -> None:
    sender.close()
    receiver.close()
