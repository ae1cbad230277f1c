"""Settings of the vLLM engine, two levels deep: taken, refused, saved, and as vLLM's command line."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys

import pytest
import torch

from headrace.config import Recipe, make_recipe, parse_recipe
from headrace.engine import VllmSettings, engine_kind
from headrace.engine.kind import EnginePlace
from headrace.engine.vllm.kind import choose_handover, gpu_share, gpus_of, visible_to
from headrace.engine.vllm.open import server_arguments
from headrace.launch.build import check_engine, check_sync, preflight
from headrace.launch.inputs import UserInputs
from headrace.launch.placement import choose_device, choose_transport, receiving_device, threads_of
from headrace.model import ModelShape
from headrace.settings import ConfigError, describe, flatten, parse_override, to_dict, to_toml

TEXT = """\
[engine]
kind = "vllm"
count = 2

[engine.vllm]
python = "other/bin/python"
start_seconds = 30

[engine.vllm.arguments]
tensor_parallel_size = 2
hf_overrides = {"odd name" = [{a = 1}], mixed = [{}, 1]}
"""
TWO = ["http://one:8000", "https://two/"]


def vllm(**settings: object) -> Recipe:
    return make_recipe(
        {"engine.kind": "vllm", **{f"engine.{key.replace('__', '.')}": value for key, value in settings.items()}}
    )


def test_a_section_in_a_section_is_read_overridden_and_saved() -> None:
    given = dict(
        [parse_override("--engine.vllm.arguments.max-num-batched-tokens=64"), parse_override("--engine.vllm.python=py")]
    )
    recipe = parse_recipe(TEXT, name="mine.toml", overrides=given)
    settings = recipe.engine.vllm
    assert (settings.python, settings.start_seconds, settings.answer_seconds) == ("py", 30.0, 120.0)
    again = parse_recipe(to_toml(to_dict(recipe)), name="resolved.toml")
    assert again == recipe and again.hash == recipe.hash
    flat = flatten(to_dict(recipe))
    assert flat["engine.vllm.python"] == "py" and flat["engine.vllm.arguments.max_num_batched_tokens"] == 64
    rows = {key: (kind, default) for key, kind, default, _ in describe(Recipe)}
    assert rows["engine.vllm.urls"] == ("a list of text", "[]") and rows["engine.vllm.start_seconds"] == ("a number", "300.0")
    assert "started here --tensor-parallel-size=2" in "\n".join(recipe.derivation())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("python =", "pyhton =", "mine.toml:6: engine.vllm.pyhton is not a setting; did you mean engine.vllm.python?"),
        ("= 30", "= 0", "mine.toml:7: engine.vllm.start_seconds = 0.0: must be a number above 0"),
        ("tensor_parallel_size", "port", "mine.toml:10: engine.vllm.arguments.port = 2: Headrace chooses where"),
        (
            '"vllm"',
            '"native"',
            "mine.toml:6: engine.vllm.python = 'other/bin/python': engine.kind = 'native' does not look",
        ),
    ],
)
def test_an_error_two_levels_deep_names_the_line(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_recipe(TEXT.replace(old, new), name="mine.toml")
    assert str(caught.value).startswith(message)


NO_SERVERS = (
    *("localhost:8000", "ftp://h", "HTTP//h", "", "http://", "http://:80", "http://[::1", " http://h", "http://h h"),
    *("http://h/v1", "http://h?a=1", "http://h/#", "http://h:port", "http://h:99999", "http://h:0"),
)


@pytest.mark.parametrize("url", NO_SERVERS)
def test_an_address_that_is_no_server_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        vllm(vllm__urls=["http://localhost:8000", url])
    assert str(caught.value).startswith(f"engine.vllm.urls = {url!r}: must be http:// or https://")


def test_no_secret_is_taken_or_shown() -> None:
    for settings in (
        {"vllm__urls": ["http://me:secret@host"]},
        {"vllm__urls": ["me:secret@host"]},
        {"vllm__token_variable": "sk-secret"},
        {"vllm__arguments": {"api_key": "secret"}},
        {"vllm__arguments": {"hf_token": "secret"}},
        {"vllm__arguments": {"trust_remote_code": True}},
        {"vllm__arguments": {"load_format": "pt"}},
    ):
        with pytest.raises(ConfigError, match=r"^engine\.vllm\.") as caught:
            vllm(**settings)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"vllm__urls": TWO, "count": 3}, "engine.count = 3: engine.vllm.urls names 2 server(s)"),
        ({"vllm__urls": ["http://h", "http://h/"]}, "engine.vllm.urls = ['http://h', 'http://h/']: must be a list"),
        ({"vllm__urls": TWO, "vllm__python": "py"}, "engine.vllm.python = 'py': no server is started"),
        ({"vllm__urls": TWO, "vllm__arguments": {"swap": 1}}, "engine.vllm.arguments = {'swap': 1}: no server is started"),
        ({"vllm__answer_seconds": float("inf")}, "engine.vllm.answer_seconds = inf: must be a number above 0"),
        ({"vllm__arguments": {"max-num": 1}}, "engine.vllm.arguments.max-num is not a name"),
        ({"vllm__arguments": {"max_num_seqs": 1}}, "engine.vllm.arguments.max_num_seqs = 1: engine.slots decides it"),
        ({"vllm__arguments": {"max_num_seq": 1}}, "engine.vllm.arguments.max_num_seq = 1: vLLM takes it for max_num_seqs"),
        ({"vllm__arguments": {"swap": None}}, "engine.vllm.arguments.swap = None: must be text, a finite number"),
        ({"vllm__arguments": {"x": {"b": [float("nan")]}}}, "engine.vllm.arguments.x = {'b': [nan]}: must be text"),
        ({"vllm__arguments": {"ignore_patterns": []}}, "engine.vllm.arguments.ignore_patterns = []: must be a list of one or"),
        (
            {"vllm__arguments": {"x": ["a", "--y"]}},
            "engine.vllm.arguments.x = ['a', '--y']: must be a list of one or",
        ),
        ({"sleep": "cache"}, "engine.sleep = 'cache': engine.kind = 'vllm' cannot sleep"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_what_vllm_cannot_be_given_is_refused(settings: dict, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        vllm(**settings)
    assert str(caught.value).startswith(problem)


def test_what_needs_the_embedded_engine_or_one_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^engine.kind = 'vllm': exact = true needs the embedded engine"):
        make_recipe({"exact": True, "engine.kind": "vllm"})
    with pytest.raises(ConfigError, match=r"^engine.kind = 'vllm': a server is a process of its own; set orchestrate"):
        make_recipe({"orchestrate": "inline", "engine.kind": "vllm"})
    for key, value in {
        "urls": TWO,
        "token_variable": "MINE",
        "arguments": {"swap": 1},
        "handover": "nccl",
        "answer_seconds": 1,
    }.items():
        with pytest.raises(ConfigError, match=rf"^engine.vllm.{key} = .*engine.kind = 'native' does not look at it"):
            make_recipe({f"engine.vllm.{key}": value})


def test_engines_are_counted_by_servers_or_by_count() -> None:
    assert [
        vllm().engine.num_engines,
        vllm(count=3).engine.num_engines,
        make_recipe({"engine.count": 2}).engine.num_engines,
    ] == [1, 3, 2]
    one, two = vllm(vllm__urls=TWO), vllm(vllm__urls=TWO, count=2)
    assert one.engine.num_engines == two.engine.num_engines == 2 and one.hash == two.hash
    assert threads_of(one, "engine", cores=6) == 2
    said = "\n".join(one.derivation())
    assert (
        "2 × 256 rollouts decoded at once (engine.vllm.urls, engine.slots)" in said and "2 server(s), running already" in said
    )


def test_the_hash_is_of_what_vllm_computes_and_not_of_where() -> None:
    base = vllm()
    assert base.hash == vllm(vllm__python="py", vllm__start_seconds=1, vllm__urls=[]).hash == vllm(vllm__urls=TWO[:1]).hash
    assert base.hash == vllm(count=2, vllm__arguments={"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5}).hash
    assert len({base.hash, make_recipe({}).hash, vllm(vllm__arguments={"quantization": "fp8"}).hash}) == 3


def test_arguments_are_vllms_command_line() -> None:
    arguments = {
        **{"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5, "quantization": "fp8", "offset": -1},
        **{"enable_expert_parallel": True, "async_scheduling": False},
        **{"allowed_origins": ["a", "b"], "speculative_config": {"é": [True, 0.5]}},
    }
    *line, table = VllmSettings(arguments=arguments).command_line()
    assert line == [
        *("--tensor-parallel-size=2", "--gpu-memory-utilization=0.5", "--quantization=fp8", "--offset=-1"),
        *("--enable-expert-parallel", "--no-async-scheduling", '--allowed-origins=["a", "b"]'),
    ]
    option, _, value = table.partition("=")
    assert option == "--speculative-config" and json.loads(value) == {"é": [True, 0.5]}


def test_lists_go_out_as_each_option_of_vllm_takes_them() -> None:
    arguments = {
        **{"logits_processors": ["a:B", "c:D"], "cudagraph_capture_sizes": [1, 2], "numa_bind_cpus": ["0-3"]},
        **{"lora_modules": [{"name": "n"}], "middleware": ["a.b", "c.d"], "device_ids": [2, 3], "allowed_methods": []},
    }
    assert VllmSettings(arguments=arguments).command_line() == [
        *("--logits-processors", "a:B", "c:D", "--cudagraph-capture-sizes", "1", "2", "--numa-bind-cpus", "0-3"),
        *("--lora-modules", '{"name": "n"}', "--middleware=a.b", "--middleware=c.d", "--device-ids=2,3"),
        "--allowed-methods=[]",
    ]


def test_vllm_that_is_not_there_is_missed_before_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_VLLM_PYTHON", sys.executable)
    for check in (
        check_engine,
        lambda recipe: preflight(recipe, UserInputs(tasks=[{"prompt": "1"}], reward=lambda prompt, completion: 1.0)),
    ):
        with pytest.raises(ConfigError, match=r"^engine.kind = 'vllm': .* has no vLLM; install vLLM in an environment"):
            check(vllm(vllm__start_seconds=1))
    check_engine(vllm(vllm__urls=TWO))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"sampling.temperature": 2.5}, "sampling.temperature = 2.5: vLLM samples at temperatures from 0.01 to 2"),
        ({"sampling.temperature": 0.001}, "sampling.temperature = 0.001: vLLM samples"),
        ({"engine.vllm.start_seconds": 600}, "engine.vllm.start_seconds = 600: a run stops after deadline = 600 s"),
        (
            {"buffer.kind": "synchronous", "partial.oversample": 1.5},
            "partial.interrupt = 'keep': vLLM cannot score new weights while it keeps",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_a_server_would_do_otherwise_is_refused(settings: dict, problem: str) -> None:
    make_recipe(settings if "engine.vllm.start_seconds" not in settings else {})
    with pytest.raises(ConfigError) as caught:
        make_recipe({"engine.kind": "vllm", **settings})
    assert str(caught.value).startswith(problem)


def test_servers_of_several_gpus_get_as_many_and_never_the_trainers() -> None:
    two = vllm(vllm__arguments={"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, count=2)
    assert [gpus_of(two, index, count=9) for index in range(2)] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    with pytest.raises(ConfigError, match="2 servers of 4 GPUs each and the trainer's 1 are more than the 8 there are"):
        gpus_of(two, 0, count=8)
    ranks = {"engine.kind": "vllm", "engine.count": 2, "train.parallel.shard": 2, "train.parallel.replicate": 2}
    sharded = make_recipe({**ranks, "engine.vllm.arguments": {"tensor_parallel_size": 2}})
    assert [gpus_of(sharded, index, count=8) for index in range(2)] == [[4, 5], [6, 7]]
    with pytest.raises(ConfigError, match="2 servers of 2 GPUs each and the trainer's 4 are more than the 7 there are"):
        gpus_of(sharded, 0, count=7)
    assert [gpus_of(make_recipe(ranks), index, count=5) for index in range(2)] == [[4], [4]]
    assert [gpus_of(make_recipe(ranks), index, count=4) for index in range(2)] == [[0], [1]], "none is left"
    assert "vllm       2 server(s) of 2 GPUs each, 4 in all, started here" in "\n".join(sharded.derivation())
    joining = make_recipe({**ranks, "engine.count": 0, "cluster.listen": "h:1"})
    assert "vllm       a server for each engine that joins, started there" in "\n".join(joining.derivation())
    one = vllm(count=3)
    assert [gpus_of(one, index, count=3) for index in range(3)] == [[1], [2], [1]] and gpus_of(one, 2, count=1) == [0]


@pytest.mark.parametrize(
    ("gpus", "settings", "ways"),
    [
        (0, {}, ("folder", "shared_memory", ["cpu", "cpu"])),
        (1, {}, ("ipc", "cuda_ipc", ["cuda", "cuda"])),
        (1, {"vllm__handover": "folder"}, ("folder", "shared_memory", ["cpu", "cpu"])),
        (1, {"vllm__urls": TWO}, ("folder", "shared_memory", ["cpu", "cpu"])),
        (1, {"vllm__urls": TWO, "vllm__handover": "ipc"}, ("ipc", "cuda_ipc", ["cuda", "cuda"])),
        (3, {}, ("ipc", "shared_memory", ["cuda:1", "cuda:2"])),
        (3, {"vllm__arguments": {"tensor_parallel_size": 2}, "count": 1}, ("nccl", "cuda_ipc", ["cuda:0", "cuda:0"])),
        (5, {"vllm__arguments": {"tensor_parallel_size": 2}}, ("folder", "shared_memory", ["cpu", "cpu"])),
        (3, {"vllm__handover": "nccl"}, ("nccl", "cuda_ipc", ["cuda:0", "cuda:0"])),
    ],
)
def test_weights_take_the_shortest_way_that_the_gpus_have(monkeypatch, gpus: int, settings: dict, ways: tuple) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    recipe = vllm(**({} if "vllm__urls" in settings else {"count": 2}) | settings)
    places = [receiving_device(recipe, each) for each in (0, 1)]
    assert (choose_handover(recipe, device=choose_device(recipe)), choose_transport(recipe), places) == ways


def test_servers_have_the_gpus_that_no_trainer_has(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    place = {"name": "engine-1", "index": 1, "device": "cuda:2", "receives_on": "cpu", "log": tmp_path, "folder": tmp_path}
    two = {"engine.kind": "vllm", "engine.vllm.arguments": {"tensor_parallel_size": 2}}
    here = make_recipe({**two, "cluster.listen": "h:1"})
    assert visible_to(here, EnginePlace(**place, is_far=True)) == "6,7", "as the host offers"
    assert visible_to(here, EnginePlace(**{**place, "index": 0})) == "5,6", "after the trainer's"
    far = make_recipe({**two, "engine.count": 2, "cluster.listen": "h:1", "cluster.trainer_joins": True})
    assert [gpus_of(far, index, count=4) for index in range(2)] == [[0, 1], [2, 3]]
    assert choose_handover(far, device="cuda") == "folder"
    with pytest.raises(ConfigError, match=r"^engine.vllm.handover = 'nccl': NCCL wants a GPU for each end"):
        choose_handover(make_recipe({**to_dict(far), "engine.vllm.handover": "nccl"}), device="cuda")
    ray = make_recipe({**two, "orchestrate": "ray", "cluster.listen": "h:1", "engine.vllm.handover": "nccl"})
    assert (choose_handover(ray, device="cuda"), choose_transport(ray)) == ("folder", "http")
    joins = make_recipe({**two, "engine.count": 0, "cluster.listen": "h:1", "engine.vllm.handover": "nccl"})
    assert choose_handover(joins, device="cuda") == "folder"
    for each in (ray, joins):
        assert gpu_share(each, 0, held=10, total=100) == 0.92
        check_engine(each)


def test_handovers_that_the_gpus_do_not_allow_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"^engine.vllm.handover = 'nccl': NCCL wants a GPU for each end"):
        choose_handover(vllm(vllm__handover="nccl"), device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    two = {"vllm__arguments": {"tensor_parallel_size": 2}}
    with pytest.raises(ConfigError, match=r"^engine.vllm.handover = 'ipc': a server of 2 GPUs cannot open the memory of one"):
        choose_handover(vllm(vllm__handover="ipc", **two), device="cuda")
    for host in ("0.0.0.0", "host.invalid"):
        with pytest.raises(ConfigError, match=rf"^sync.host = '{host}'"):
            check_engine(make_recipe({"engine.kind": "vllm", "engine.vllm.handover": "nccl", "sync.host": host}))
    for settings in ({"engine.vllm.handover": "folder"}, {"engine.vllm.handover": "nccl"}):
        with pytest.raises(ConfigError, match=r"^sync.transport = 'collective': the engine's process receives weights on"):
            check_sync(make_recipe({"engine.kind": "vllm", "sync.transport": "collective", **settings}))
    check_sync(make_recipe({"engine.kind": "vllm", "sync.transport": "collective"}))


@pytest.mark.parametrize(
    ("gpus", "count", "shares"),
    [(1, 1, [0.4]), (1, 2, [0.2, 0.2]), (3, 2, [0.81, 0.81]), (2, 2, [0.35, 0.35])],
)
def test_servers_divide_a_gpu_and_leave_room_for_the_weights_held_there(monkeypatch, gpus, count, shares) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    held = {"held": 10 << 30, "total": 100 << 30}  # and a process's own gigabyte
    assert [gpu_share(vllm(count=count), index, **held) for index in range(count)] == shares


@pytest.mark.parametrize(
    ("count", "sizes", "refused"),
    [
        (8, {}, ""),
        (3, {}, r"divide 32 attention heads and 8 KV heads and a vocabulary of 151936 \(padded\) and .* evenly; set it to 2"),
        (16, {}, ""),  # each KV head on two GPUs
        (6, {"heads": 12, "kv_heads": 4, "vocabulary": 190, "intermediate": 12}, "divide 4 KV heads evenly; set it to 4"),
        (3, {"heads": 12, "kv_heads": 3, "vocabulary": 190}, "an MLP of width 4096 evenly; set it to 1"),
        (3, {"heads": 12, "kv_heads": 3, "vocabulary": 190, "experts": 4}, ""),
    ],
)
def test_a_model_that_vllm_cannot_divide_is_refused(count, sizes, refused) -> None:
    widths = {"heads": 32, "kv_heads": 8, "vocabulary": 151936, "intermediate": 4096, **sizes}
    shape = ModelShape(hidden=64, layers=2, key_dim=8, value_dim=8, is_tied=True, **widths)
    recipe = vllm(vllm__arguments={"tensor_parallel_size": count})
    with pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext():
        engine_kind(recipe.engine).check_model(recipe, shape)


@pytest.mark.parametrize("arguments", [{"tensor_parallel": 2}, {"tensor_parallel_size": "two"}, {"data_parallel_size": True}])
def test_how_many_gpus_a_server_takes_must_be_said_plainly(arguments) -> None:
    with pytest.raises(ConfigError, match=r"engine.vllm.arguments.(tensor|data)_parallel"):
        vllm(vllm__arguments=arguments)


@pytest.mark.parametrize("handover", ["ipc", "nccl"])
def test_a_run_without_a_gpu_hands_over_by_files_alone(handover) -> None:
    with pytest.raises(ConfigError, match=rf"^engine.vllm.handover = '{handover}': the run is on the CPU"):
        check_engine(make_recipe({"device": "cpu", "engine.kind": "vllm", "engine.vllm.handover": handover}))


def test_a_server_is_started_for_the_way_its_weights_come_and_leaves_the_trainer_room() -> None:
    def started(recipe, **options) -> dict[str, str]:
        words = server_arguments(recipe, context=64, candidates=8, is_on_cpu=False, **options)
        return dict(itertools.pairwise(words))

    assert "--weight-transfer-config" not in started(vllm()) and "--gpu-memory-utilization" not in started(vllm())
    alone = started(vllm(), handover="nccl")
    assert json.loads(alone["--weight-transfer-config"]) == {"backend": "nccl"} and "--gpu-memory-utilization" not in alone
    assert started(vllm(), handover="ipc", share=0.4)["--gpu-memory-utilization"] == "0.4"
    own = vllm(vllm__arguments={"gpu_memory_utilization": 0.7})
    words = server_arguments(own, context=64, candidates=8, is_on_cpu=False, handover="ipc", share=0.4)
    assert "--disable-uvicorn-access-log" in words, "its log does not grow with every call"
    assert [word for word in words if "gpu-memory-utilization" in word] == ["--gpu-memory-utilization=0.7"]
    together = [{"partial.interrupt": "abort"}, {"partial.interrupt": "drain"}, {"buffer.kind": "synchronous"}]
    by_episode = {"buffer.kind": "synchronous", "buffer.unit": "episode", "train.advantage": "global"}
    one_by_one = [{}, {"partial.interrupt": "retract"}, by_episode]
    for settings, every in [*((each, "16") for each in together), *((each, None) for each in one_by_one)]:
        recipe = make_recipe({"engine.kind": "vllm", "staleness.max_lag": 1, **settings})
        assert started(recipe).get("--stream-interval") == every
    with pytest.raises(ConfigError, match=r"engine\.vllm\.handover decides it"):
        vllm(vllm__arguments={"weight_transfer_config": {}})
