"""One trainer process's place among several, and the collectives between them.

Rank r is shard `r % shard` of replica `r // shard`. Nothing that the ranks exchange is pickled: tensors go as they are, and the
few names and numbers of metrics as JSON.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from headrace.records import Array
    from headrace.trainer.parallel import ParallelSettings

_WIRE = 1  # of what ranks send each other: ranks of another number do not join
_ON_DEVICE = ("shards", "replicas", "everyone")  # groups whose tensors are on the ranks' devices
_SAVING_LIMIT = timedelta(days=7)  # a disk may be slow; a rank that dies closes its sockets, which ends a wait for it


class RankError(RuntimeError):
    """A rank is missing, is of another version or layout, or a collective failed; the message says which."""


class Ranks:
    """Groups of processes. `wait` ends a collective; the calls of one group must come in the same order on all of its ranks, so
    only the thread that computes uses `shards`, `replicas`, `everyone` and `host`, and only the one that saves uses `saving`.
    """

    def __init__(self, settings: ParallelSettings, *, rank: int, device: torch.device) -> None:
        self.rank, self.count, self.device = rank, settings.ranks, device
        self.replicate, self.shard = settings.replicate, settings.shard
        self.shards: Any = None  # ranks that share this one's copy of the model
        self.replicas: Any = None  # ranks that hold the same part in other replicas
        self.everyone: Any = None
        self.host: Any = None  # all ranks, for tensors in host memory
        self.saving: Any = None  # those of `shards`, in host memory, for the thread that saves

    @property
    def shard_rank(self) -> int:
        return self.rank % self.shard

    @property
    def replica(self) -> int:
        return self.rank // self.shard

    @classmethod
    def join(
        cls,
        settings: ParallelSettings,
        *,
        rank: int,
        address: str,
        device: torch.device | str = "cpu",
        timeout: float = 600.0,
        meeting: Store | None = None,
        host: str = "127.0.0.1",
    ) -> Ranks:
        """Join the group, and return when all ranks have. `address`: `file://path` of a new file on the host of all ranks; if
        they are on several, they find each other in the store `meeting`, and reach this one at `host`. `timeout`: seconds that
        joining, and later each collective but those of `saving`, may take."""
        ranks = cls(settings, rank=rank, device=torch.device(device))
        limit = timedelta(seconds=timeout)
        try:
            meeting = meeting or FileStore(address.removeprefix("file://"), ranks.count)
            ranks._meet(meeting, timeout)
        except dist.DistError as error:
            raise RankError(f"trainer rank {rank} of {ranks.count} cannot reach the others at {address}: {error}") from None
        first = ranks.rank - ranks.shard_rank

        def group(name: str, members: Sequence[int], limit: timedelta = limit, *, on_host: bool = False) -> Any:  # noqa: ANN401
            store = PrefixStore(f"{name}/{members[0]}", meeting)
            if ranks.device.type == "cuda" and not on_host:
                return _nccl(store, members.index(rank), len(members), limit)
            return _gloo(store, members.index(rank), len(members), limit, host=host)

        if ranks.device.type == "cuda":
            ranks.device = torch.device("cuda", ranks.device.index or 0)
            torch.cuda.set_device(ranks.device)
        everyone = list(range(ranks.count))
        ranks.host = group("host", everyone, on_host=True)
        ranks.everyone = group("everyone", everyone)
        sharing = list(range(first, first + ranks.shard))
        ranks.shards, ranks.saving = group("shards", sharing), group("saving", sharing, _SAVING_LIMIT, on_host=True)
        ranks.replicas = group("replicas", list(range(ranks.shard_rank, ranks.count, ranks.shard)))
        return ranks

    def _meet(self, store: Store, timeout: float) -> None:
        """Wait for all ranks, and compare what they are; names those that are missing or differ."""
        own = json.dumps({"wire": _WIRE, "torch": torch.__version__, "replicate": self.replicate, "shard": self.shard})
        store.set(f"joined/{self.rank}", own)
        end, missing = time.monotonic() + timeout, set(range(self.count))
        while missing:
            missing = {rank for rank in missing if not store.check([f"joined/{rank}"])}
            if missing and time.monotonic() > end:
                names = ", ".join(map(str, sorted(missing)))
                raise RankError(f"of {self.count} trainer ranks, {names} did not join within {timeout:g} s; see their logs")
            if missing:
                time.sleep(0.02)
        for rank in range(self.count):
            theirs = store.get(f"joined/{rank}").decode()
            if theirs != own:
                raise RankError(f"trainer rank {rank} is not like rank {self.rank}: it has {theirs}, and this one {own}")

    def close(self) -> None:
        """Leave. Collectives in progress on other ranks fail."""
        for name in (*_ON_DEVICE, "host", "saving"):
            group = getattr(self, name)
            setattr(self, name, None)
            if group is not None and self.device.type == "cuda" and name in _ON_DEVICE:
                group.abort()

    def wait(self, work: Any, what: str) -> None:  # noqa: ANN401
        """Until a collective is done: for a GPU, the current stream waits, not the host."""
        try:
            work.wait()
        except RuntimeError as error:
            where = f"trainer rank {self.rank} of {self.count}: {what} failed"
            raise RankError(f"{where}, because another rank died, hangs or left: {error}") from error

    def sum(self, tensor: Tensor, *, over: Literal["everyone", "shards", "replicas"] = "everyone") -> Tensor:
        """Add up a tensor over the ranks of a group, in place."""
        if over != "replicas" or self.replicate > 1:
            self.wait(
                getattr(self, over).allreduce([tensor]), "a sum over ranks" if over == "everyone" else f"a sum over {over}"
            )
        return tensor

    def merge(self, arrays: list[Array]) -> list[Array]:
        """Arrays of which each rank has some, and zeros for the others: all of them."""
        flat = torch.from_numpy(np.concatenate([*arrays, np.zeros(0, np.float32)]))
        self.wait(self.host.allreduce([flat]), "collecting results")
        return np.split(flat.numpy(), np.cumsum([len(array) for array in arrays])[:-1]) if arrays else []

    def exchange(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's value, which JSON can hold, in the order of ranks."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.count, dtype=torch.int64)
        sizes[self.rank] = len(data)
        self.wait(self.host.allreduce([sizes]), "an exchange of metrics")
        largest = int(sizes.max())
        padded, every = torch.zeros(largest, dtype=torch.uint8), torch.zeros(self.count * largest, dtype=torch.uint8)
        padded[: len(data)] = data
        self.wait(self.host._allgather_base(every, padded), "an exchange of metrics")
        rows = every.view(self.count, largest)
        return [json.loads(bytes(rows[rank, : int(sizes[rank])].numpy())) for rank in range(self.count)]


def _gloo(store: Store, rank: int, size: int, limit: timedelta, *, host: str) -> Any:  # noqa: ANN401
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = limit
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, limit: timedelta) -> Any:  # noqa: ANN401
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, size, options)
