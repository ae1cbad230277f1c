"""The collective transport: one parcel to many receivers by broadcasts over NCCL (GPU) or gloo (CPU), in buckets.

The sender is rank 0 of a group that is the transport's own, the receivers of a push are the other ranks; a trainer's groups
are not touched. The parcel lies packed in one buffer and goes in buckets, a few at a time; a receiver writes one to its target
while the next ones come. The group is kept while the receivers are the same. Whatever fails, it is thrown away at both ends,
and the next push forms a new one.

    sender                                    receiver
    room, post ──── place, by the caller ───► fetch
    push: gathers ◄─── "I am here" ────────── (a line to the sender's desk: `desk`)
          forms   ───  rank, size ──────────►
          buckets ═══  group ═══════════════► writes, and says how far it is several times a second
          returns ◄─── "I have it" ──────────

No wait is longer than `deadline` without progress, at either end. Whoever is late is named by the sender, which hears of
everybody; receivers are told. The ends of a line prove to each other that they know the run's token, which does not travel;
the group's own connections, like all of torch.distributed's, trust the network.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from headrace.sync.collective.fetch import Fetcher
from headrace.sync.collective.send import Sender

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.transport import Target

GPU_BUCKET = 64 << 20
CPU_BUCKET = 4 << 20
"""Bytes."""


class CollectiveTransport:
    """A `Transport`. Both ends are made with the same kind of device; only a sender listens, from its first post on."""

    name = "collective"

    def __init__(
        self,
        *,
        token: str,
        device: torch.device | str = "cpu",
        deadline: float = 60.0,
        host: str = "127.0.0.1",
        bucket: int | None = None,
    ) -> None:
        """Both ends need the same `token`. `host` is the sender's address as receivers reach it; `bucket` is in bytes, the
        sender's counts."""
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        bucket = bucket or (GPU_BUCKET if device.type == "cuda" else CPU_BUCKET)
        self._sender = Sender(token=token, device=device, host=host, deadline=deadline, bucket=bucket)
        self._fetcher = Fetcher(token=token, device=device, deadline=deadline)
        # Also at exit, while threads of the backends that end may still need the interpreter.
        self._closing = weakref.finalize(self, _close, self._sender, self._fetcher)

    def room(self, key: str, num_bytes: int) -> Tensor:
        return self._sender.room(key, num_bytes)

    def post(self, key: str, views: Mapping[str, Tensor]) -> dict[str, Plain]:
        return self._sender.post(key)

    def push(self, key: str, receivers: Sequence[str]) -> None:
        self._sender.push(key, receivers)

    def free(self, key: str) -> None:
        self._sender.free(key)

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        self._fetcher.fetch(place, target, receiver=receiver)

    def close(self) -> None:
        self._closing()


def _close(sender: Sender, fetcher: Fetcher) -> None:
    sender.close()
    fetcher.close()
