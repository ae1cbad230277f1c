"""Several vLLM servers of one run: what the trainer's ranks publish is written once, and all servers read it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import numpy as np
import pytest
import torch
from fake_vllm import Fake, serving
from safetensors.torch import load_file

from headrace.config import make_recipe
from headrace.engine.kind import EnginePlace
from headrace.engine.vllm import handover as handover_module
from headrace.engine.vllm.api import VllmApi
from headrace.engine.vllm.engine import VllmEngine
from headrace.engine.vllm.handover import FolderHandover
from headrace.engine.vllm.open import open_engine
from headrace.engine.vllm.server import VllmServer
from headrace.engine.vllm.shared_folders import SharedFolders
from headrace.errors import SyncError
from headrace.model import ShardedWeights, StagedWeights, lay_out
from headrace.model.load import load_model
from headrace.model.weights import describe, named_tensors
from headrace.observe import Timeline
from headrace.records import WeightUpdate
from headrace.sync import Lineage, TransportConfig, WeightSync, make_transport, routed
from headrace.tls import make_certificate

SERVERS, RANKS = 3, 2


class Reader(Fake):
    """Reads what it is told to reload."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[str, torch.Tensor] = {}
        self.folders: list[str] = []

    async def _call(self, request):
        if request.path == "/collective_rpc":
            self.folders.append((await request.json())["kwargs"]["weights_path"])
            self.read = load_file(Path(self.folders[-1]) / "model.safetensors")
        return await super()._call(request)


@pytest.fixture
def written(monkeypatch) -> list[Path]:
    """Every file of weights that is written for servers."""
    save, paths, lock = handover_module.save_file, [], threading.Lock()

    def saved(tensors, path):
        save(tensors, path)
        with lock:
            paths.append(path)

    monkeypatch.setattr(handover_module, "save_file", saved)
    return paths


def share(weights: dict[str, torch.Tensor], rank: int) -> ShardedWeights:
    """Of each tensor a rank has one half, cut at a multiple of 8 elements."""
    ranges = []
    for name, tensor in weights.items():
        half = tensor.numel() // 2 // 8 * 8
        start, stop = (0, half) if rank == 0 else (half, tensor.numel())
        if start < stop:
            ranges.append((name, start, stop, tensor.reshape(-1)[start:stop]))
    return ShardedWeights(lay_out(describe(weights)), ranges)


def test_what_ranks_publish_is_written_once_for_all_servers(tiny_model, tmp_path, written):
    folder = tmp_path / "servers"
    config = TransportConfig("shared_memory", str(tmp_path), "headrace-t", "127.0.0.1", "t" * 32, 30.0)

    def sync(name: str, *, is_sender: bool) -> WeightSync:
        return WeightSync(Lineage("life"), make_transport(config, is_sender=is_sender, device="cpu"), name=name)

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            fakes = [Reader() for _ in range(SERVERS)]
            engines = []
            for index, fake in enumerate(fakes):
                api, model = VllmApi(await stack.enter_async_context(serving(fake))), load_model(tiny_model)
                receiving = sync(f"engine-{index}", is_sender=False)
                stack.callback(receiving.close)
                engines.append(
                    VllmEngine(
                        api,
                        await api.about(),
                        name=f"engine-{index}",
                        **{"slots": 2, "context": 64, "vocabulary": 200},
                        model=model,
                        staged=StagedWeights(model, in_place=False),
                        sync=receiving,
                        handover=FolderHandover(folder),
                        timeline=Timeline("engine"),
                    )
                )
                stack.push_async_callback(engines[-1].close)
            ranks = [sync(f"trainer-{rank}", is_sender=True) for rank in range(RANKS)]
            for rank in ranks:
                stack.callback(rank.close)
            weights = {name: tensor.clone() for name, tensor in named_tensors(load_model(tiny_model))}
            for version in range(3):
                for tensor in weights.values():
                    tensor += 0.01
                offered = [rank.offer(version, share(weights, place)) for place, rank in enumerate(ranks)]
                update = WeightUpdate.join(offered)
                assert len(update.parts) == RANKS
                await asyncio.gather(*(engine.load(update) for engine in engines))
                for rank in ranks:
                    rank.release(update)
                assert len(written) == version + 1, "one file for all servers"
                size = written[-1].stat().st_size
                assert size < 1.05 * update.manifest.total_bytes
                assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) == size, "and no older one"
                assert {fake.folders[-1] for fake in fakes} == {str(written[-1].parent)}
                for fake in fakes:
                    assert all(torch.equal(fake.read[name], tensor) for name, tensor in weights.items() if name in fake.read)
                    assert len(fake.read) >= len(weights) - 1, "all but a tied one"
            late = engines[0]
            late.version -= 1
            await late.load(update)
            assert len(written) == 3, "an engine that comes later finds it"
        assert not folder.exists()

    asyncio.run(main())


def test_servers_of_a_host_that_joins_read_one_file_there(tiny_model, tmp_path, written, monkeypatch):
    """Weights come over HTTP and TLS; the recipe's handover is for servers beside the trainer."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    config = TransportConfig("shared_memory+http", str(here), "headrace-t", "127.0.0.1", "t" * 32, 30.0, make_certificate())
    sizes = {"model.path": tiny_model, "model.context": 64, "sampling.max_tokens": 16}
    recipe = make_recipe({**sizes, "engine.kind": "vllm", "engine.vllm.handover": "nccl"})
    starting = []

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:

            async def start(model: str, arguments: list[str], **_: object) -> VllmServer:
                fake = Reader()
                fake.candidates = ((50, float(np.log(1 - np.exp(-0.5)))), (51, -9999.0))
                starting.append((model, arguments))
                fakes.append(fake)
                api = VllmApi(await stack.enter_async_context(serving(fake)))
                return VllmServer(SimpleNamespace(args=[]), api, "")

            monkeypatch.setattr("headrace.engine.vllm.open.start", start)
            fakes, engines, relays = list[Reader](), [], []
            for name in ("engine-1", "engine-2"):
                far = dataclasses.replace(config, transport="http", folder=str(there))
                sync = WeightSync(Lineage("life"), make_transport(far, is_sender=False, device="cpu"), name=name)
                stack.callback(sync.close)
                relays.append(sync.relay)
                more = {"log": tmp_path / "log", "folder": far.handover(name), "prefix": far.prefix}
                place = EnginePlace(name=name, index=1, device="cpu", receives_on="cpu", is_far=True, **more)
                opened = await open_engine(recipe, tiny_model, place, sync=sync, timeline=Timeline("engine"))
                engines.append(opened.engine)
                stack.push_async_callback(opened.engine.close)
            trainer = WeightSync(Lineage("life"), make_transport(config, is_sender=True, device="cpu"), name="trainer")
            stack.callback(trainer.close)
            weights = {name: tensor + 0.01 for name, tensor in named_tensors(load_model(tiny_model))}
            update, before = trainer.offer(0, weights.items()), len(written)
            await asyncio.gather(*(map(VllmEngine.load, engines, routed(update, relays))))
            assert [path.parents[1] for path in written[before:]] == [there / "headrace-t-servers"]
            assert [model for model, _ in starting] == [tiny_model] * 2
            assert not any("--weight-transfer-config" in arguments for _, arguments in starting)
            for fake in fakes:
                assert fake.folders[-1] == str(written[-1].parent)
                assert all(torch.equal(fake.read[name], tensor) for name, tensor in weights.items() if name in fake.read)

    asyncio.run(main())
    assert not any(there.iterdir())


def test_a_server_alone_needs_room_for_one_file(tmp_path, monkeypatch):
    found: list[list[str]] = []
    monkeypatch.setattr(
        handover_module, "save_file", lambda _, path: found.append([each.name for each in tmp_path.glob("*/*")])
    )
    way = FolderHandover(tmp_path / "servers")
    for name in ("1", "2", "2"):
        way.prepare({}, name=name)
    way.close()
    assert found == [["1"], ["2"]]


def test_a_folder_stays_while_a_process_uses_it(tmp_path):
    one, other = SharedFolders(tmp_path / "all"), SharedFolders(tmp_path / "all")
    names: list[str] = []
    write = lambda path: names.append(path.name)  # noqa: E731
    first = one.take("1", write)
    assert other.take("1", write) == first and names == ["1"]
    second = one.take("2", write)
    one.drop_all_but("2")
    assert first.exists() and second.exists()
    other.take("2", write)
    other.drop_all_but("2")
    assert not first.exists() and names == ["1", "2"]
    one._used.pop("2").close()  # as when its process is killed
    other.drop_all_but()
    assert not (tmp_path / "all").exists()


def test_what_fails_to_be_written_is_written_by_the_next(tmp_path):
    one, other = SharedFolders(tmp_path / "all"), SharedFolders(tmp_path / "all")

    def fails(path: Path) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        one.take("1", fails)
    other.take("1", lambda path: (path / "file").touch())
    assert one.take("1", fails) / "file" in list((tmp_path / "all" / "1").iterdir())


def test_a_place_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(SyncError, match=r"^sync.folder = '.*/gone': it is gone"):
        SharedFolders(tmp_path / "gone" / "run").take("1", lambda _: None)


def test_what_is_taken_while_it_is_removed_is_written_again(tmp_path, monkeypatch):
    one, other = SharedFolders(tmp_path / "all"), SharedFolders(tmp_path / "all")
    write = lambda path: (path / "file").touch()  # noqa: E731
    one.take("1", write)
    remove = shutil.rmtree

    def removes(path: Path, **how: bool) -> None:
        (path / ".lock").unlink()  # files go one by one, in any order
        other.take("1", write)
        remove(path, **how)

    monkeypatch.setattr(shutil, "rmtree", removes)
    one.drop_all_but()
    assert (tmp_path / "all" / "1" / "file").exists()


def test_what_is_removed_and_taken_again_while_it_is_removed_stays(tmp_path, monkeypatch):
    one, other = SharedFolders(tmp_path / "all"), SharedFolders(tmp_path / "all")
    write = lambda path: (path / "file").touch()  # noqa: E731
    one.take("1", write)
    lock = fcntl.flock

    def removes_and_takes_first(file: IO[str], how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        other.drop_all_but()
        other.take("1", write)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", removes_and_takes_first)
    one.drop_all_but()
    assert (tmp_path / "all" / "1" / "file").exists()


def test_what_is_moved_away_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    """One that removes it moves it first, and its lock may be made again there before it is gone."""
    write = lambda path: (path / "file").touch()  # noqa: E731
    SharedFolders(tmp_path / "all").take("1", write)
    lock = fcntl.flock

    def moves_first(file: IO[str], how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        (tmp_path / "all" / "1").rename(tmp_path / "all" / ".gone")
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", moves_first)
    assert (SharedFolders(tmp_path / "all").take("1", write) / "file").exists()


def test_the_last_to_leave_may_find_the_folders_gone(tmp_path, monkeypatch):
    one, other = SharedFolders(tmp_path / "all"), SharedFolders(tmp_path / "all")
    for each in (one, other):
        each.take("1", lambda _: None)
    read = os.listdir

    def removes_first(path: Path) -> list[str]:
        monkeypatch.undo()
        other.drop_all_but()
        return read(path)

    monkeypatch.setattr(os, "listdir", removes_first)
    one.drop_all_but()
    assert os.listdir is read and not (tmp_path / "all").exists()


def test_processes_that_take_and_drop_at_once_never_lose_what_they_use(tmp_path):
    """Threads with locks of their own stand for processes."""
    lost: list[str] = []

    def work(number: int) -> None:
        folders = SharedFolders(tmp_path / "all")
        for step in range(60):
            name = str((step + number) // 3)
            path = folders.take(name, lambda path: (path / "file").write_text(path.name))
            folders.drop_all_but(name)
            if (path / "file").read_text() != name:
                lost.append(name)
        folders.drop_all_but()

    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not lost and not (tmp_path / "all").exists()
