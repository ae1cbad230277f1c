"""Adapters: PEFT's numbers, gradients of the adapter alone, and an engine that runs several versions of one at once."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from typing import TYPE_CHECKING, Any

import families
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import LiveStorages
from transformers import AutoModelForCausalLM

from headrace.algorithms import REFERENCE
from headrace.config import make_recipe
from headrace.engine.native.core import EngineCore
from headrace.engine.native.engine import NativeEngine
from headrace.engine.request import HeldAdapter, Request
from headrace.launch import build
from headrace.lora import Adapter, AdapterError, LoraSettings, adapter_of, add_adapter, read_settings, read_tensors
from headrace.model import Head, ModelError, WeightError, load_model, load_tokenizer, prepare, score
from headrace.observe import Timeline
from headrace.partial import Interrupt
from headrace.records import Batch, Rollout, Sampling, Source
from headrace.settings import ConfigError
from headrace.sync import Lineage, MemoryTransport, WeightSync
from headrace.trainer import DeviceTrainer, TrainSettings

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from headrace.records import Array

LORA = LoraSettings(rank=4, alpha=8.0)


def vary(model: torch.nn.Module, *, seed: int, scale: float = 0.1) -> None:
    """Give an adapter values that change what the model computes."""
    adapter, draws = adapter_of(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in adapter.own.values():
            tensor.copy_(scale * torch.randn(tensor.shape, generator=draws))


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(ids, use_cache=False).logits[0]


IDS = torch.arange(6, 30).unsqueeze(0)


def test_a_new_adapter_changes_nothing_and_one_that_is_off_neither(tiny_model: str) -> None:
    plain, adapted = logits(load_model(tiny_model), IDS), load_model(tiny_model, lora=LORA)
    assert torch.equal(logits(adapted, IDS), plain)
    vary(adapted, seed=1)
    assert (logits(adapted, IDS) - plain).abs().max() > 0.1
    with adapter_of(adapted).off():
        assert torch.equal(logits(adapted, IDS), plain)
    assert not any(parameter.requires_grad for parameter in adapted.parameters())
    assert not any("lora" in name for name in adapted.state_dict())


def test_the_seed_decides_the_first_values(tiny_model: str) -> None:
    def first(seed: int) -> torch.Tensor:
        return next(iter(adapter_of(load_model(tiny_model, lora=LORA, seed=seed)).own.values()))

    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))


@pytest.mark.parametrize("settings", [LORA, LoraSettings(rank=3, alpha=5.0, targets=("q_proj", "mlp.down_proj"), rslora=True)])
def test_what_is_written_loads_in_peft(tiny_model: str, tmp_path: Path, settings: LoraSettings) -> None:
    from peft import PeftModel

    model = load_model(tiny_model, lora=settings)
    vary(model, seed=1)
    adapter_of(model).write(tmp_path / "adapter", adapter_of(model).own, base=tiny_model)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), str(tmp_path / "adapter"))
    assert torch.allclose(logits(model, IDS), theirs(IDS).logits[0], atol=1e-5)
    again = load_model(str(tmp_path / "adapter"))
    assert torch.equal(logits(again, IDS), logits(model, IDS))


@pytest.mark.parametrize("first", [True, "gaussian", "orthogonal", "mica", "pissa", "olora"])
def test_an_adapter_is_refused_if_peft_changed_the_model_too(tiny_model: str, tmp_path: Path, first: Any) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=first, task_type="CAUSAL_LM")
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), config).eval()
    with torch.no_grad():
        for name, tensor in theirs.named_parameters():
            if "lora_" in name:
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    theirs.save_pretrained(str(tmp_path))
    if first in ("pissa", "olora"):
        with pytest.raises(AdapterError, match=f"init_lora_weights = '{first}' is not supported"):
            load_model(str(tmp_path))
    else:
        assert torch.allclose(logits(load_model(str(tmp_path)), IDS), logits(theirs.get_base_model(), IDS), atol=1e-5)


@pytest.mark.parametrize("targets", ["all-linear", ["v_proj", "up_proj"]])
def test_what_peft_writes_loads_here(tiny_model: str, tmp_path: Path, targets: Any) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=5, lora_alpha=7, target_modules=targets, use_rslora=True, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), config).eval()
    theirs.save_pretrained(str(tmp_path / "adapter"))
    given: dict[str, Any] = {"rank": 5, "alpha": 7.0, "rslora": True}
    own, other = (("all",), ("v_proj",)) if targets == "all-linear" else (("up_proj", "v_proj"), ("all",))
    ours = load_model(str(tmp_path / "adapter"), lora=LoraSettings(**given, targets=own))
    with torch.no_grad():
        assert torch.allclose(logits(ours, IDS), theirs(IDS).logits[0], atol=1e-5)
    with pytest.raises(ModelError, match=r"lora\.targets = .* differ in 1\d layers.*the adapter's: .*'up_proj', 'v_proj'\]"):
        load_model(str(tmp_path / "adapter"), lora=LoraSettings(**given, targets=other))
    with pytest.raises(ModelError, match=r"'rank': 5.*and \[lora\] \{'rank': 6"):
        load_model(str(tmp_path / "adapter"), lora=LoraSettings(rank=6, alpha=7.0, rslora=True))


MOVES_THE_BASE = ("pissa", "pissa_niter_4", "olora", "loftq", "corda", "lora_ga")
COMPUTES_ELSE = {
    "alora_invocation_tokens": [1, 2],
    "arrow_config": {"top_k": 2},
    "ensure_weight_tying": True,
    "exclude_modules": ["q_proj"],
    "fan_in_fan_out": True,
    "kasa_config": {"beta": 1e-4},
    "layer_replication": [[0, 2], [1, 2]],
    "lora_bias": True,
    "megatron_config": {"hidden_size": 8},
    "monteclora_config": {"num_samples": 8},
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 2},
    "trainable_token_indices": [0],
    "use_bdlora": {"nblocks": 2},
    "use_qalora": True,
    "velora_config": {"num_groups": 64},
}


def test_every_setting_of_pefts_is_known() -> None:
    from dataclasses import fields

    from peft import LoraConfig

    from headrace.lora import peft_folder

    known = peft_folder._READ | peft_folder._HARMLESS | peft_folder._SUPPORTED.keys() | COMPUTES_ELSE.keys()
    assert {field.name for field in fields(LoraConfig)} - known == {"use_dora", "layers_to_transform"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora = True is not supported; merge"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"bias": "lora_only"}, "bias = 'lora_only' is not supported"),
        ({"revision": "v1"}, "revision = 'v1' is not supported"),
        *(({"init_lora_weights": name}, f"init_lora_weights = '{name}' is not supported") for name in MOVES_THE_BASE),
        *(({key: value}, f"{key} = .* is not supported; merge") for key, value in COMPUTES_ELSE.items()),
        ({"setting_of_tomorrow": 3}, "setting_of_tomorrow = 3 is not supported"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'; only LORA"),
        ({"target_modules": ".*proj"}, "is a pattern"),
        ({"r": None}, "not a LoRA configuration"),
        ({"r": 0}, "not a LoRA configuration"),
        ({"lora_alpha": -1}, "not a LoRA configuration"),
    ],
)
def test_adapters_that_compute_something_else_are_refused(tiny_model: str, tmp_path: Path, change: dict, message: str) -> None:
    model = load_model(tiny_model, lora=LORA)
    adapter_of(model).write(tmp_path, adapter_of(model).own, base=tiny_model)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(AdapterError, match=message):
        load_model(str(tmp_path))


def test_an_adapter_of_another_model_is_refused_by_name(tiny_model: str, tmp_path: Path) -> None:
    other = prepare(families.make("llama"), name="llama")
    adapter = add_adapter(other, LORA)
    adapter.write(tmp_path / "adapter", adapter.own, base=tiny_model)
    with pytest.raises(AdapterError, match="made for another base model"):
        load_model(str(tmp_path / "adapter"))
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(AdapterError, match="cannot be read"):
        load_model(str(tmp_path / "adapter"))
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match="pickled weights"):
        read_tensors(tmp_path / "adapter")
    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        read_settings(tmp_path)


def test_unknown_targets_are_named_with_the_nearest(tiny_model: str) -> None:
    with pytest.raises(AdapterError, match=r"lora.targets = 'q_prj': the model has no such layer; .*nearest: q_proj"):
        load_model(tiny_model, lora=LoraSettings(rank=2, targets=("q_prj",)))
    with pytest.raises(AdapterError, match=r"'model\.embed_tokens\.weight' is no linear layer"):
        load_model(tiny_model, lora=LoraSettings(rank=2, targets=("embed_tokens",)))
    for wrong in ({"rank": -1}, {"alpha": 0.0}, {"targets": ()}, {"targets": ("all", "q_proj")}):
        with pytest.raises(ConfigError):
            LoraSettings(**wrong)


# Training


def sampled(model: PreTrainedModel, count: int, **options: Any) -> list[Rollout]:
    """Rollouts of a model, from prompts of several lengths."""
    engine = NativeEngine(
        EngineCore(model, name="e", slots=8, context=64, **options),
        sync=WeightSync(Lineage("l"), MemoryTransport()),
        timeline=Timeline("engine"),
    )

    async def main() -> list[Rollout]:
        serving = asyncio.ensure_future(engine.serve())
        try:
            return list(
                await asyncio.gather(
                    *(engine.generate(prompt(index), Sampling(max_tokens=9, seed=index)) for index in range(count))
                )
            )
        finally:
            serving.cancel()

    return asyncio.run(main())


def prompt(index: int) -> Rollout:
    return Rollout.from_prompt(np.random.default_rng(index).integers(6, 90, size=3 + index % 5), id=str(index))


def make_batch(rollouts: list[Rollout], **changes: Any) -> Batch:
    draws = np.random.default_rng(1)
    given = {
        "advantages": tuple(np.where(each.loss_mask, draws.normal(), 0).astype(np.float32) for each in rollouts),
        "weights": tuple((each.loss_mask / 10).astype(np.float32) for each in rollouts),
    }
    return Batch(rollouts=tuple(rollouts), loss="reinforce", constants={}, version=0, **{**given, **changes})


def make_trainer(model_path: str, *, exact: bool = False, lora: LoraSettings = LORA) -> DeviceTrainer:
    model = load_model(model_path, exact=exact, lora=lora)
    return DeviceTrainer(model, tokenizer=load_tokenizer(model_path), settings=TrainSettings(), exact=exact)


def test_the_gradient_is_that_of_pefts_model(tiny_model: str, tmp_path: Path) -> None:
    from peft import PeftModel

    trainer = make_trainer(tiny_model)
    vary(trainer.model, seed=1)
    batch = make_batch(sampled(load_model(tiny_model), 6))
    trainer.forward_backward(batch)
    adapter_of(trainer.model).write(tmp_path, adapter_of(trainer.model).own, base=tiny_model)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base, str(tmp_path), is_trainable=True).eval()
    for rollout, advantages, weights in zip(batch.rollouts, batch.advantages, batch.weights, strict=True):
        ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
        logprobs = torch.log_softmax(theirs(ids.unsqueeze(0), use_cache=False).logits[0, :-1], dim=-1)
        chosen = logprobs.gather(1, ids[1:, None]).squeeze(1)
        (-(chosen * torch.from_numpy(advantages[1:] * weights[1:]))).sum().backward()
    found = {
        name.removeprefix("base_model.model.").replace(".default.", "."): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    assert found.keys() == adapter_of(trainer.model).own.keys() and len(found) == 28
    for name, gradient in found.items():
        assert torch.allclose(trainer.optimizer.gradient(name), gradient, atol=1e-5), name
        assert gradient.abs().max() > 0


def test_only_the_adapter_is_trained_published_and_saved(tiny_model: str, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    batch = make_batch(sampled(load_model(tiny_model), 6))
    for _ in range(2):  # the first step moves B alone: its gradient reaches A only once B is not 0
        trainer.forward_backward(batch)
        trainer.optim_step(1e-2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())
    fresh = adapter_of(load_model(tiny_model, lora=LORA)).own
    assert all(not torch.equal(tensor, fresh[name]) for name, tensor in trainer.tensors())
    update = WeightSync(Lineage("l"), MemoryTransport(), adapter=LORA.to_plain()).offer(1, trainer.tensors())
    assert set(update.manifest.names) == fresh.keys() and update.adapter == {"rank": 4, "alpha": 8.0, "rslora": False}
    assert update.num_bytes < sum(tensor.nbytes for tensor in before.values()) / 4

    trainer.save(tmp_path / "saved")
    again = make_trainer(tiny_model)
    again.load(tmp_path / "saved")
    for each in (trainer, again):
        each.forward_backward(batch)
        each.optim_step(1e-2)
    for name, tensor in trainer.tensors():
        assert torch.equal(tensor, again.arena.views[name])


def test_the_reference_is_the_policy_without_its_adapter(tiny_model: str) -> None:
    trainer = make_trainer(tiny_model)
    rollouts = sampled(load_model(tiny_model), 6)
    base = score(load_model(tiny_model), Head(trainer.model), rollouts, budget=512)
    vary(trainer.model, seed=2)
    with_it, without = (trainer.forward(make_batch(rollouts), column=column) for column in ("proximal", REFERENCE))
    for rollout, theirs, ours, adapted in zip(rollouts, base, without, with_it, strict=True):
        np.testing.assert_allclose(ours[rollout.loss_mask], theirs[rollout.loss_mask], atol=1e-5)
        assert not np.allclose(adapted[rollout.loss_mask], theirs[rollout.loss_mask], atol=1e-3)


def test_the_reference_takes_no_memory(tiny_model: str) -> None:
    """From before the trainer is built until the reference is computed. Without an adapter it is a second model."""
    batch = make_batch(sampled(load_model(tiny_model), 6))
    model = sum(parameter.nbytes for parameter in load_model(tiny_model).parameters())

    def peak(lora: dict[str, int], kl: float) -> int:
        recipe = make_recipe({"tasks": [{"source": "builtin:sort_digits"}], "train": {"kl": kl}, "lora": lora})
        with LiveStorages() as alive:
            trainer = build.build_trainer(recipe, tiny_model, device="cpu")
            trainer.forward(batch, column=REFERENCE if kl else "proximal")
        return alive.peak

    assert peak({"rank": 4}, 0.1) <= peak({"rank": 4}, 0.0) + 0.01 * model
    assert peak({}, 0.1) >= peak({}, 0.0) + model


def test_a_run_with_kl_loads_the_model_once(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(build, "load_model", lambda path, **options: loaded.append(path) or load_model(path, **options))
    for lora, times in ({"rank": 4}, 1), ({}, 2):
        loaded.clear()
        recipe = make_recipe({"tasks": [{"source": "builtin:sort_digits"}], "train": {"kl": 0.1}, "lora": lora})
        trainer = build.build_trainer(recipe, tiny_model, device="cpu")
        assert len(loaded) == times and (trainer._frozen[REFERENCE].model is trainer.model) == (times == 1)


# The engine


class Served:
    """An engine and the trainer that publishes to it."""

    def __init__(
        self, model_path: str, *, exact: bool = False, slots: int = 16, num_blocks: int = 0, keeps_leases: bool = False
    ) -> None:
        self.trainer = make_trainer(model_path, exact=exact)
        self.core = EngineCore(
            load_model(model_path, exact=exact, lora=LORA),
            name="e",
            slots=slots,
            context=64,
            exact=exact,
            num_blocks=num_blocks,
            keeps_leases=keeps_leases,
        )
        self.sync = WeightSync(Lineage("life"), MemoryTransport(), adapter=LORA.to_plain())
        self.engine = NativeEngine(self.core, sync=self.sync, timeline=Timeline("engine"))

    async def publish(self, version: int, interrupt: Interrupt) -> None:
        vary(self.trainer.model, seed=version)
        update = self.sync.offer(version, self.trainer.tensors())
        await self.engine.load(update, interrupt=interrupt)
        self.sync.release(update)

    def judge(self, rollout: Rollout, version: int) -> Array:
        """The trainer's logprobs of a rollout under a version."""
        vary(self.trainer.model, seed=version)
        return self.trainer.forward(make_batch([rollout]))[0]


async def until_sampled(served: Served, tokens: int) -> None:
    until = served.core.num_sampled + tokens
    while served.core.num_sampled < until:  # noqa: ASYNC110  (the engine steps on this loop)
        await asyncio.sleep(0)


def assert_agrees(rollout: Rollout, judged: Array, *, exact: bool) -> None:
    ours, theirs = rollout.logprobs[rollout.loss_mask], judged[rollout.loss_mask]
    if exact:
        assert np.array_equal(ours, theirs)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("num_blocks", [0, 12])
async def test_rollouts_keep_the_version_they_began_with(tiny_model: str, exact: bool, num_blocks: int) -> None:
    """Three versions in one batch; with few blocks, rollouts are retracted and computed again under the version they keep."""
    served = Served(tiny_model, exact=exact, num_blocks=num_blocks)
    serving, calls = asyncio.ensure_future(served.engine.serve()), []
    for version in (1, 2, 3):
        await served.publish(version, Interrupt.LEASE)
        for index in range(4):
            sampling = Sampling(max_tokens=24 + 3 * index, seed=index, temperature=1.0)
            calls.append(asyncio.ensure_future(served.engine.generate(prompt(index), sampling)))
        await until_sampled(served, 12)
    done = await asyncio.gather(*calls)
    serving.cancel()
    rollouts = list(done)
    assert not num_blocks or served.core.scheduler.num_retractions
    for place, rollout in enumerate(rollouts):
        versions = set(rollout.versions[rollout.is_sampled].tolist())
        if not num_blocks or place % 4 == 0:  # with few blocks some wait for a slot and begin later
            assert versions == {1 + place // 4}
        assert len(versions) == 1
        assert_agrees(rollout, served.judge(rollout, versions.pop()), exact=exact)


class Turns(Served):
    """Rollouts of several turns, whose adapters are leased."""

    def __init__(self, model_path: str, **options: Any) -> None:
        super().__init__(model_path, keeps_leases=True, **options)
        self.prompt_rows, step = 0, self.core.step

        def counted() -> Any:
            plan = step()
            self.prompt_rows += plan.prompt_rows
            return plan

        self.core.step = counted  # type: ignore[method-assign]
        self.serving = asyncio.ensure_future(self.engine.serve())

    async def turn(self, rollout: Rollout, tokens: int = 5) -> Rollout:
        """A tool's reply, if it has been generated before, and so many more tokens."""
        if rollout.calls:
            rollout = rollout.append(np.array([40, 41, 42], dtype=np.int32), source=Source.TOOL)
        return await self.engine.generate(rollout, Sampling(max_tokens=tokens, seed=len(rollout)))

    @property
    def kept(self) -> set[int]:
        """The older versions that lie in memory."""
        gc.collect()
        return {each.version for each in gc.get_objects() if isinstance(each, HeldAdapter)}


def versions_of(rollout: Rollout) -> set[int]:
    return set(rollout.versions[rollout.is_sampled].tolist())


async def test_a_rollout_keeps_its_version_in_its_later_turns_and_its_kv_cache(tiny_model: str) -> None:
    served = Turns(tiny_model)
    await served.publish(1, Interrupt.LEASE)
    first, other = await served.turn(prompt(1)), await served.turn(prompt(2))
    for version in (2, 3, 4):
        await served.publish(version, Interrupt.LEASE)
        rows = served.prompt_rows
        first = await served.turn(first)
        assert served.prompt_rows - rows == 1 + 3, "the last token and the tool's; the rest is cached"
    newer = await served.turn(prompt(3))
    assert (versions_of(first), versions_of(newer)) == ({1}, {4}) and first.num_sampled == 20
    assert_agrees(first, served.judge(first, 1), exact=False)
    assert served.kept == {1}
    served.engine.release([first.id])
    assert served.kept == {1}, "the other's"
    served.engine.release([other.id])
    assert not served.kept
    assert versions_of(await served.turn(other)) == {1, 4}, "one that comes back after all has the newest"
    served.serving.cancel()


async def test_a_turn_that_waits_for_a_slot_when_an_update_comes_keeps_its_version(tiny_model: str) -> None:
    served = Turns(tiny_model, slots=1)
    await served.publish(1, Interrupt.LEASE)
    first = await served.turn(prompt(1))
    await served.publish(2, Interrupt.LEASE)
    second = await served.turn(prompt(2))
    calls = [asyncio.ensure_future(served.turn(*each)) for each in ((prompt(3), 20), (first,), (second,), (prompt(4),))]
    await until_sampled(served, 4)
    assert served.core.num_waiting == 3
    await served.publish(3, Interrupt.LEASE)
    assert [versions_of(each) for each in await asyncio.gather(*calls)] == [{2}, {1}, {2}, {3}]
    served.serving.cancel()


async def test_a_fork_does_not_use_what_an_older_version_computed(tiny_model: str) -> None:
    served = Turns(tiny_model)
    await served.publish(1, Interrupt.LEASE)
    first = await served.turn(prompt(1), 20)
    await served.publish(2, Interrupt.LEASE)
    fork = await served.turn(first.forked(len(first) - 2, id="fork"))
    newer = fork.versions == 2
    assert newer.sum() == 5
    np.testing.assert_allclose(fork.logprobs[newer], served.judge(fork, 2)[newer], atol=1e-5)
    served.serving.cancel()


@pytest.mark.parametrize("interrupt", [Interrupt.KEEP, Interrupt.RETRACT, Interrupt.ABORT, Interrupt.DRAIN])
async def test_any_other_interrupt_ends_the_leases_between_two_turns(tiny_model: str, interrupt: Interrupt) -> None:
    served = Turns(tiny_model)
    await served.publish(1, Interrupt.LEASE)
    first = await served.turn(prompt(1))
    await served.publish(2, Interrupt.LEASE)
    await served.publish(3, interrupt)
    assert not served.kept and versions_of(await served.turn(first)) == {1, 3}
    served.serving.cancel()


async def test_rollouts_that_nobody_releases_hold_a_version_until_many_others_ended(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engine.native.scheduler.MOST_LEASES", 2)
    served = Turns(tiny_model)
    await served.publish(1, Interrupt.LEASE)
    await served.turn(prompt(1))
    await served.publish(2, Interrupt.LEASE)
    await served.turn(prompt(2))
    assert served.kept == {1}
    await served.turn(prompt(3))
    assert not served.kept and list(served.core.scheduler.leases) == ["2", "3"]
    served.serving.cancel()


def test_a_version_is_computed_for_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once for a row that is named twice, as exact mode does to fill up to whole blocks of rows."""
    linear = torch.nn.Linear(4, 4, dtype=torch.float16)
    adapter = Adapter({"layer": linear}, LORA)
    adapter.hook(linear, "layer")
    older, newer = ({name: torch.full_like(tensor, value) for name, tensor in adapter.own.items()} for value in (0.5, 1.0))
    given, base, product, num_rows = torch.ones(1, 3, 4, dtype=torch.float16), linear.weight.sum(dim=1), F.linear, []

    def counted(hidden: torch.Tensor, weight: torch.Tensor, *more: Any) -> torch.Tensor:
        num_rows.append(hidden.shape[-2])
        return product(hidden, weight, *more)

    monkeypatch.setattr(F, "linear", counted)
    with torch.no_grad(), adapter.applying([(older, torch.tensor([0, 0])), (newer, torch.tensor([2]))]):
        found = linear(given)
    assert num_rows == [3, 2, 2, 1, 1] and found.dtype == torch.float16
    added = torch.tensor([2 * 4 * 4 * 0.25, 0, 2 * 4 * 4], dtype=torch.float16)  # scale, inputs, ranks
    torch.testing.assert_close(found[0], base + linear.bias + added[:, None], atol=0.05, rtol=0)


def test_what_is_sampled_by_a_kept_version_is_of_its_lineage(tiny_model: str) -> None:
    """Though nothing was sampled when the trainer was restarted."""
    core, done = Served(tiny_model).core, list[Rollout]()
    core.lineage, core.version = "before", 12
    core.submit(Request(prompt(1), Sampling(max_tokens=3), on_done=done.append))
    core.scheduler.plan(core.runner)  # it has a slot
    tensors = {name: tensor.clone() for name, tensor in core.adapter.own.items()}
    core.changed_weights(policy="policy", lineage="after", version=10, held=HeldAdapter(12, tensors))
    (request,) = core.scheduler.running.values()
    assert request.lineage == "before" and request.held.version == 12


async def test_a_version_is_freed_with_its_last_rollout(tiny_model: str) -> None:
    served = Served(tiny_model)
    serving = asyncio.ensure_future(served.engine.serve())
    await served.publish(1, Interrupt.LEASE)
    short, long = (asyncio.ensure_future(served.engine.generate(prompt(n), Sampling(max_tokens=n, seed=n))) for n in (6, 40))
    await until_sampled(served, 4)
    await served.publish(2, Interrupt.LEASE)
    held = weakref.ref(next(iter(next(iter(served.core._slots.held.values())).tensors.values())))
    await short
    gc.collect()
    assert held() is not None and len(served.core._slots.held) == 1
    await long
    await asyncio.sleep(0)
    gc.collect()
    assert held() is None and not served.core._slots.held
    serving.cancel()


@pytest.mark.parametrize("exact", [False, True])
async def test_without_a_lease_later_tokens_are_of_the_newer_version(tiny_model: str, exact: bool) -> None:
    served = Served(tiny_model, exact=exact)
    serving = asyncio.ensure_future(served.engine.serve())
    await served.publish(1, Interrupt.KEEP)
    call = asyncio.ensure_future(served.engine.generate(prompt(0), Sampling(max_tokens=20, seed=1)))
    await until_sampled(served, 5)
    await served.publish(2, Interrupt.RETRACT)
    rollout = await call
    serving.cancel()
    versions = rollout.versions[rollout.is_sampled]
    assert set(versions.tolist()) == {1, 2} and (np.diff(versions) >= 0).all()
    newer, judged = rollout.versions == 2, served.judge(rollout, 2)
    np.testing.assert_allclose(rollout.logprobs[newer], judged[newer], atol=0 if exact else 1e-5)


async def test_prompts_cached_under_one_version_are_not_used_by_another(tiny_model: str) -> None:
    served = Served(tiny_model)
    ids = np.random.default_rng(0).integers(6, 90, size=40)
    serving, done = asyncio.ensure_future(served.engine.serve()), []
    for version in (1, 2):
        await served.publish(version, Interrupt.LEASE)
        done.append(await served.engine.generate(Rollout.from_prompt(ids, id=str(version)), Sampling(max_tokens=6, seed=3)))
    serving.cancel()
    for version, rollout in zip((1, 2), done, strict=True):
        assert_agrees(rollout, served.judge(rollout, version), exact=False)


def test_a_trained_adapter_reaches_the_engine(tiny_model: str) -> None:
    """Fails if the adapter's gradient, or its update, gets lost on the way."""
    served = Served(tiny_model)
    rollouts = sampled(load_model(tiny_model), 6)

    async def main() -> list[list[Array]]:
        scored = []
        for version in range(3):
            update = served.sync.offer(version, served.trainer.tensors())
            await served.engine.load(update)
            served.sync.release(update)
            scored.append(await served.engine.score(rollouts))
            served.trainer.forward_backward(make_batch(rollouts))
            served.trainer.optim_step(1e-2)
        return scored

    scored = asyncio.run(main())
    base = score(load_model(tiny_model), Head(served.core.model), rollouts, budget=512)
    for first, same, later, last in zip(scored[0], base, scored[1], scored[2], strict=True):
        np.testing.assert_allclose(first, same, atol=1e-5)
        assert np.abs(later - first).max() > 1e-3 and np.abs(last - later).max() > 1e-3


def test_all_weights_cannot_be_leased(tiny_model: str) -> None:
    core, sync = (
        EngineCore(load_model(tiny_model), name="e", slots=2, context=64),
        WeightSync(Lineage("life"), MemoryTransport()),
    )
    engine = NativeEngine(core, sync=sync, timeline=Timeline("engine"))
    with pytest.raises(WeightError, match="'lease' keeps versions of an adapter"):
        asyncio.run(engine.load(sync.offer(1, core.arena), interrupt=Interrupt.LEASE))


async def test_updates_for_another_adapter_are_refused_and_nothing_is_lost(tiny_model: str) -> None:
    served = Served(tiny_model)
    await served.publish(1, Interrupt.KEEP)
    wrong = {
        "it is for adapter": WeightSync(Lineage("life"), MemoryTransport(), adapter={"rank": 4, "alpha": 9.0, "rslora": False}),
        "and this engine has": WeightSync(Lineage("life"), MemoryTransport()),
    }
    for message, sync in wrong.items():
        with pytest.raises(WeightError, match=message):
            await served.engine.load(sync.offer(2, served.trainer.tensors()))
    other = make_trainer(tiny_model, lora=LoraSettings(rank=5, alpha=8.0))
    with pytest.raises(WeightError, match=r"lora_A\.weight' is float32 \[5"):
        await served.engine.load(served.sync.offer(2, other.tensors()))
    assert (await served.engine.state()).version == 1
    await served.publish(2, Interrupt.KEEP)
    assert (await served.engine.state()).version == 2


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "qwen3_moe", "granite", "deepseek_v3"])
def test_every_family_takes_one(family: str) -> None:
    model = prepare(families.make(family), name=family)
    add_adapter(model, LORA)
    vary(model, seed=1, scale=0.05)
    rollouts = sampled(model, 6)
    for rollout, logprobs in zip(rollouts, score(model, Head(model), rollouts, budget=512), strict=True):
        np.testing.assert_allclose(rollout.logprobs[rollout.loss_mask], logprobs[rollout.loss_mask], atol=1e-4)
    with adapter_of(model).off():
        plain = score(model, Head(model), rollouts, budget=512)
    assert any(np.abs(a[r.loss_mask] - r.logprobs[r.loss_mask]).max() > 1e-2 for a, r in zip(plain, rollouts, strict=True))
