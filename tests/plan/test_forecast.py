"""What a run is expected to take, and what the doctor says of it on machines that are too small."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import small_run
from transformers import AutoConfig

from headrace.bench.loads import SMOLLM2_135M, model_shape
from headrace.config import make_recipe
from headrace.engine.native import core
from headrace.engine.native.core import EngineCore
from headrace.engine.native.engine_memory import blocks_for
from headrace.launch.build import check_engine
from headrace.launch.forecast import forecast_memory, longest_prompt, max_kv_blocks, tokens_per_pass
from headrace.launch.inputs import UserInputs, held_out_tasks
from headrace.launch.launcher import Launch, Launcher
from headrace.lora import LoraSettings
from headrace.model import adapter_shapes, load_config
from headrace.model.shape import ModelShape
from headrace.plan import capacity_checks as capacity, inputs_checks as inputs, model_checks as model
from headrace.plan.doctor import Finding, Subject
from headrace.settings import ConfigError
from headrace.staleness.gate import gate_depth

MIDDLING = ModelShape.of(AutoConfig.for_model(**model_shape("qwen3", 151_936, 2048, 6144, 28, 16, 8, 128, 40_960)))


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one GPU of so many gigabytes, as far as anybody can see."""

    def make(gigabytes: float) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (int(gigabytes * 1e9), int(gigabytes * 1e9)))

    return make


def subject(**settings) -> Subject:
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    recipe = make_recipe({"model.dtype": "bfloat16", "sampling.max_tokens": 3072, "engine.slots": 32, **dotted})
    return Subject(recipe=recipe, shape=MIDDLING, context=4096, longest_prompt=512)


def test_a_pass_is_as_large_as_the_settings_let_it_be() -> None:
    small = make_recipe({"train.batch": 16, "train.group_size": 8, "train.micro_batch_tokens": 16_384})
    assert tokens_per_pass(small, longest=100) == 1600, "a step has no more"
    assert tokens_per_pass(small, longest=4000) == 16_384
    assert tokens_per_pass(small, longest=20_000) == 20_000, "a rollout is not cut"
    assert tokens_per_pass(make_recipe({"train.batch": 64, "train.mini_batches": 2}), longest=100) == 3200


def test_prompts_that_cannot_be_encoded_are_passed_over() -> None:
    class Encoder:
        def encode(self, prompt, variables=None):
            return [0] * {"a": 3, "b": 5}[prompt]

    rows = [{"prompt": "a"}, {"prompt": "broken"}, {"prompt": "b"}]
    assert longest_prompt(rows, Encoder(), held_out={}) == 5 and longest_prompt([], Encoder(), held_out={}) == 0
    sources = {"many": [{"prompt": "a"}] * 100, "few": [{"prompt": "b"}]}
    assert longest_prompt(rows[:1], Encoder(), held_out=sources) == 5, "every source is looked at"


@pytest.mark.parametrize(
    ("settings", "num_held_out", "blocks"),
    [
        ({"staleness.max_lag": 0}, 0, 32 * 3 + 10),
        ({"staleness.max_lag": 1}, 0, 64 * 3 + 18),
        ({"staleness.max_lag": 1, "engine.slots": 40}, 0, 40 * 3 + 12),
        ({"staleness.max_lag": 1, "engine.count": 2}, 0, 32 * 3 + 10),
        ({"staleness.max_lag": 1, "engine.count": 0, "cluster.listen": "127.0.0.1:0"}, 0, 64 * 3 + 18),
        ({"staleness.max_lag": 0, "partial.oversample": 1.5, "partial.cancel": "over_age"}, 0, 48 * 3 + 14),
        ({"staleness.gate": "none"}, 0, 256 * 3 + 66),
        ({"staleness.max_lag": 0}, 8, 48 * 3 + 14),
        ({"staleness.max_lag": 0, "train.batch": 8}, 0, 16 * 3 + 6),
        ({"staleness.max_lag": 0, "sampling.max_tokens": 4096}, 0, 32 * 64 + 10),
        ({"engine.slots": 2}, 0, 16 * 3 + 6),
        ({"engine.slots": 2, "sampling.max_tokens": 900}, 0, 2 * 64 + 2),
    ],
)
def test_the_cache_has_room_for_what_can_be_in_flight(settings, num_held_out, blocks) -> None:
    """Of 31 + 12 tokens: three blocks each, some that the scheduler keeps free, and scratch."""
    recipe = make_recipe({"train.batch": 32, "train.group_size": 8, "sampling.max_tokens": 12, **settings})
    assert max_kv_blocks(recipe, context=1024, longest_prompt=31, num_held_out=num_held_out) == blocks
    assert max_kv_blocks(recipe, context=1024, longest_prompt=0, num_held_out=num_held_out) == 0


def free(monkeypatch, num_bytes: float) -> None:
    monkeypatch.setattr("headrace.launch.forecast.free_memory", lambda device: int(num_bytes))


def test_a_small_batch_takes_little_of_a_large_machine(monkeypatch) -> None:
    """SmolLM2-135M with 16 rollouts of 43 tokens: 10.3 GB, when the cache was as large as the slots could come to use."""
    shape = ModelShape.of(AutoConfig.for_model(**SMOLLM2_135M))
    free(monkeypatch, 20e9)
    sizes = {"train.batch": 16, "train.group_size": 8, "sampling.max_tokens": 12, "staleness.max_lag": 1}
    recipe = make_recipe({"device": "cpu", **sizes})
    assert forecast_memory(recipe, shape, context=8192, longest_prompt=31).engine_process < 3.2e9
    assert forecast_memory(recipe, shape, context=8192, longest_prompt=31, is_single_turn=False).engine_process > 9e9


def test_a_cache_that_cannot_hold_one_rollout_is_refused_before_anything_is_loaded() -> None:
    recipe = make_recipe({"engine.kv_blocks": 3, "sampling.max_tokens": 12})
    assert max_kv_blocks(recipe, context=1024, longest_prompt=20, num_held_out=0) > 0
    with pytest.raises(ConfigError, match=r"engine\.kv_blocks = 3: one rollout of 43 tokens .* needs 4; raise it"):
        max_kv_blocks(recipe, context=1024, longest_prompt=31, num_held_out=0)


def test_the_doctor_and_the_run_foresee_the_same(tmp_path, monkeypatch, tiny_model) -> None:
    """With 256 held-out tasks in two sources, of which the second has the longest prompts."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "1"}\n')
    (tmp_path / "short.jsonl").write_text('{"prompt": "1"}\n' * 128)
    (tmp_path / "long.jsonl").write_text(('{"prompt": "' + "1+" * 20 + '"}\n') * 128)
    recipe_path = tmp_path / "recipe.toml"
    recipe_path.write_text(
        f"""device = "cpu"
        tasks = [{{source = "{tmp_path}/train.jsonl"}}]
        model = {{path = "{tiny_model}"}}
        train = {{batch = 16, group_size = 8}}
        engine = {{slots = 4096}}
        sampling = {{max_tokens = 8}}
        evaluate = {{limit = 256, tasks = [{{source = "{tmp_path}/short.jsonl"}}, {{source = "{tmp_path}/long.jsonl"}}]}}
        """
    )
    examined = Subject(recipe_path=recipe_path)
    for check in (*inputs.CHECKS, *model.CHECKS):
        list(check(examined))
    ours = capacity._forecast(examined, examined.recipe)
    recipe, given = examined.recipe, UserInputs()
    launcher = Launcher(recipe, given, Launch("run", quiet=True))
    theirs = launcher._forecast(tiny_model, held_out_tasks(recipe, given))
    rollouts = 16 * (1 + gate_depth(recipe)) + 2 * 256
    assert ours.most_blocks == theirs.most_blocks == blocks_for(rollouts, tokens=48, block_size=recipe.engine.block_size)
    assert examined.longest_prompt == 40 and ours.trainer.tokens == theirs.trainer.tokens


def test_a_run_has_a_cache_for_what_can_be_in_flight(tmp_path, monkeypatch) -> None:
    made: list[EngineCore] = []

    class Noted(EngineCore):
        def __init__(self, *given, **named) -> None:
            super().__init__(*given, **named)
            made.append(self)

    monkeypatch.setattr(core, "EngineCore", Noted)
    result = small_run(tmp_path / "run", steps=1, model={"context": 512}, engine={"slots": 64}, staleness={"max_lag": 0})
    assert result.summary["status"] == "finished"
    assert made[-1].cache.num_blocks == blocks_for(16 + 2 * 4, tokens=12, block_size=16)


def test_a_reference_is_counted() -> None:
    def of(**settings):
        return forecast_memory(make_recipe({"device": "cpu", **settings}), MIDDLING, context=256, longest_prompt=32).trainer

    plain, asked = of(), of(**{"train.kl": 0.1})
    assert asked.total - plain.total == plain.weights


def test_an_adapter_is_all_that_is_published_saved_and_staged_and_is_its_own_reference(tiny_model, monkeypatch) -> None:
    shape = ModelShape.of(load_config(str(tiny_model)))
    free(monkeypatch, 10e9)

    def of(**settings):
        given = {"device": "cpu", "model.path": str(tiny_model), "orchestrate": "local", "lora.rank": 4, **settings}
        return forecast_memory(make_recipe(given), shape, context=64, longest_prompt=32)

    adapted, whole, asked = of(), of(**{"lora.rank": 0}), of(**{"train.kl": 0.1})
    shapes = adapter_shapes(make_recipe({"model.path": str(tiny_model)}).model, LoraSettings(rank=4))
    size = 4 * sum(math.prod(each) for each in shapes.values())
    assert asked.trainer == adapted.trainer, "the reference is the policy with its adapter off"
    assert adapted.engine.staging == size and adapted.engine.weights == whole.engine.weights + size
    assert adapted.trainer.publishing == adapted.published.trainer == whole.published.trainer * size // whole.engine.weights
    other = {"train.kl": 0.1, "train.reference": str(tiny_model)}
    assert of(**other).trainer.references == whole.trainer.weights
    in_four_bits = of(**other, **{"lora.quantize": "nf4"}).trainer
    assert in_four_bits.references == whole.trainer.weights > in_four_bits.weights, "only the policy is in 4 bits"


def test_the_doctor_counts_an_adapter_and_refuses_an_unknown_target(tiny_model) -> None:
    def told(**settings) -> tuple[list[Finding], Subject]:
        given = Subject(recipe=make_recipe({"model.path": str(tiny_model), "lora.rank": 4, **settings}))
        return list(model.check_model(given)), given

    (_, adapter), checked = told()
    assert adapter.level == "ok" and "million parameters are trained, " in adapter.what and "rank 4 on" in adapter.what
    assert 0 < checked.published_bytes == 4 * checked.adapter < checked.weight_bytes
    (_, unknown), _ = told(**{"lora.targets": ["qproj"]})
    assert unknown.level == "problem" and "lora.targets = 'qproj'" in unknown.what and "q_proj" in unknown.what


def test_in_one_process_both_roles_are_one_figure(monkeypatch) -> None:
    free(monkeypatch, 10e9)

    def of(orchestrate: str):
        recipe = make_recipe({"device": "cpu", "orchestrate": orchestrate})
        return forecast_memory(recipe, MIDDLING, context=256, longest_prompt=32)

    inline, local = of("inline"), of("local")
    assert inline.trainer_process == inline.engine_process == inline.together
    assert local.trainer_process + local.engine.total == local.together == inline.together + local.engine.process
    assert local.engine_process == local.engine.total + 2 * local.engine.weights, "it sees the trainer's shared memory"


def test_what_runs_elsewhere_is_not_in_the_memory_of_this_host(monkeypatch) -> None:
    free(monkeypatch, 10e9)

    def of(**settings: object):
        recipe = make_recipe({"device": "cpu", "cluster.listen": "127.0.0.1:0", "engine.count": 8, **settings})
        return forecast_memory(recipe, MIDDLING, context=256, longest_prompt=32)

    assert of(orchestrate="ray").fullest_device == 0
    joins = of(**{"cluster.trainer_joins": True})
    assert joins.fullest_device == joins.together == 8 * joins.engine.total


def test_what_fits_is_said_with_its_sizes(gpu) -> None:
    gpu(192)
    (finding,) = capacity.check_gpu_memory(subject())
    assert finding.level == "ok" and not finding.fix
    assert "activations of 16384 tokens" in finding.what and "KV cache" in finding.what and "weights twice" in finding.what


@pytest.mark.parametrize(
    ("gigabytes", "fix"),
    [
        (85, "set train.micro_batch_tokens = 8192"),
        (64, "set train.micro_batch_tokens = 4096"),
        (61, "set train.recompute = 'layers'"),
        (24, "take a smaller model"),
    ],
)
def test_what_does_not_fit_comes_with_the_change_that_makes_it(gpu, gigabytes, fix) -> None:
    gpu(gigabytes)
    (finding,) = capacity.check_gpu_memory(subject(engine__kv_blocks=4096))
    assert finding.level == "problem" and fix in finding.fix


def test_a_synchronous_run_is_told_to_take_turns_first(gpu) -> None:
    gpu(86)
    (finding,) = capacity.check_gpu_memory(subject(engine__kv_blocks=4096, staleness__max_lag=0))
    assert finding.level == "problem" and finding.fix.startswith("set engine.sleep = 'cache'")
    (finding,) = capacity.check_gpu_memory(subject(engine__kv_blocks=4096, staleness__max_lag=0, engine__sleep="cache"))
    assert finding.level in ("ok", "warning")


def test_a_gpu_that_others_use_is_to_be_freed(gpu, monkeypatch) -> None:
    gpu(192)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (40 * 10**9, 192 * 10**9))
    (finding,) = capacity.check_gpu_memory(subject(engine__kv_blocks=4096))
    assert finding.level == "problem" and finding.fix.startswith("free the GPU of other processes, or ")


def test_on_a_cpu_the_memory_of_the_machine_counts(monkeypatch) -> None:
    for free, level in ((10**12, "ok"), (10**9, "problem")):
        monkeypatch.setattr(capacity, "free_memory", lambda free=free: (free, 2 * free))
        (finding,) = capacity.check_memory(subject(device="cpu", model__dtype="float32"))
        assert finding.level == level and "at its peak the trainer takes" in finding.what


def test_a_rank_exports_its_share_of_the_weights(gpu, monkeypatch) -> None:
    gpu(192)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    def of(shard: int):
        given = {"model.dtype": "bfloat16", "sync.transport": "cuda_ipc", "train.parallel.shard": shard}
        return forecast_memory(make_recipe(given), MIDDLING, context=256, longest_prompt=32)

    one, two = of(1), of(2)
    assert two.published.exported == one.published.exported // 2 > 0
    assert two.fullest_device == two.trainer.total + two.published.exported > two.engine.total


def test_an_engine_that_is_lent_is_counted_beside_the_trainer(gpu, monkeypatch) -> None:
    gpu(192)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def of(blocks: int, **settings: object):
        given = {"model.dtype": "bfloat16", "engine.lend": True, "engine.kv_blocks": blocks, **settings}
        return forecast_memory(make_recipe(given), MIDDLING, context=256, longest_prompt=32)

    small, large = of(64), of(40_000)
    assert small.fullest_device == small.trainer.total + small.engine.asleep("weights") + small.published.exported
    assert large.fullest_device == large.trainer.resident + large.engine.total + large.published.exported, "while it waits"
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    on_cpu, alone = (of(64, **{"device": "cpu", "engine.lend": lends}) for lends in (True, False))
    assert on_cpu.together - alone.together == on_cpu.engine.total - on_cpu.engine.cache, "weights stay in the host's memory"


def vllm_of(**settings):
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    recipe = make_recipe({"model.dtype": "bfloat16", "engine.kind": "vllm", **dotted})
    return forecast_memory(recipe, MIDDLING, context=4096, longest_prompt=512)


def test_a_vllm_server_is_counted_with_what_it_is_given(gpu, monkeypatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    on_cpu = vllm_of()
    weights = on_cpu.engine.weights
    assert on_cpu.server == weights + (2 << 30) + 2 * on_cpu.engine.process and on_cpu.engine.cache == 0
    assert vllm_of(engine__vllm__urls=["http://one:8000"]).server == 0
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    assert vllm_of().server - on_cpu.server == 5 << 30
    gpu(100)
    shared, given = vllm_of(), vllm_of(engine__vllm__arguments={"gpu_memory_utilization": 0.7})
    assert (shared.server, given.server) == (int(40e9), int(70e9))
    assert shared.together - given.together == -int(30e9) and shared.engine.weights == shared.engine.staging == weights
    assert vllm_of(engine__vllm__handover="folder").engine.total == 0, "it holds them in the host's memory"
    assert vllm_of(engine__vllm__arguments={"kv_cache_memory_bytes": 5}).server == weights + 5
    words = " ".join(finding.what for finding in capacity.check_gpu_memory(subject(engine__kind="vllm")))
    assert "the vLLM server behind it 40" in words and "KV cache" not in words


def test_a_server_of_several_gpus_is_counted_where_its_weights_are(gpu, monkeypatch) -> None:
    gpu(100)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    two = {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.01}
    split = vllm_of(engine__vllm__arguments={"tensor_parallel_size": 2, "kv_cache_memory_bytes": 5})
    assert split.server == split.engine.weights // 2 + 5
    alone, many = vllm_of(engine__vllm__arguments=two), vllm_of(engine__vllm__arguments=two, engine__count=2)
    assert alone.fullest_device == alone.trainer.total + alone.published.exported + alone.engine.total, (
        "nccl: on the trainer's GPU"
    )
    assert many.engine.total == 0 and many.fullest_device == many.trainer.total, "one folder for both, in the host's memory"
    assert (alone.host, many.host) == (0, 2 * 2 * alone.engine.weights + 2 * alone.engine.weights), "each twice, two versions"
    assert many.trainer.publishing == alone.engine.weights, "the trainer packs them on its GPU all the same"
    copies = vllm_of(engine__vllm__arguments=two, engine__count=2, engine__vllm__handover="nccl")
    assert copies.fullest_device - alone.fullest_device == copies.engine.total


@pytest.mark.parametrize(("gigabytes", "level"), [(100, "ok"), (10, "problem")])
def test_weights_for_servers_are_counted_in_the_hosts_memory(gpu, monkeypatch, gigabytes, level) -> None:
    gpu(100)
    monkeypatch.setattr(capacity, "free_memory", lambda: (gigabytes * 10**9, 2 * gigabytes * 10**9))
    (native,) = capacity.check_memory(subject())
    (vllm,) = capacity.check_memory(subject(engine__kind="vllm", engine__vllm__handover="folder", engine__count=2))
    assert native.level == "ok" and "weights" not in native.what
    assert vllm.level == level and "files for their servers hold 20.6 GB of weights there" in vllm.what
    assert bool(vllm.fix) == (level == "problem")


def test_a_cache_that_vllm_would_not_take_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1.5")
    with pytest.raises(ConfigError, match=r"^the variable VLLM_CPU_KVCACHE_SPACE is '1.5': vLLM wants a whole number"):
        check_engine(make_recipe({"engine.kind": "vllm"}))
