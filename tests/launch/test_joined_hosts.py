"""The launcher's side of hosts that join: who is let in, what they are told, and what becomes of those that vanish."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pytest

from headrace import __version__, leftovers
from headrace.config import make_recipe
from headrace.durable import seal
from headrace.launch.build import build_trainer
from headrace.launch.clock import ClockOffset
from headrace.launch.cluster import ClusterProcesses
from headrace.launch.hosts import Host, HostOffer, Hosts, JoinedProcess
from headrace.launch.joined_trainer import JoinedTrainer
from headrace.launch.joining import JoinOptions, _Joiner, device_names, join
from headrace.launch.launcher import orchestration_of
from headrace.launch.model_files import PIECE_BYTES, fetch_model, list_files, read_piece
from headrace.launch.on_ray import RayProcesses
from headrace.launch.placement import Order, Placement
from headrace.launch.process import Place, RoleFailed, RoleProcess, TrainerLost
from headrace.launch.settings import ClusterSettings, read_token
from headrace.launch.stop import StopRequest
from headrace.leftovers import sweep
from headrace.model import ModelError
from headrace.rpc import PROTOCOL, Peer, RemoteError, StreamClosed, connect
from headrace.settings import ConfigError
from headrace.sync import TransportConfig, make_transport
from headrace.tls import make_certificate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

TOKEN, CERTIFICATE = "t" * 32, make_certificate()


class Run:
    """A launcher's hosts, and what they report."""

    def __init__(
        self, model: str, *, heartbeat: float = 30.0, takes_trainer: bool = False, frozen: tuple[str, ...] = ()
    ) -> None:
        self.ready, self.leaving, self.said = [], [], []
        self.has_news = threading.Event()

        def on_ready(host: object) -> None:
            self.ready.append(host)
            self.has_news.set()

        self.hosts = Hosts(
            ClusterSettings(listen="127.0.0.1:0"),
            token=TOKEN,
            certificate=CERTIFICATE,
            heartbeat=heartbeat,
            model=model,
            frozen=frozen,
            takes_trainer=takes_trainer,
            on_ready=on_ready,
            on_leaving=self.leaving.append,
            say=self.said.append,
        )
        self.url = self.hosts.start()

    @contextlib.asynccontextmanager
    async def joined(self, *, clock: float = 0.0) -> AsyncIterator[tuple[Peer, list[Any]]]:
        """A host whose clocks are off, and the notices it gets."""
        stream = await connect(f"tls:{self.url.removeprefix('tls://')}", token=TOKEN, name="far", channel="host")
        heard: list[Any] = []

        async def ping() -> dict[str, float]:
            return {"ticks": time.perf_counter() + clock, "time": time.time() + clock}

        names = ("start", "beat", "kill", "end")
        notices = {name: lambda value, name=name: heard.append((name, value)) for name in names}
        peer = Peer(stream, calls={"ping": ping}, notices=notices)
        reading = asyncio.ensure_future(peer.run())
        try:
            yield peer, heard
        finally:
            stream.close()
            reading.cancel()
            await asyncio.wait({reading})


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path) -> str:
    folder = tmp_path / "model"
    (folder / "more").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "more" / "weights").write_bytes(np.random.default_rng(0).bytes(20_000_000))
    (folder / ".lock").touch()
    return str(folder)


@pytest.fixture
def run(model) -> Iterator[Run]:
    made = Run(model)
    yield made
    made.hosts.close()


def test_a_host_with_another_token_is_refused(run, monkeypatch):
    monkeypatch.setattr("headrace.launch.joining._RETRY_SECONDS", 0.01)
    for token in ("x", ""):
        with pytest.raises(ConfigError, match="refuses this host: it has another token"):
            join(JoinOptions(url=run.url, token=token, wait=5))
    assert not run.ready


def test_a_launcher_that_closes_once_has_not_refused_the_host(run):
    async def main() -> None:
        joiner = _Joiner(JoinOptions(url=run.url, token=TOKEN))
        for _ in range(2):
            run.hosts._listener._token = "of another run"
            assert await joiner._connect() is None and await joiner._connect() is None
            run.hosts._listener._token = TOKEN
            peer = await joiner._connect()
            assert peer is not None
            peer.stream.close()

    asyncio.run(main())


def test_a_host_with_another_version_is_told_both(run):
    async def main() -> None:
        async with run.joined() as (peer, _):
            told = f"this host has headrace 0.0.1 .protocol 1., and the run has {__version__}"
            with pytest.raises(RemoteError, match=told):
                await peer.call("join", version="0.0.1", schema=5)  # as it was before hosts told a protocol

    asyncio.run(main())


def test_nobody_at_the_address_is_waited_for(capsys):
    assert join(JoinOptions(url="tls://127.0.0.1:9", token=TOKEN, wait=0)) == 1
    assert "no launcher has listened at tls://127.0.0.1:9" in capsys.readouterr().out


def test_a_model_crosses_in_pieces_and_is_kept(run, model, tmp_path, cache):
    async def main() -> str:
        loop = asyncio.get_running_loop()
        async with run.joined() as (peer, _):
            told = await peer.call("join", version=__version__, protocol=PROTOCOL)

            def read(name: str, start: int) -> Any:
                return asyncio.run_coroutine_threadsafe(peer.call("read", name=name, start=start), loop).result()

            made, _lock = await asyncio.to_thread(fetch_model, told["model"], told["files"], read=read)
            with pytest.raises(RemoteError, match="no file of the model"):
                await peer.call("read", name="../secret", start=0)
            assert fetch_model(told["model"], told["files"], read=None)[0] == made
        return made

    made = asyncio.run(main())
    ours, theirs = list_files(model), list_files(made)
    assert {name: size for name, (size, _) in ours.items()} == {name: size for name, (size, _) in theirs.items()}
    assert len(ours) == 2
    for name in ours:
        assert np.array_equal(read_piece(tmp_path / "model" / name, 12_345), read_piece(tmp_path / made / name, 12_345))


def test_a_model_may_not_write_elsewhere(cache):
    with pytest.raises(ConfigError, match="outside its folder"):
        fetch_model("m", {"../../x": [1, 0]}, read=lambda *_: np.zeros(1, np.uint8))
    assert fetch_model("name/of-the-hub", {}, read=None) == ("name/of-the-hub", None)


def fetch(number: int) -> tuple[str, IO[str]]:
    return fetch_model("m", {"config.json": [1, number]}, read=lambda *_: np.zeros(1, np.uint8))


def fetch_and_leave(number: int) -> str:
    made, lock = fetch(number)
    lock.close()
    return made


def test_a_model_that_is_wanted_while_it_is_removed_is_fetched_again(cache, monkeypatch):
    remove, wanted = shutil.rmtree, list[str]()

    def removes(path, **how) -> None:
        if not wanted and how.get("ignore_errors"):
            (path / ".lock").unlink()  # files go one by one, in any order
            wanted.append(fetch_and_leave(0))
        remove(path, **how)

    for number in range(3):
        os.utime(fetch_and_leave(number), (1000 + number, 1000 + number))
    monkeypatch.setattr(shutil, "rmtree", removes)
    fetch_and_leave(3)
    assert (Path(wanted[0]) / "config.json").is_file()


def test_a_host_keeps_the_newest_models_and_those_in_use(cache):
    def kept() -> set[str]:
        return {str(path) for path in (cache / "joined").iterdir()}

    def age(seconds: float) -> None:
        """As if all of them had been used so much earlier."""
        for path in (cache / "joined").iterdir():
            used = path.stat().st_mtime - seconds
            os.utime(path, (used, used))

    in_use, lock = fetch(0)
    paths = [in_use]
    abandoned = cache / "joined" / ".making-killed"
    abandoned.mkdir()
    age(1000)
    for number in range(1, 6):
        paths.append(fetch_and_leave(number))
        age(100)
    assert kept() == {in_use, *paths[-3:]}, "what a killed host had begun to fetch is gone too"
    for number in (3, 1):
        fetch_and_leave(number)
    age(100)
    third, _lock = fetch(3)
    assert third in kept() and kept() == {in_use, paths[1], paths[3], paths[5]}
    lock.close()
    _sixth = fetch(6)
    assert in_use not in kept()
    for number in range(7, 12):
        fetch_and_leave(number)
    assert len(kept()) == 7, "what was used a moment ago stays: its user may be about to lock it"


@pytest.mark.parametrize(
    ("settings", "trainer", "near", "far"),
    [
        ({}, "shared_memory+http", "shared_memory", "http"),
        ({"sync.transport": "http"}, "http", "http", "http"),
    ],
)
def test_an_engine_receives_weights_by_where_it_is(tmp_path, settings, trainer, near, far):
    async def main() -> None:
        processes = ClusterProcesses(make_recipe({"device": "cpu", "cluster.listen": "127.0.0.1:0", **settings}), tmp_path)
        processes._listener = processes._far_listener = None
        offer = HostOffer(host="far", address="127.0.0.1", shared_folder="/dev/shm/of-far")
        host = Host(1, None, asyncio.get_running_loop(), offer=offer)

        def end_of(place: Place) -> tuple[str, str]:
            placed = SimpleNamespace(address="127.0.0.1", shared_folder="/dev/shm/of-far")
            config = processes._ends_for(SimpleNamespace(host=place.host, placement=placed))[1]
            end = make_transport(config, is_sender=place.role == "trainer", device="cpu")
            end.close()
            return end.name, config.folder

        here = str(processes._shared_folder)
        assert end_of(processes.place("engine", 1, host=host)) == (far, "/dev/shm/of-far")
        assert [end_of(processes.place(role, 0)) for role in ("trainer", "engine")] == [(trainer, here), (near, here)]
        assert end_of(processes.place("trainer", 1)) == (trainer, here), "a rank of that number is here all the same"

    asyncio.run(main())


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110  (it changes in another thread)
            await asyncio.sleep(0.01)


async def offer(peer: Peer) -> None:
    await peer.call("ready", host="far", address="10.0.0.9", devices=["cpu"], threads=1, folder="/x", model="m")


def test_a_clock_that_is_an_hour_off_is_named_and_measured(run):
    async def main() -> None:
        async with run.joined(clock=-3600.0) as (peer, _):
            await until(lambda: any(host.wall.seconds for host in run.hosts._hosts))
            await offer(peer)

    asyncio.run(main())
    assert "far's clock is 3,600 s behind this host's" in run.said[0]
    assert run.ready[0].ticks.seconds == pytest.approx(-3600, abs=0.5)
    assert run.ready[0].wall.seconds == pytest.approx(-3600, abs=0.5)


def test_a_difference_between_clocks_that_may_be_none_is_none():
    offset = ClockOffset()
    assert offset.seconds == 0
    offset.add(0.004, within=0.005)
    assert offset.seconds == 0
    offset.add(0.0035, within=0.002)
    offset.add(0.3, within=0.4)
    assert offset.seconds == 0.0035, "the closest counts"


def test_a_host_is_told_what_to_start_and_a_process_ends_with_it(run, caplog):
    async def main() -> None:
        async with run.joined() as (peer, heard):
            await offer(peer)
            host = run.ready[0]
            first, second = JoinedProcess("engine-1", host), JoinedProcess("engine-2", host)
            left = JoinedProcess("engine-4", host)
            del host.processes["engine-4"]  # it has nothing left to do, and the run has forgotten it
            first.beat()
            second.kill()
            await until(lambda: len(heard) == 2)
            one, two = ({"name": name, "incarnation": 1} for name in ("engine-1", "engine-2"))
            assert heard == [("beat", one), ("kill", two)]
            peer.notify("started", {**one, "pid": 77})
            peer.notify("ended", {**two, "status": -9})
            assert await asyncio.to_thread(second.wait) == -9
            peer.notify("leaving", None)
            await until(lambda: run.leaving)
            assert first.describe() == "process 77 on far"
        assert await asyncio.to_thread(first.wait) is await asyncio.to_thread(left.wait) is None
        for process in (first, left):
            process.beat()
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), host.loop))
        assert not caplog.records, "nothing is sent to it"
        assert first.describe() == "process 77 on far, which is gone"
        assert JoinedProcess("engine-3", host).wait() is None

    asyncio.run(main())


def test_a_host_that_is_sent_a_piece_of_a_file_still_hears_heartbeats():
    async def main() -> None:
        told: list[str] = []
        stream = SimpleNamespace(backlog=PIECE_BYTES + 1000)
        host = Host(1, SimpleNamespace(stream=stream, notify=lambda name, _: told.append(name)), asyncio.get_running_loop())
        JoinedProcess("trainer", host).beat()
        stream.backlog *= 4
        await asyncio.sleep(0)
        assert told == [], "it does not read"
        stream.backlog //= 4
        JoinedProcess("trainer", host).beat()
        await asyncio.sleep(0)
        assert told == ["beat"]

    asyncio.run(main())


def test_news_of_a_process_that_the_run_has_given_up_is_ignored(run):
    async def main() -> None:
        async with run.joined() as (peer, _):
            await offer(peer)
            host = run.ready[0]
            given_up, other = JoinedProcess("engine-1", host), JoinedProcess("engine-2", host)
            given_up.kill()
            del host.processes["engine-1"]
            for name in ("engine-1", "engine-2"):
                peer.notify("started", {"name": name, "incarnation": 1, "pid": 77})
                peer.notify("ended", {"name": name, "incarnation": 1, "status": 3})
            assert await asyncio.to_thread(other.wait) == 3 and not host.is_gone
            again = JoinedProcess("engine-2", host, incarnation=2)
            peer.notify("ended", {"name": "engine-2", "incarnation": 1, "status": 3})
            peer.notify("started", {"name": "engine-2", "incarnation": 2, "pid": 78})
            await until(lambda: again.pid)
            assert not again._has_ended.is_set(), "the end of the process before it is not its own"

    asyncio.run(main())


@pytest.mark.parametrize("last_words", [RemoteError(kind="ModelError", message="it has no such layer"), None])
def test_an_engine_that_its_host_cannot_run_does_not_end_the_run(tmp_path, monkeypatch, last_words):
    said, reasons = [], []
    monkeypatch.setattr("headrace.launch.hosts.Host.tell", lambda *_: None)
    monkeypatch.setattr("headrace.launch.hosts.Host.dismiss", lambda _, reason: reasons.append(reason))

    async def main() -> ClusterProcesses:
        processes = ClusterProcesses(make_recipe({"cluster.listen": "127.0.0.1:0", "engine.restarts": 0}), tmp_path)
        processes._say, processes.pool.lose = said.append, lambda _: None
        processes._timelines = {"engine": SimpleNamespace(forget=lambda _: None)}
        host = Host(1, None, asyncio.get_running_loop(), offer=HostOffer(host="far", address="10.0.0.9"))
        process = processes.start_process(processes.place("engine", 1, host=host, device="cpu"))
        process._last_words = last_words
        process.verdict = "was lost"
        process.lost.set()
        process.ended.set()
        await processes._replace(process, None)
        return processes

    processes = asyncio.run(main())
    if last_words is not None:
        assert said == ["engine-1 on far is given up: it has no such layer"] and reasons == ["it has no such layer"]
    else:
        assert "engine.restarts = 0 are spent" in said[0] and reasons == ["engine-1 is given up"]
    assert processes._losses()["engines_given_up"] == ["engine-1"] and processes._places["engine-1"].is_over


@pytest.mark.parametrize("answer", [{"ticks": 0.0}, {"ticks": "1", "time": 2}, None])
def test_a_host_that_answers_pings_with_nonsense_is_gone(run, answer):
    async def main() -> None:
        async with run.joined() as (peer, _):
            await offer(peer)

            async def ping() -> object:
                return answer

            peer.calls["ping"] = ping
            await until(lambda: run.ready[0].is_gone)

    asyncio.run(main())


def test_a_host_that_falls_silent_is_gone_after_the_heartbeat(model):
    run = Run(model, heartbeat=0.3)

    async def main() -> None:
        async with run.joined() as (peer, _):
            await offer(peer)
            process = JoinedProcess("engine-1", run.ready[0])

            async def never() -> None:
                await asyncio.Event().wait()

            peer.calls["ping"] = never
            began = time.monotonic()
            assert await asyncio.to_thread(process.wait) is None
            assert time.monotonic() - began < 10

    try:
        asyncio.run(main())
    finally:
        run.hosts.close()


def test_a_host_joins_again_when_the_launcher_has_been_silent(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def silent(*_: object) -> None:
        pass

    monkeypatch.setattr(Hosts, "_keep_pinging", silent)
    run = Run("name/of-the-hub", heartbeat=0.1)  # nothing to fetch in that time
    joining = threading.Thread(target=join, args=(JoinOptions(url=run.url, token=TOKEN, device="cpu", wait=0),), daemon=True)
    joining.start()
    try:
        asyncio.run(until(lambda: len(run.ready) == 2))
    finally:
        run.hosts.close()
    joining.join(10)
    assert not joining.is_alive() and "has been silent for 0.3 s" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("has_folder", "is_killed"), [(False, False), (True, False), (False, True)])
def test_logs_of_a_process_that_failed_stay_until_the_next_run_on_that_host(monkeypatch, tmp_path, has_folder, is_killed):
    """Or for good, in a folder of the user's, where nothing else is left. Also of one that the launcher kills, letting the host
    go before it is dead."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder, killed = tmp_path / "mine" if has_folder else None, threading.Event()

    def die() -> int:
        if is_killed:
            assert killed.wait(30)
            time.sleep(0.2)
        return 1

    failing = SimpleNamespace(pid=1, order=lambda _: None, wait=die, kill=killed.set)
    monkeypatch.setattr("headrace.launch.joining.ChildProcess", lambda *_: failing)
    run = Run("name/of-the-hub")
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(join, JoinOptions(url=run.url, token=TOKEN, device="cpu", folder=folder, wait=0))
        try:
            assert run.has_news.wait(30)
            [host] = run.ready
            logs = Path(host.offer.folder)
            (logs / "log").touch()
            process = JoinedProcess("engine-1", host, incarnation=3)
            process.order(order_with_log(logs / "log"))
            if is_killed:
                process.kill()
                host.dismiss()
                assert joining.result(30) == 0
            else:
                assert process.wait() == 1
        finally:
            run.hosts.close()
    assert joining.result() == 0 and [path.name for path in logs.iterdir()] == ["log"]
    assert {path.name for path in tmp_path.iterdir()} == {logs.name, *([] if has_folder else [f"{logs.name[:-5]}.lock"])}
    sweep(tmp_path)
    assert [*tmp_path.iterdir()] == ([folder] if has_folder else [])


def order_with_log(log: Path) -> Order:
    at = {"host": "far", "address": "127.0.0.1", "device": "cpu", "receives_on": "cpu", "threads": 1}
    placement = Placement(**at, run_folder=str(log.parent), log=str(log), shared_folder=str(log.parent))
    transport = TransportConfig("http", str(log.parent), "headrace-17-ab", "127.0.0.1", "0" * 64, 60.0)
    names = {"name": "engine-1", "role": "engine", "index": 1, "incarnation": 3}
    more = {"address": "unix:/s", "silence": 60.0, "deadline": 60.0, "import_path": []}
    return Order(**names, placement=placement, transport=transport, **more)


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_host_that_cannot_start_a_process_says_so(run, monkeypatch, tmp_path, capsys, is_readable):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    options = JoinOptions(url=run.url, token=TOKEN, device="cpu", folder=tmp_path / "logs", wait=0)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(join, options)
        try:
            assert run.has_news.wait(30)
            [host] = run.ready
            process = JoinedProcess("engine-1", host, incarnation=3)
            if is_readable:
                process.order(order_with_log(tmp_path / "missing" / "log"))
                assert process.wait() == 1
            else:
                host.tell("start", "no order")
                with pytest.raises(ValueError, match="Expecting value"):
                    joining.result(5)
        finally:
            run.hosts.close()
    if is_readable:
        assert joining.result() == 0 and "engine-1 could not be started: [Errno 2]" in capsys.readouterr().out


def test_hosts_of_one_machine_have_shared_folders_of_their_own_and_leave_none(run, monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "memory"
    monkeypatch.setattr("headrace.launch.joining.shared_folder", lambda: place)
    (place / "headrace-1-killed-joined").mkdir(parents=True)
    os.close(leftovers.Claim(place, "headrace-1-killed")._descriptor)  # as the system does when it is killed
    options = [JoinOptions(url=run.url, token=TOKEN, device="cpu", folder=tmp_path / name, wait=0) for name in "ab"]
    joining = [threading.Thread(target=join, args=(each,), daemon=True) for each in options]
    for each in joining:
        each.start()
    asyncio.run(until(lambda: len(run.ready) == 2))
    folders = [Path(host.offer.shared_folder) for host in run.ready]
    assert {*place.glob("*-joined")} == {*folders} and len({*folders}) == 2, "what a killed one left is gone"
    (folders[0] / "headrace-9-run-servers").mkdir()
    run.hosts.close()
    for each in joining:
        each.join(30)
    assert not any(place.iterdir())


@pytest.mark.parametrize(("count", "gpus_each", "devices"), [(8, 0, [0, 1, 2]), (2, 0, [0, 1, 0]), (12, 4, [0, 4, 8])])
def test_engines_of_several_gpus_have_them_for_themselves(monkeypatch, count, gpus_each, devices):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    assert device_names("auto", 3, gpus_each=gpus_each) == tuple(f"cuda:{each}" for each in devices)
    if gpus_each:
        with pytest.raises(ConfigError, match="--engines 4: each needs 4 GPUs for itself here, and there are 12"):
            device_names("auto", 4, gpus_each=gpus_each)
    assert device_names("cpu", 2, gpus_each=gpus_each) == ("cpu", "cpu")


def test_a_server_that_joins_is_placed_on_the_gpus_offered_and_reads_files(tmp_path):
    async def main() -> None:
        settings = {"cluster.listen": "127.0.0.1:0", "engine.kind": "vllm", "engine.vllm.handover": "ipc"}
        processes = ClusterProcesses(make_recipe(settings), tmp_path)
        offer = HostOffer(host="far", address="127.0.0.1", shared_folder="/dev/shm/of-far")
        host = Host(1, None, asyncio.get_running_loop(), offer=offer)
        placed = processes.start_process(processes.place("engine", 1, host=host, device="cuda:4")).placement
        assert (placed.device, placed.receives_on) == ("cuda:4", "cpu")

    asyncio.run(main())


@pytest.mark.parametrize(("device", "needs"), [("auto", [4, 1]), ("cpu", [0, 0])])
def test_ray_reserves_all_gpus_of_a_server(tmp_path, monkeypatch, device, needs):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(cluster_resources=lambda: {"GPU": 8.0}))
    arguments = {"tensor_parallel_size": 4}
    settings = {"orchestrate": "ray", "cluster.listen": "127.0.0.1:0", "device": device, "engine.kind": "vllm"}
    processes = RayProcesses(make_recipe({**settings, "engine.vllm.arguments": arguments}), tmp_path)
    assert [processes._needs(role, 2) for role in ("engine", "trainer")] == [(2, each) for each in needs]


class Rank:
    """Saves and loads as a trainer's rank does on its host, and fails as told."""

    name, incarnation, verdict = "trainer", 1, "it is gone"

    def __init__(self, host: Host, folder: Path | None = None) -> None:
        self.host = host
        self.placement = SimpleNamespace(run_folder=str(folder or host.offer.passing))
        self.control = self
        self.loaded: dict[str, bytes] = {}
        self.missing: dict[str, list[int]] = {}

    def begin(self, name: str, *, folder: str) -> asyncio.Future[Any]:
        place, answer = Path(folder), asyncio.get_running_loop().create_future()
        if name == "save":
            (place / "trainer").mkdir(parents=True)
            (place / "model.safetensors").write_bytes(bytes(9_000_000))
            (place / "trainer" / "optimizer.safetensors").write_bytes(b"moments")
            answer.set_result(self.missing | seal(place))
        else:
            self.loaded = {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}
            answer.set_result(None)
        return answer

    def give_up(self, verdict: str) -> None:
        self.verdict = verdict

    async def explain(self) -> Exception:
        return TrainerLost(self.verdict)


def test_a_checkpoint_crosses_to_the_launcher_and_back(model, monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    run, theirs, ours = Run(model, takes_trainer=True), tmp_path / "theirs", tmp_path / ".step-4.tmp"
    options = JoinOptions(role="trainer", url=run.url, token=TOKEN, device="cpu", folder=theirs, wait=0)
    joining = threading.Thread(target=join, args=(options,), daemon=True)
    joining.start()

    async def main() -> None:
        await until(lambda: run.ready)
        [host] = run.ready
        rank, passing = Rank(host), Path(host.offer.passing)
        assert passing.parent == theirs
        trainer = JoinedTrainer([rank], deadline=60)
        assert host.offer.role == "trainer"
        files = await trainer.save(ours)
        assert files == seal(ours) and len(files) == 2
        (ours / "buffer.wire").write_bytes(b"for the launcher alone")
        await trainer.load(ours)
        assert rank.loaded["trainer/optimizer.safetensors"] == b"moments" and len(rank.loaded) == 2
        assert not seal(passing)
        with pytest.raises(LookupError, match="nor of a checkpoint for this host"):
            await host.read("buffer.wire", 0, place=f"{passing}/step-4.tmp-1")
        monkeypatch.setattr("headrace.launch.joined_trainer.fingerprint", lambda _: [0, 0])
        with pytest.raises(OSError, match="has changed on its way from"):
            await trainer.save(ours)
        rank.missing = {"model-2.safetensors": [1, 0]}
        with pytest.raises(OSError, match="No such file or directory"):
            await trainer.save(ours)
        rank.begin("save", folder=str(passing / "of-a-lost-launcher"))
        host.dismiss()
        await until(lambda: host.is_gone)
        rank.placement.run_folder = str(tmp_path)  # the other is being removed
        with pytest.raises(TrainerLost):
            await trainer.save(tmp_path / ".step-5.tmp")

    try:
        asyncio.run(main())
    finally:
        run.hosts.close()
    joining.join(30)
    assert not any(theirs.iterdir()), "what was on its way stays on the host"


def test_ranks_of_one_node_fetch_a_checkpoint_once(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    run, ours = Run("name/of-the-hub", takes_trainer=True), tmp_path / "step-4"
    (ours / "trainer").mkdir(parents=True)
    (ours / "trainer" / "optimizer.safetensors").write_bytes(bytes(9_000_000))
    options = [
        JoinOptions(role="trainer", url=run.url, token=TOKEN, device="cpu", folder=tmp_path / name, wait=0) for name in "ab"
    ]
    joining = [threading.Thread(target=join, args=(each,), daemon=True) for each in options]
    for each in joining:
        each.start()

    async def main() -> None:
        await until(lambda: len(run.ready) == 2)
        ranks = [Rank(host) for host in run.ready]
        trainer = JoinedTrainer(ranks, deadline=60)
        await trainer.load(ours)
        assert ranks[0].loaded == ranks[1].loaded == {"trainer/optimizer.safetensors": bytes(9_000_000)}
        assert sorted(host._num_read for host in run.ready) == [0, 2]
        assert not any(seal(Path(host.offer.passing)) for host in run.ready)

    try:
        asyncio.run(main())
    finally:
        run.hosts.close()
    for each in joining:
        each.join(30)


@pytest.mark.parametrize("way", ["save", "load"])
def test_a_checkpoint_crosses_to_several_hosts_side_by_side(monkeypatch, tmp_path, way):
    both = threading.Barrier(2, timeout=10)
    busy: set[str] = set()

    class Far:
        def __init__(self, name: str) -> None:
            self.name, self.offer = name, SimpleNamespace(passing=str(tmp_path / name))

        def work(self, *_: object, deadline: float) -> None:
            assert self.name not in busy, "ranks of one host take turns"
            busy.add(self.name)
            both.wait()
            busy.remove(self.name)

        fetch = deliver = work
        remove = staticmethod(lambda place, *, deadline: None)

    async def collect(*_: object) -> list[dict[str, list[int]]]:
        return [{}] * 4

    async def main() -> None:
        trainer = JoinedTrainer([Rank(Far(name)) for name in "abab"], deadline=60)
        monkeypatch.setattr(trainer, "_collect", collect)
        monkeypatch.setattr("headrace.trainer.RemoteTrainer.load", collect)
        await (trainer._saved(tmp_path, []) if way == "save" else trainer.load(tmp_path))

    asyncio.run(main())


def test_frozen_models_of_the_trainer_cross_to_its_hosts_alone(model, tiny_model, monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    run = Run(model, takes_trainer=True, frozen=(tiny_model, "a/teacher-of-the-hub"))
    joining = []
    for role in ("trainer", "engine"):
        options = JoinOptions(role=role, url=run.url, token=TOKEN, device="cpu", folder=tmp_path / role, wait=0)
        joining.append(threading.Thread(target=join, args=(options,), daemon=True))
        joining[-1].start()

    async def main() -> dict[str, dict[str, str]]:
        await until(lambda: len(run.ready) == 2)
        return {host.offer.role: host.offer.frozen for host in run.ready}

    try:
        offered = asyncio.run(main())
    finally:
        run.hosts.close()
    for each in joining:
        each.join(30)
    assert offered["engine"] == {} and offered["trainer"].keys() == {tiny_model}
    assert offered["trainer"][tiny_model].startswith(str(tmp_path / "cache"))
    there = {"/only/at/the/launcher": offered["trainer"][tiny_model]}
    recipe = make_recipe({"train.kl": 0.1, "train.reference": "/only/at/the/launcher"})
    with pytest.raises(ModelError, match="/only/at/the/launcher"):
        build_trainer(recipe, tiny_model, device="cpu")
    build_trainer(recipe, tiny_model, device="cpu", places=there)


def test_an_interrupted_run_does_not_wait_for_a_checkpoint_on_its_way(run, tmp_path):
    async def main() -> None:
        async with run.joined() as (peer, _):
            await offer(peer)
            is_asked = asyncio.Event()

            async def read(**_: object) -> None:
                is_asked.set()
                await asyncio.Event().wait()

            peer.calls["read"] = read
            fetching = asyncio.ensure_future(
                asyncio.to_thread(run.ready[0].fetch, "/x", {"a": [1, 0]}, tmp_path / "b", deadline=60)
            )
            await asyncio.wait_for(is_asked.wait(), 30)
            processes = ClusterProcesses(make_recipe({"cluster.listen": "127.0.0.1:0"}), tmp_path)
            processes._trainer_hosts = list(run.ready)
            processes._kill_all()
            with pytest.raises(StreamClosed):
                await asyncio.wait_for(fetching, 30)

    asyncio.run(main())


async def test_one_stop_request_ends_the_wait_for_hosts_and_a_second_is_still_heard_after_it(tmp_path):
    recipe = make_recipe({"cluster.listen": "127.0.0.1:0", "cluster.trainer_joins": True})
    processes = ClusterProcesses(recipe, tmp_path)
    processes._loop, processes._say = asyncio.get_running_loop(), lambda _: None
    has_heard = asyncio.Event()
    with processes.stop.cancels(SimpleNamespace(get_loop=lambda: processes._loop, cancel=has_heard.set), at=2):
        waiting = asyncio.ensure_future(processes._place_trainers())
        await asyncio.sleep(0)
        await asyncio.to_thread(processes.stop.make)
        await asyncio.wait({waiting}, timeout=30)
        assert waiting.cancelled() and not has_heard.is_set()
        await asyncio.to_thread(processes.stop.make)
        await asyncio.wait_for(has_heard.wait(), 30)


@pytest.mark.parametrize("way", ["save", "load"])
def test_a_host_that_stops_reading_a_checkpoint_is_named_and_let_go(run, tmp_path, way):
    async def main() -> None:
        async with run.joined() as (peer, heard):
            await offer(peer)

            async def hangs(**_: object) -> None:
                await asyncio.Event().wait()

            peer.calls |= {"read": hangs, "fetch": hangs, "remove": hangs}
            rank = Rank(run.ready[0], tmp_path / "theirs")
            trainer = JoinedTrainer([rank], deadline=0.1)
            call = "read" if way == "save" else "fetch"
            why = f"far neither answers '{call}' nor reads for 0.1 s .deadline."
            with pytest.raises(TrainerLost, match=f"cannot {way} a checkpoint: {why}"):
                await asyncio.wait_for(trainer.save(tmp_path) if way == "save" else trainer.load(tmp_path), 30)
            await until(lambda: run.ready[0].is_gone)
            await until(lambda: ("end", rank.verdict.partition(": ")[2]) in heard)

    asyncio.run(main())


def test_a_trainer_may_join_only_where_the_run_waits_for_one(run):
    with pytest.raises(ConfigError, match="refuses this host: the run trains on the launcher's host; set"):
        join(JoinOptions(role="trainer", url=run.url, token=TOKEN, device="cpu", wait=0))
    assert not run.ready


def test_ranks_on_several_hosts_hear_what_was_said_before_they_came(tmp_path):
    told: dict[str, list[str]] = {"trainer-0": [], "trainer-1": []}

    async def connect_as_local(_: object, process: RoleProcess) -> dict[str, Any]:
        process.streams["control"] = SimpleNamespace(notify=lambda _, value: told[process.name].append(value["key"]))
        return {}

    async def main() -> None:
        recipe = make_recipe({"cluster.listen": "127.0.0.1:0", "cluster.trainer_joins": True, "train.parallel.shard": 2})
        processes = ClusterProcesses(recipe, tmp_path)
        processes.trainers = [RoleProcess(Place(name, "trainer"), handle=None, placement=None) for name in told]
        first, second = processes.trainers
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("headrace.launch.local.LocalProcesses._connect", connect_as_local)
            await processes._connect(first)
            processes._notices(first)["post"]({"key": "before", "value": "00"})
            await processes._connect(second)
        processes._notices(first)["post"]({"key": "after", "value": "00"})
        processes.trainers = [second]
        processes._notices(first)["post"]({"key": "of an earlier start", "value": "00"})

    asyncio.run(main())
    assert told == {"trainer-0": [], "trainer-1": ["before", "after"]}


def runs(*ends: int | Exception) -> Callable[[], Future[int]]:
    """Each call of an actor's `run` ends as the next of these says."""
    left = iter(ends)

    def run() -> Future[int]:
        end, done = next(left), Future[int]()
        done.set_exception(end) if isinstance(end, Exception) else done.set_result(end)
        return done

    return run


def test_a_run_on_ray_does_not_wait_for_engines_that_have_failed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    said, failed = [], [ConfigError("another version of headrace"), RuntimeError("no such device")]

    async def main() -> None:
        settings = {"orchestrate": "ray", "cluster.listen": "127.0.0.1:0", "engine.count": 2}
        processes = RayProcesses(make_recipe(settings), tmp_path)
        processes._say, processes.first_joined = said.append, asyncio.get_running_loop().create_future()
        for label, error in zip(("engine 1", "engine 2"), failed, strict=True):
            assert not processes.first_joined.done()
            await processes._follow("engine", label, runs(error))
        with pytest.raises(RoleFailed, match="no engine that Ray placed could join: no such device"):
            await asyncio.wait_for(processes._first_engine(), 5)

        await processes._follow("trainer", "trainer 0", runs(failed[0]))
        processes._loop = asyncio.get_running_loop()
        with pytest.raises(RoleFailed, match="no trainer that Ray placed could join: another version of headrace"):
            await asyncio.wait_for(processes._place_trainers(), 5)

        processes._url = "tls://10.0.0.5:7070"
        await processes._follow("trainer", "trainer 0", runs(1))
        why = "it found no launcher at tls://10.0.0.5:7070"
        assert str(processes._no_trainer) == f"no trainer that Ray placed could join: {why}"

    asyncio.run(main())
    roles = ("engine", "engine", "trainer")
    assert said == [
        f"the {role} that Ray placed has failed: {error}" for role, error in zip(roles, [*failed, failed[0]], strict=True)
    ]


def test_what_leaves_a_run_on_ray_joins_again_within_its_restarts(tmp_path, monkeypatch):
    """A rank is let go when its host stalls in a checkpoint; either leaves when its node is drained."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setattr(Host, "dismiss", lambda *_: None)
    said, spent = [], "it has left\n  engine.restarts = 1 are spent"

    async def main() -> None:
        settings = {"orchestrate": "ray", "cluster.listen": "127.0.0.1:0", "engine.restarts": 1}
        processes = RayProcesses(make_recipe(settings), tmp_path)
        processes._say, processes._actors = said.append, {"engine 1": "an actor"}
        processes.first_joined = asyncio.get_running_loop().create_future()
        joined, staying = [], Future[int]()

        def run() -> Future[int]:
            joined.append(1)
            return staying if len(joined) == 3 else runs(0)()

        following = asyncio.ensure_future(processes._follow("trainer", "trainer 0", run))
        await until(lambda: len(joined) == 3)
        assert not following.done() and processes._no_trainer is None, "it is lost, and waited for"
        following.cancel()

        monkeypatch.setattr("headrace.launch.process._SHORTEST_PAUSE", 0.01)
        await processes._follow("engine", "engine 0", runs(0, 0))
        with pytest.raises(RoleFailed, match=f"no engine that Ray placed could join: {spent}"):
            await processes.first_joined

        for name, is_gone in [("engine-0", True), ("engine-1", False)]:
            offered = HostOffer(host="far", address="10.0.0.9", label="engine 1")
            host = Host(1, None, asyncio.get_running_loop(), offer=offered, is_gone=is_gone)
            place = processes.place("engine", int(name[-1]), host=host)
            place.newest = SimpleNamespace(give_up=lambda _: None)
            processes._do_without(place, host, RoleFailed("out of memory"))
            assert ("engine 1" in processes._over) is not is_gone, "with its host it is lost, and not given up"
        await processes._follow("engine", "engine 1", runs(0))

    asyncio.run(main())
    assert said == [f"the engine that Ray placed has failed: {spent}"]


def stopped(stop: StopRequest, work: Callable[[], Awaitable[object]]) -> None:
    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(work(), 20)

    began = time.monotonic()
    asyncio.run(main())
    assert stop.num_made == 1 and time.monotonic() - began < 10


def test_the_first_stop_request_ends_the_wait_for_room_on_ray(tmp_path, monkeypatch):
    stop, waits = StopRequest(), []

    class Group:
        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            if len(waits) == 2:
                stop.make()
            time.sleep(min(seconds, 15))
            return False

    async def listen(_: object) -> None:
        pass

    util = SimpleNamespace(placement_group=lambda *_, **__: Group())
    ray = SimpleNamespace(is_initialized=lambda: True, cluster_resources=dict, util=util)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ClusterProcesses, "listen", listen)
    processes = RayProcesses(make_recipe({"orchestrate": "ray", "cluster.listen": "127.0.0.1:0"}), tmp_path)
    processes.stop = stop
    stopped(stop, processes.listen)
    assert waits and set(waits) == {1}, "Ray drops fractions: it would not wait at all"


@pytest.mark.parametrize("settings", [{"orchestrate": "ray"}, {"engine.count": 0}])
def test_a_run_without_engines_here_waits_for_the_first_to_join(tmp_path, monkeypatch, settings):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    recipe = make_recipe({"cluster.listen": "127.0.0.1:0", "deadline": 0.5, "heartbeat": 0.1, **settings})
    processes = orchestration_of(recipe)(recipe, tmp_path)

    async def wait() -> object:
        processes.first_joined = asyncio.get_running_loop().create_future()
        [waiting] = processes._engines_elsewhere()
        return await waiting

    with pytest.raises(RoleFailed, match=r"no engine has joined for 0.5 s \(deadline\)"):
        asyncio.run(wait())
    processes.stop.make()
    stopped(processes.stop, wait)
    assert not ClusterProcesses(make_recipe({"cluster.listen": "127.0.0.1:0"}), tmp_path)._engines_elsewhere()


def test_hosts_hear_that_the_run_is_over(model):
    run = Run(model)

    async def main() -> None:
        async with run.joined() as (peer, heard):
            await offer(peer)
            await asyncio.to_thread(run.hosts.close)
            await until(lambda: heard)
            assert heard == [("end", None)]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("cluster", "more", "reason"),
    [
        ({"listen": "7070"}, {}, "listen = '7070': must be HOST:PORT"),
        ({"listen": "0.0.0.0:7070"}, {}, "set address"),
        ({"listen": "10.0.0.5:7070"}, {"orchestrate": "inline"}, "orchestrate = 'inline' has one engine"),
        ({"listen": "10.0.0.5:7070"}, {"sync": {"transport": "shared_memory"}}, "does not reach the hosts that may join"),
        ({"trainer_joins": True}, {}, "trainer_joins = true: set cluster.listen"),
        (
            {"listen": "10.0.0.5:7070", "trainer_joins": True},
            {"sync": {"transport": "shared_memory+http"}},
            "no engine is on the host of a trainer that joins",
        ),
        (
            {"listen": "10.0.0.5:7070"},
            {"engine": {"kind": "vllm", "vllm": {"urls": ["http://here:8000"]}}},
            "engine.vllm.urls: hosts that join start servers of their own",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(cluster, more, reason):
    with pytest.raises(ConfigError, match=reason):
        make_recipe({"cluster": cluster, **more})


def test_a_token_comes_from_the_environment_or_a_file(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("HEADRACE_TOKEN", raising=False)
    file = tmp_path / "token"
    assert read_token("", setting="--token-file") == ""
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(file, setting="--token-file")
    file.write_text("\n")
    with pytest.raises(ConfigError, match="it is empty"):
        read_token(file, setting="--token-file")
    file.write_text("f" * 32 + "\n")
    assert read_token(file, setting="--token-file") == "f" * 32
    monkeypatch.setenv("HEADRACE_TOKEN", "e" * 32)
    assert read_token(file, setting="--token-file") == "e" * 32


def test_a_token_that_could_be_guessed_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HEADRACE_TOKEN", "secret")
    with pytest.raises(ConfigError, match=r"^HEADRACE_TOKEN: .* 6 characters, and needs 32; make one with `openssl rand"):
        read_token("", setting="--token-file")
    monkeypatch.delenv("HEADRACE_TOKEN")
    (tmp_path / "token").write_text("s" * 31)
    with pytest.raises(ConfigError, match=r"^--token-file .*token: the token could be guessed"):
        read_token(tmp_path / "token", setting="--token-file")
