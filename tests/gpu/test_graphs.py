"""Captured steps against the same steps run eagerly."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers

from headrace.engine.native.core import EngineCore
from headrace.engine.request import HeldAdapter, Request
from headrace.lora import LoraSettings, add_adapter
from headrace.model import PackedContext, hidden_states
from headrace.model.load import prepare
from headrace.model.packing import score
from headrace.records import SAMPLED_ENTROPY, Rollout, Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.engine.native.cuda.runner import CudaRunner

SMALL = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


@pytest.fixture(autouse=True)
def _few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.engine.native.cuda import runner

    monkeypatch.setattr(runner, "CudaRunner", functools.partial(runner.CudaRunner, prompt_buckets=(64, 128)))


def make_core(
    *,
    graphs: bool,
    is_moe: bool = False,
    record_routing: bool = False,
    record_entropy: bool = False,
    lora: LoraSettings | None = None,
) -> EngineCore:
    config = transformers.Qwen3MoeConfig(**SMALL, **MOE) if is_moe else transformers.Qwen3Config(**SMALL)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if is_moe else torch.float32  # torch groups experts on the device in bfloat16 alone
    model = transformers.AutoModelForCausalLM.from_config(config).to("cuda", dtype).eval()
    sizes = {"slots": 6, "context": 96, "num_blocks": 24}
    prepared = prepare(model, name="small")
    if lora is not None:
        with torch.no_grad():
            for tensor in add_adapter(prepared, lora).parameters():
                tensor.normal_(std=0.2)
    records = {"record_routing": record_routing, "record_entropy": record_entropy}
    core = EngineCore(prepared, name="e", kernels=True, graphs=graphs, **records, **sizes)
    core.wait_warm()
    return core


def generate(core: EngineCore, *, versions: Sequence[HeldAdapter | None] = (None,), **sampling: object) -> dict[str, Rollout]:
    done: dict[str, Rollout] = {}
    for index in range(16):
        ids = np.random.default_rng(index // 2).integers(0, 101, size=1 + 9 * (index // 2))
        given = Sampling(max_tokens=20, seed=index, stop_ids=(5, 6), **sampling)
        prompt, held = Rollout.from_prompt(ids, id=str(index)), versions[index % len(versions)]
        core.submit(Request(prompt, given, on_done=lambda each: done.__setitem__(each.id, each), held=held))
    while core.has_work:
        core.step()
    assert core.num_free_blocks == core.cache.num_blocks - 1
    return done


def assert_same(left: dict[str, Rollout], right: dict[str, Rollout]) -> None:
    assert left.keys() == right.keys()
    for name, rollout in left.items():
        assert rollout.token_ids.tolist() == right[name].token_ids.tolist(), name
        np.testing.assert_allclose(rollout.logprobs, right[name].logprobs, atol=1e-4, rtol=0)


def captured(core: EngineCore, *, is_restricted: bool) -> bool:
    """Whether every bucket has its graph; a bucket without one is run eagerly."""
    runner: CudaRunner = core.runner  # type: ignore[assignment]  (the runner of a core with kernels)
    buckets = runner.buckets.all()
    return bool(buckets) and all(is_restricted in bucket.graphs for bucket in buckets)


def test_replayed_steps_draw_what_eager_ones_draw() -> None:
    eager, graphs = make_core(graphs=False), make_core(graphs=True)
    assert captured(graphs, is_restricted=False) and not captured(eager, is_restricted=False)
    for sampling in ({}, {"temperature": 0.0}):
        assert_same(generate(graphs, **sampling), generate(eager, **sampling))


def test_nothing_runs_on_the_stream_that_graphs_are_captured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that did would share cuBLAS's workspace with those of a graph that is replayed meanwhile."""
    from headrace.engine.native.cuda import buckets

    forward, streams = buckets.hidden_states, {True: set(), False: set()}

    def noting(*arguments: object) -> torch.Tensor:
        streams[torch.cuda.is_current_stream_capturing()].add(torch.cuda.current_stream().cuda_stream)
        return forward(*arguments)

    monkeypatch.setattr(buckets, "hidden_states", noting)
    generate(make_core(graphs=True))
    assert all(streams.values()) and not streams[True] & streams[False]


def test_cut_steps_are_captured_once_there_are_some_and_keep_their_masks() -> None:
    eager, graphs = make_core(graphs=False), make_core(graphs=True)
    sampling = {"top_k": 7, "top_p": 0.9, "min_tokens": 4}
    expected = generate(eager, **sampling)
    assert not captured(graphs, is_restricted=True)
    for _ in range(2):  # eagerly, beside the thread that captures; then replayed
        found = generate(graphs, **sampling)
        assert_same(found, expected)
        for name, rollout in expected.items():
            assert rollout.sampling_mask is not None
            assert found[name].sampling_mask.ids.tolist() == rollout.sampling_mask.ids.tolist()
        graphs.wait_warm()
    assert captured(graphs, is_restricted=True)


def test_replayed_steps_record_entropies() -> None:
    graphs = make_core(graphs=True, record_entropy=True)
    for sampling in ({}, {"top_k": 7, "top_p": 0.9, "min_tokens": 4}, {"temperature": 0.0}):
        assert_same(generate(graphs, **sampling), generate(make_core(graphs=False), **sampling))
        graphs.wait_warm()  # those of restricted steps
        for rollout in generate(graphs, **sampling).values():
            np.testing.assert_allclose(rollout.columns[SAMPLED_ENTROPY], slow_entropies(graphs, rollout), atol=1e-3)
    assert captured(graphs, is_restricted=False) and captured(graphs, is_restricted=True)


def slow_entropies(core: EngineCore, rollout: Rollout) -> np.ndarray:
    """From the logits of the whole rollout, row by row."""
    tokens = torch.from_numpy(rollout.token_ids.astype(np.int64)).to("cuda")
    positions = torch.arange(len(tokens), device="cuda")
    with torch.no_grad():
        hidden = hidden_states(core.model, tokens, positions, PackedContext([len(tokens)], device="cuda"))
        logits = core.head.logits(hidden).double().cpu()
    found = np.zeros(len(rollout))
    for index in np.flatnonzero(rollout.is_sampled & (rollout.temperatures > 0)).tolist():
        row = logits[index - 1] / float(rollout.temperatures[index])
        if rollout.sampling_mask is not None:
            listed = torch.from_numpy(rollout.sampling_mask.row(index).astype(np.int64))
            if len(listed) and listed[0] >= 0:
                row = row[listed]
            else:
                row[~listed] = float("-inf")
        found[index] = float(torch.distributions.Categorical(logits=row).entropy())
    return found


def test_replayed_steps_see_exchanged_weights() -> None:
    cores = [make_core(graphs=False), make_core(graphs=True)]
    before = generate(cores[1])
    for core in cores:
        weights = core.arena.views["model.layers.1.mlp.down_proj.weight"]
        core.exchange_weights(SimpleNamespace(exchange=lambda weights=weights, **_: weights.mul_(-1.0)))
        core.changed_weights(policy="policy", lineage="l", version=1)
    eager, graphs = map(generate, cores)
    assert_same(graphs, eager)
    assert any(graphs[name].token_ids.tolist() != before[name].token_ids.tolist() for name in before)
    assert all((rollout.versions[rollout.is_sampled] == 1).all() for rollout in graphs.values())


def test_replayed_steps_add_to_each_row_its_own_version_of_the_adapter() -> None:
    cores = [make_core(graphs=graphs, lora=LoraSettings(rank=8, alpha=16.0)) for graphs in (False, True)]
    assert captured(cores[1], is_restricted=False)
    found = []
    for core in cores:
        own = {name: tensor.clone() for name, tensor in core.adapter.own.items()}
        held = [HeldAdapter(i, {name: (0.3 * i - 1) * tensor for name, tensor in own.items()}) for i in range(12)]
        found.append([generate(core), generate(core, versions=[None, *held])])  # more versions than places
        core.wait_warm()
        found[-1].append(generate(core, versions=[None, *held[:3]]))
    assert captured(cores[1], is_restricted=False)
    for eager, graphs in zip(*found, strict=True):
        assert_same(graphs, eager)
    assert found[0][0]["3"].token_ids.tolist() != found[0][1]["3"].token_ids.tolist()


def test_captured_steps_of_compiled_layers_record_which_experts_they_took() -> None:
    """An eager pass that replays the record gives the same logprobs; with other experts it is a nat off."""
    core = make_core(graphs=True, is_moe=True, record_routing=True)
    assert captured(core, is_restricted=False) and core.runner.graphs._compiles  # type: ignore[attr-defined]
    rollouts = list(generate(core).values())
    routings = [each.expert_routing for each in rollouts]
    moved = [np.where(each == 255, each, (each + 1) % 4) for each in routings]
    others = [each.replace(expert_routing=routing) for each, routing in zip(rollouts, moved, strict=True)]
    apart = []
    for given in (rollouts, others):
        again = score(core.model, core.head, given, budget=4096, device="cuda", routers=core.routers)
        pairs = zip(again, rollouts, strict=True)
        apart.append(np.concatenate([np.abs(one - each.logprobs)[each.is_sampled] for one, each in pairs]).mean())
    assert apart[0] < 0.05 < 0.3 < apart[1]
    unrecorded = generate(make_core(graphs=True, is_moe=True))
    assert all(rollout.expert_routing is None for rollout in unrecorded.values())


def test_what_min_tokens_forbids_is_recorded_under_graphs() -> None:
    """Next to rows that list what they allow, and rows that need no mask."""
    core = make_core(graphs=True)
    for _ in range(2):
        for sampling, rows in (({}, [[~5, ~6]] * 4 + [[]] * 16), ({"keep_mask": False}, None)):
            for rollout in generate(core, min_tokens=4, **sampling).values():
                start, mask = rollout.calls[0].start, rollout.sampling_mask
                found = None if mask is None else [mask.row(start + at).tolist() for at in range(rollout.num_sampled)]
                assert found == (None if rows is None else rows[: rollout.num_sampled])
        core.wait_warm()
