"""One trainer over several processes: every call reaches all ranks in order, and whoever failed is named."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from headrace.errors import SyncError
from headrace.launch.placement import Placement
from headrace.launch.process import Place, RoleFailed, RoleProcess, TrainerLost
from headrace.model import ShardedWeights, lay_out
from headrace.model.weights import describe
from headrace.observe import ProcessTimeline
from headrace.records import Batch
from headrace.rpc import Peer, open_socket
from headrace.sync import Lineage, MemoryTransport, WeightSync
from headrace.trainer import LocalTrainer, RankError, RemoteTrainer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

BATCH = Batch(rollouts=(), advantages=(), weights=(), loss="reinforce", version=0)


class Handle:
    """A process that is only a name."""

    pid = 7

    def __init__(self) -> None:
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True

    def describe(self) -> str:
        return "process 7"


class Group:
    """Ranks in this process, over sockets; each has the calls that `calls_of` gives it."""

    def __init__(self, count: int, calls_of: Callable[[int], dict[str, Any]], folder: Path) -> None:
        self.count, self.calls_of, self.folder = count, calls_of, folder

    async def __aenter__(self) -> Group:
        self.ranks, self.far, self.tasks = [], [], []
        for rank in range(self.count):
            ours, theirs = socket.socketpair()
            far = Peer(await open_socket(theirs), calls=self.calls_of(rank))
            log = str(self.folder / f"trainer-{rank}.log")
            placed = Placement(
                host="h", address="a", device="cpu", receives_on="cpu", threads=1, run_folder="", log=log, shared_folder=""
            )
            process = RoleProcess(Place(f"trainer-{rank}", "trainer", rank), handle=Handle(), placement=placed)
            near = process.streams["control"] = Peer(await open_socket(ours))
            self.tasks += [asyncio.ensure_future(far.run()), asyncio.ensure_future(process.read(near))]
            self.ranks.append(process)
            self.far.append(far)
        self.trainer = RemoteTrainer(self.ranks, deadline=0.5)
        return self

    async def __aexit__(self, *_: object) -> None:
        for peer in (*self.far, *(rank.control for rank in self.ranks)):
            peer.stream.close()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def in_group(
    count: int, calls_of: Callable[[int], dict[str, Any]], folder: Path, test: Callable[[Group], Awaitable[Any]]
) -> Any:
    async def main() -> Any:
        async with Group(count, calls_of, folder) as group:
            return await test(group)

    return asyncio.run(asyncio.wait_for(main(), 60))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.trainer.remote._BLAME_SECONDS", 0.3)
    monkeypatch.setattr("headrace.launch.process._END_SECONDS", 0.1)


def test_calls_reach_every_rank_in_order_and_answers_are_joined(tmp_path: Path) -> None:
    seen: list[list[str]] = [[], [], []]

    def calls_of(rank: int) -> dict[str, Any]:
        async def step(batch: Any, learning_rate: float) -> dict[str, float]:
            seen[rank].append(f"step {learning_rate:g}")
            return {"loss": 0.5, "memory_peak": 10.0 + rank}

        async def forward(batch: Any, column: str) -> list[Any]:
            seen[rank].append("forward")
            return [np.full(2, rank, dtype=np.float32)]

        async def save(folder: str) -> dict[str, list[int]]:
            seen[rank].append("save")
            return {f"shard-{rank}.safetensors": [rank, rank]}

        return {"step": step, "forward": forward, "save": save}

    async def test(group: Group) -> None:
        trainer = group.trainer
        steps = [trainer.step(BATCH, learning_rate=rate) for rate in (1.0, 2.0)]
        saving = trainer.save(tmp_path)
        (logprobs,) = await trainer.forward(BATCH)
        assert await steps[1] == {"loss": 0.5, "memory_peak": 12.0} and logprobs.tolist() == [0, 0]
        assert await saving == {f"shard-{rank}.safetensors": [rank, rank] for rank in range(3)}
        group.ranks[0].state, group.ranks[1].state, group.ranks[2].state = {"passes": 4}, {"passes": 3}, {"passes": 4}
        assert trainer.num_passes == 3 and trainer.num_steps == 2 and not trainer.is_lost

    in_group(3, calls_of, tmp_path, test)
    assert seen == [["step 1", "step 2", "save", "forward"]] * 3


def failing(**of_ranks: str) -> Callable[[int], dict[str, Any]]:
    """Ranks that die, raise, hang, or find that another has gone, in a step."""

    def calls_of(rank: int) -> dict[str, Any]:
        async def step(batch: Any, learning_rate: float) -> dict[str, float]:
            how = of_ranks[f"rank{rank}"]
            if how == "misses another":
                raise RankError(f"trainer rank {rank} of 2: a sum over ranks failed")
            if how == "raises":
                raise ZeroDivisionError("of its own")
            if how == "hangs":
                await asyncio.sleep(3600)
            return {}

        return {"step": step}

    return calls_of


def error_of(group: Group, when: Callable[[Group], None] = lambda _: None) -> Awaitable[Exception]:
    async def run() -> Exception:
        step = group.trainer.step(BATCH, learning_rate=1.0)
        asyncio.get_running_loop().call_later(0.1, when, group)
        with pytest.raises(Exception) as caught:
            await step
        return caught.value

    return run()


def test_a_rank_that_is_killed_is_named_although_another_misses_it_first(tmp_path: Path) -> None:
    calls = failing(rank0="misses another", rank1="hangs")
    error = in_group(2, calls, tmp_path, lambda group: error_of(group, lambda group: group.far[1].stream.close()))
    assert isinstance(error, TrainerLost) and str(error).startswith("trainer-1 (process 7) closed its stream")
    assert str(tmp_path / "trainer-1.log") in str(error)


def test_a_rank_that_hangs_is_named_and_killed_when_the_others_give_up_waiting(tmp_path: Path) -> None:
    async def test(group: Group) -> Exception:
        error = await error_of(group)
        assert [rank.handle.is_killed for rank in group.ranks] == [False, True, False] and group.trainer.is_lost
        return error

    error = in_group(3, failing(rank0="misses another", rank1="hangs", rank2="misses another"), tmp_path, test)
    assert isinstance(error, TrainerLost) and "trainer-1 (process 7) hangs in 'step'" in str(error)


def test_what_a_rank_raised_is_told_of_it_and_the_trainer_does_not_save_after_it(tmp_path: Path) -> None:
    """The others wait for it in a collective, and could not."""

    async def test(group: Group) -> Exception:
        error = await error_of(group)
        assert group.trainer.is_lost and not any(rank.lost.is_set() for rank in group.ranks)
        return error

    error = in_group(2, failing(rank0="hangs", rank1="raises"), tmp_path, test)
    assert isinstance(error, RoleFailed) and not isinstance(error, TrainerLost)
    assert "trainer-1 failed: ZeroDivisionError: of its own" in str(error)


def test_an_error_of_the_disk_is_told_when_no_rank_writes_any_more(tmp_path: Path) -> None:
    written = []

    def calls_of(rank: int) -> dict[str, Any]:
        async def save(folder: str) -> dict[str, list[int]]:
            if rank == 1:
                raise OSError(28, "No space left on device")
            await asyncio.sleep(0.3)
            written.append(rank)
            return {}

        return {"save": save}

    async def test(group: Group) -> None:
        with pytest.raises(OSError, match="No space left"):
            await group.trainer.save(tmp_path)
        assert written == [0] and not group.trainer.is_lost

    in_group(2, calls_of, tmp_path, test)


def test_a_rank_that_does_not_load_is_named(tmp_path: Path) -> None:
    def calls_of(rank: int) -> dict[str, Any]:
        async def load(folder: str) -> None:
            await asyncio.sleep(3600 if rank == 1 else 0)

        return {"load": load}

    async def test(group: Group) -> None:
        with pytest.raises(TrainerLost, match=r"trainer-1 .* does not load a checkpoint within 0\.5 s"):
            await group.trainer.load(tmp_path)

    in_group(2, calls_of, tmp_path, test)


class Share:
    """A `Trainer` that holds some ranges of one matrix."""

    num_passes = 0

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self.matrix = torch.arange(64.0).view(8, 8)

    def forward(self, batch: Any, *, column: str = "") -> list[Any]:
        return [np.zeros(1, dtype=np.float32)]

    def tensors(self) -> ShardedWeights:
        size = 64 // self.count
        first = self.rank * size
        part = self.matrix.view(-1)[first : first + size]
        return ShardedWeights(lay_out(describe({"matrix": self.matrix})), [("matrix", first, first + size, part)])


def test_ranks_publish_one_update_and_bring_late_engines_up_to_it(tmp_path: Path) -> None:
    syncs = [WeightSync(Lineage("life"), MemoryTransport(), name=f"trainer-{rank}") for rank in range(2)]

    def calls_of(rank: int) -> dict[str, Any]:
        trainer: Any = Share(rank, 2)
        return LocalTrainer(trainer, sync=syncs[rank], timeline=ProcessTimeline("trainer"), in_threads=True).calls()

    async def test(group: Group) -> None:
        trainer = group.trainer
        assert await trainer.catch_up(None) == []
        for version in range(2):
            published = await trainer.publish(version, canary=BATCH)
            update = published.update
            assert [(part.sender, part.ranges) for part in update.parts] == [
                ("trainer-0", (("matrix", 0, 32),)),
                ("trainer-1", (("matrix", 32, 64),)),
            ]
            await trainer.release(update)
            (late,) = await trainer.catch_up(None)
            assert late == update
        syncs[1].close()  # so that the ranks disagree
        with pytest.raises(SyncError, match=r"offer \[1, 0\] updates"):
            await trainer.catch_up(None)

    in_group(2, calls_of, tmp_path, test)
