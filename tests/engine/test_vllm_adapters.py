"""Adapters at a vLLM server: each version under a name of its own, which a call keeps to its end."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
import torch
from fake_vllm import NEW, OLD, Fake, engine_over, grown, serving, talking
from vllm_server import MISSING, VARIABLES, vllm_python

from headrace.config import make_recipe
from headrace.engine.kind import EnginePlace
from headrace.engine.protocol import EngineDied
from headrace.engine.vllm.engine import Unsupported
from headrace.engine.vllm.handover import AdapterHandover
from headrace.engine.vllm.kind import choose_handover
from headrace.engine.vllm.open import open_engine, server_arguments
from headrace.engine.vllm.server_checks import ADAPTERS, check_abilities, try_adapter
from headrace.lora import LoraSettings, adapter_of, read_settings, read_tensors
from headrace.model import Head, WeightError, load_model, score
from headrace.observe import Timeline
from headrace.partial import Interrupt
from headrace.records import FinishReason, Rollout, Sampling, Source as TokenSource
from headrace.settings import ConfigError
from headrace.sync import Lineage, MemoryTransport, WeightSync

LORA = LoraSettings(rank=4, alpha=8.0)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = Rollout.from_prompt([30, 41, 52], id="r")
CONTINUING = (Interrupt.KEEP, Interrupt.RETRACT)


class Source:
    """The trainer's side: an adapter whose values are known for every version."""

    def __init__(self, path, lora=LORA):
        self.sync = WeightSync(Lineage("life"), MemoryTransport(), adapter=lora.to_plain())
        self.model = load_model(path, lora=lora)
        self.adapter = adapter_of(self.model)

    @torch.no_grad()
    def become(self, version):
        draws = torch.Generator().manual_seed(version)
        for tensor in self.adapter.own.values():
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=draws))

    async def publish(self, engine, version, **options):
        self.become(version)
        update = self.sync.offer(version, [(name, tensor.detach()) for name, tensor in self.adapter.own.items()])
        try:
            await engine.load(update, **options)
        finally:
            self.sync.release(update)

    def logprobs(self, rollout, version):
        """What the trainer computes; without an adapter if `version` is None."""
        if version is not None:
            self.become(version)
        with contextlib.nullcontext() if version is not None else self.adapter.off(), torch.no_grad():
            return score(self.model, Head(self.model), [rollout], budget=1024)[0]


@pytest.fixture
def over(tiny_model, tmp_path):
    """Opens an engine over a fake server that holds version 0 of an adapter: (engine, source)."""

    @contextlib.asynccontextmanager
    async def opening(fake, **options):
        source, model = Source(tiny_model), load_model(tiny_model, lora=LORA)
        adapter = adapter_of(model)
        handover = AdapterHandover(tmp_path / "adapters", adapter, base=tiny_model)
        async with engine_over(fake, model, staged=adapter, sync=source.sync, handover=handover, **options) as engine:
            await source.publish(engine, 0)
            yield engine, source

    return opening


def bodies(fake, path):
    return [body for name, body in fake.asked if name == path]


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize("interrupt", [Interrupt.LEASE, Interrupt.DRAIN, Interrupt.ABORT])
async def test_a_call_names_one_adapter_and_all_its_tokens_are_of_that_version(over, version, interrupt, tmp_path):
    fake = Fake(version=version, weight_version="life:7", pace=0.005)
    async with over(fake) as (engine, source):
        call = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=40)))
        await grown(engine, 1)
        await source.publish(engine, 1, interrupt=interrupt)
        assert call.done() == (interrupt is not Interrupt.LEASE)
        assert [path for path, _ in fake.asked[4:] if path == "/pause"] == ["/pause"] * (interrupt is not Interrupt.LEASE)
        later = await engine.generate(Rollout.from_prompt([3], id="later"), Sampling(max_tokens=2))
        rollout = await call
        assert (rollout.versions[3:] == 0).all() and (later.versions[1:] == 1).all()
        assert rollout.finish_reason is (FinishReason.ABORT if interrupt is Interrupt.ABORT else FinishReason.LENGTH)
        loaded, calls = bodies(fake, LOAD), bodies(fake, "generate")
        assert [body["model"] for body in calls] == [body["lora_name"] for body in loaded]
        assert len({body["lora_path"] for body in loaded}) == 2 and [body["cache_salt"] for body in calls] == [
            "life:0",
            "life:1",
        ]
        assert not bodies(fake, "/update_weight_version")
        folder = tmp_path / "adapters" / loaded[1]["lora_name"]
        assert str(folder) == loaded[1]["lora_path"] and read_settings(folder).to_plain() == LORA.to_plain()
        assert all(torch.equal(tensor, source.adapter.own[name]) for name, tensor in read_tensors(folder).items())


async def test_an_adapter_stays_loaded_while_a_call_uses_it_and_goes_two_updates_later(over, tmp_path):
    fake = Fake(version=NEW, holds_at=5)
    async with over(fake) as (engine, source):
        call = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=30)))
        await grown(engine, 1)
        for version in (1, 2, 3, 4):
            await source.publish(engine, version, interrupt=Interrupt.LEASE)
        names = [body["lora_name"] for body in bodies(fake, LOAD)]
        gone = [body["lora_name"] for body in bodies(fake, UNLOAD)]
        assert sorted(gone) == sorted(names[1:3]), "version 3 was current at the last update, 0 is in use"
        fake.holds_at = -1
        assert ((await call).versions[3:] == 0).all()
        for version in (5, 6):
            await source.publish(engine, version, interrupt=Interrupt.LEASE)
        kept = {path.name for path in (tmp_path / "adapters").iterdir()}
        names = [body["lora_name"] for body in bodies(fake, LOAD)]
        assert kept == {*names[5:]} and {body["lora_name"] for body in bodies(fake, UNLOAD)} == {*names[:5]}


async def test_an_adapter_stays_loaded_until_the_rollouts_that_began_with_it_are_released(over, tmp_path):
    fake = Fake(version=NEW)
    async with over(fake, keeps_leases=True) as (engine, source):
        rollout = await engine.generate(PROMPT, Sampling(max_tokens=2))
        for version in (1, 2, 3):
            await source.publish(engine, version, interrupt=Interrupt.LEASE)
            rollout = rollout.append(np.array([5], dtype=np.int32), source=TokenSource.TOOL)
            rollout = await engine.generate(rollout, Sampling(max_tokens=2))
        newer = await engine.generate(Rollout.from_prompt([3], id="newer"), Sampling(max_tokens=2))
        first, *others = (body["lora_name"] for body in bodies(fake, LOAD))
        assert set(rollout.versions[rollout.is_sampled].tolist()) == {0} and (newer.versions[1:] == 3).all()
        calls = bodies(fake, "generate")
        assert [body["model"] for body in calls] == [first] * 4 + [others[-1]]
        assert [body["cache_salt"] for body in calls] == ["life:0"] * 4 + ["life:3"], "its prefix is found in the cache"
        assert first not in {body["lora_name"] for body in bodies(fake, UNLOAD)}
        engine.release([rollout.id])
        for version in (4, 5):
            await source.publish(engine, version, interrupt=Interrupt.LEASE)
        assert first in {body["lora_name"] for body in bodies(fake, UNLOAD)}
        assert not (tmp_path / "adapters" / first).exists() and list(engine._leases) == ["newer"]


@pytest.mark.parametrize("interrupt", CONTINUING)
async def test_a_call_cannot_change_its_adapter(over, interrupt):
    async with over(Fake()) as (engine, source):
        call = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=40)))
        await grown(engine, 1)
        with pytest.raises(Unsupported, match="keeps the adapter it began with; interrupt by 'lease', 'abort' or 'drain'"):
            await source.publish(engine, 1, interrupt=interrupt)
        assert ((await call).versions[3:] == 0).all() and engine.version == 0
        await source.publish(engine, 1, interrupt=interrupt)
        assert engine.version == 1, "nothing was in flight"


async def test_a_refused_adapter_leaves_the_old_one_and_the_calls_that_use_it(over, tmp_path):
    fake = Fake(pace=0.005)
    async with over(fake) as (engine, source):
        call = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=40)))
        await grown(engine, 1)
        before, held = engine.adapter, {name: view.clone() for name, view in engine._staged.arena}
        fake.failing.add(LOAD)
        with pytest.raises(WeightError, match=rf"version 1: .*{LOAD}.*the disk is full"):
            await source.publish(engine, 1, interrupt=Interrupt.LEASE)
        assert engine.version == 0 and engine.adapter == before and not engine.died.done()
        assert [path.name for path in (tmp_path / "adapters").iterdir()] == [before]
        assert all(torch.equal(view, held[name]) for name, view in engine._staged.arena), "a later delta starts from these"
        fake.failing.clear()
        await source.publish(engine, 1, interrupt=Interrupt.LEASE)
        assert engine.version == 1 and ((await call).versions[3:] == 0).all()


async def test_a_server_that_lost_its_adapters_counts_as_dead(over):
    fake = Fake()
    async with over(fake) as (engine, _):
        fake.fault = "restarted"
        with pytest.raises(EngineDied, match=r"status 404: The model `policy-\S+` does not exist"):
            await engine.generate(PROMPT, Sampling(max_tokens=4))
        assert engine.died.done()


async def test_an_update_for_another_adapter_is_refused(over, tiny_model):
    async with over(Fake()) as (engine, _):
        other = Source(tiny_model, LoraSettings(rank=4, alpha=16.0))
        with pytest.raises(WeightError, match=r"version 1: it is for adapter .*16.0.* and this engine has .*8.0"):
            await other.publish(engine, 1)
        assert engine.version == 0 and not engine.died.done()


async def test_a_server_that_takes_no_adapters_is_refused(tiny_model, tmp_path):
    model = load_model(tiny_model, lora=LORA)
    fake = Fake(failing={LOAD})
    async with serving(fake) as url, talking(url) as api:
        with pytest.raises(ConfigError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"):
            check_abilities(await api.about(), server=url, more=(ADAPTERS,))
        way = AdapterHandover(tmp_path / "adapters", adapter_of(model), base=tiny_model)
        with pytest.raises(ConfigError, match=r"the disk is full; a server for this run needs .*--max-lora-rank 8"):
            await try_adapter(api, way, model, rank=8)
        fake.paths += (LOAD, UNLOAD)
        check_abilities(await api.about(), server=url, more=(ADAPTERS,))


def recipe_of(**settings):
    names = {"lora.rank": 4, "lora.alpha": 8.0, "engine.kind": "vllm", "partial.interrupt": "lease", **settings}
    return make_recipe({"tasks": [{"source": "builtin:sort_digits"}], **names})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"partial.interrupt": "keep"}, r"partial.interrupt = 'keep': .* set it to 'lease', 'abort' or 'drain'"),
        ({"partial.interrupt": "retract"}, r"partial.interrupt = 'retract': .* set it to 'lease', 'abort' or 'drain'"),
        ({"lora.rank": 513}, r"lora.rank = 513: vLLM serves adapters of rank 512 at most"),
        ({"engine.vllm.arguments": {"max_lora_rank": 64}}, r"max_lora_rank = 64: lora.rank decides it"),
        ({"staleness.max_lag": 0, "partial.oversample": 2.0}, r"partial.interrupt = 'lease': vLLM cannot score"),
    ],
    ids=str,
)
def test_what_vllm_cannot_do_with_adapters_is_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        recipe_of(**settings)


def test_a_server_is_started_for_the_adapter():
    def words(**settings):
        return " ".join(server_arguments(recipe_of(**settings), context=64, candidates=16, is_on_cpu=True))

    assert "lora" not in words(**{"lora.rank": 0, "partial.interrupt": "keep"})
    leased = words(**{"lora.rank": 33, "staleness.max_lag": 2})
    assert "--enable-lora" in leased and "--max-lora-rank 64 --max-loras 4 --max-cpu-loras 5" in leased
    assert "--max-lora-rank 8 --max-loras 1 --max-cpu-loras 2" in words(**{"partial.interrupt": "drain"})
    assert choose_handover(recipe_of(), device="cuda") == "folder"
    with pytest.raises(ConfigError, match=r"engine.vllm.handover = 'ipc': vLLM reads adapters from folders"):
        choose_handover(recipe_of(**{"engine.vllm.handover": "ipc"}), device="cuda")


@pytest.mark.long
@pytest.mark.skipif(vllm_python() is None, reason=MISSING)
async def test_a_real_server_computes_what_the_trainer_does_with_every_version(tiny_model, tmp_path, monkeypatch):
    for name, value in {**VARIABLES, "HEADRACE_VLLM_PYTHON": vllm_python()}.items():
        monkeypatch.setenv(name, value)
    recipe = recipe_of(**{"model.path": tiny_model, "engine.slots": 4, "staleness.max_lag": 1, "sampling.max_tokens": 64})
    paths = {"log": tmp_path / "server.log", "folder": tmp_path / "adapters"}
    place = EnginePlace(name="engine-0", index=0, device="cpu", receives_on="cpu", **paths)
    source = Source(tiny_model)

    def differ(rollout, logprobs, version):
        return float(np.abs(logprobs - source.logprobs(rollout, version))[len(PROMPT) :].max())

    async def check(engine):
        sampled = {}
        for version in (0, 1):
            await source.publish(engine, version)
            rollout = await engine.generate(PROMPT, Sampling(max_tokens=20, seed=version))
            sampled[version] = rollout
            assert (rollout.versions[len(PROMPT) :] == version).all()
            scored = (await engine.score([rollout]))[0]
            for logprobs in (rollout.logprobs, scored):
                assert differ(rollout, logprobs, version) <= 1e-4
                assert differ(rollout, logprobs, 1 - version) > 1e-2 and differ(rollout, logprobs, None) > 1e-2
        for first in (2, 12, 22, 32):
            if await leased(engine, first):
                break
        else:
            pytest.fail("the server was too fast for what is tested")
        with pytest.raises(WeightError, match=r"version 99: .*call /v1/load_lora_adapter"):
            write = engine._handover._write
            engine._handover._write = lambda folder, tensors, *, base: (
                write(folder, tensors, base=base),
                (folder / "adapter_model.safetensors").write_bytes(b"torn"),
            )
            await source.publish(engine, 99, interrupt=Interrupt.LEASE)
        engine._handover._write = write
        held = engine.version
        rollout = await engine.generate(PROMPT, Sampling(max_tokens=20))
        assert differ(rollout, rollout.logprobs, held) <= 1e-4 and (rollout.versions[len(PROMPT) :] == held).all()
        await source.publish(engine, 99, interrupt=Interrupt.ABORT)
        again = (await engine.score([sampled[0]]))[0]
        assert differ(sampled[0], again, 99) <= 1e-4 and not engine.died.done()

    async def leased(engine, first):
        """Calls of four versions at once, one more than fit in a batch; False if the first ended too early for that."""
        calls = {}
        for version in range(first, first + 4):
            await source.publish(engine, version, interrupt=Interrupt.LEASE)
            if version == first + 2:
                canaries = [Rollout.from_prompt(np.arange(20, 20 + length), id=f"{length}") for length in (9, 12, 31)]
                scored = await engine.score(canaries)
                assert all(differ(each, logprobs, version) <= 1e-4 for each, logprobs in zip(canaries, scored, strict=True))
                if any(call.done() for call in calls.values()):
                    await asyncio.gather(*calls.values())
                    return False
            calls[version] = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=220, seed=5)))
            await asyncio.sleep(0.05)
        for version, call in calls.items():
            rollout = await call
            assert (rollout.versions[len(PROMPT) :] == version).all() and len(rollout) == len(PROMPT) + 220
            assert differ(rollout, rollout.logprobs, version) <= 1e-4
        return True

    opened = await open_engine(recipe, tiny_model, place, sync=source.sync, timeline=Timeline("engine"))
    try:
        opened.engine.start()
        await asyncio.wait_for(check(opened.engine), 240)
    finally:
        await opened.engine.close()
        opened.close()
