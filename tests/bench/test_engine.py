"""The benchmark of the engine: that it counts what it says, takes turns, and outlives its peers."""

from __future__ import annotations

import os
import pydoc
import statistics
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headrace.bench import engine, engine_peers
from headrace.bench.child import PeerFailed
from headrace.bench.engine import alternate, decode_rows, first_token_seconds, make_plan
from headrace.bench.engine_native import StepRecord, Turn, bytes_read, copy_bandwidth, generate, scheduling_cost
from headrace.bench.engine_peers import VllmPeer, continuous_generate, load_plain, padded_generate
from headrace.bench.harness import Row, missed
from headrace.bench.loads import SMALL, Load, Workload, lognormal_lengths, write_random_model
from headrace.bench.measure import KL, MAX, MEAN, compare, trainer_logprobs
from headrace.engine.native.core import EngineCore
from headrace.model.load import load_model

VOCABULARY = SMALL["vocab_size"]
FAKE_VLLM = """
import os, sys
print("noise where the answers go")
__version__ = "0.26.0"

class SamplingParams:
    def __init__(self, **given):
        self.given = given

class LLM:
    def __init__(self, **given):
        assert given["skip_tokenizer_init"] and given["enable_prefix_caching"] is False
        if os.environ.get("FAKE_VLLM_FAILS") == "loading":
            raise RuntimeError("no kernel image for this GPU")
        self.slots = given["max_num_seqs"]

    def generate(self, prompts, sampling, use_tqdm):
        print("more noise")
        if os.environ.get("FAKE_VLLM_FAILS") == "answering":
            sys.exit("out of memory")
        return [self.answer(prompt, one.given) for prompt, one in zip(prompts, sampling)]

    def answer(self, prompt, given):
        assert given["ignore_eos"] and given["temperature"] == 1.0 and given["logprobs"] == 0 and "min_tokens" not in given
        count = given["max_tokens"] - (os.environ.get("FAKE_VLLM_FAILS") == "short")
        token_ids = [prompt["prompt_token_ids"][0] + place for place in range(count)]
        logprobs = [{token: Record(logprob=-0.5 - place)} for place, token in enumerate(token_ids)]
        return Record(outputs=[Record(token_ids=token_ids, logprobs=logprobs)])

class Record:
    def __init__(self, **given):
        self.__dict__.update(given)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("small")
    write_random_model(SMALL, path, dtype="float32")
    return str(path)


@pytest.fixture(scope="module")
def core(folder) -> EngineCore:
    return EngineCore(load_model(folder), name="bench", slots=8, context=256)


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch) -> Path:
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(FAKE_VLLM))
    (package / "inputs.py").write_text("TokensPrompt = dict\n")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}")
    return tmp_path / "vllm.log"


def open_vllm(log: Path) -> VllmPeer:
    return VllmPeer("model", dtype="bfloat16", context=64, slots=8, log=log)


def test_lengths_are_the_same_everywhere_skewed_and_capped() -> None:
    lengths = lognormal_lengths(512, mean=400, sigma=1.0, cap=4096)
    assert lengths == lognormal_lengths(512, mean=400, sigma=1.0, cap=4096)
    assert min(lengths) >= 1 and max(lengths) <= 4096
    assert 330 < statistics.mean(lengths) < 470 and statistics.median(lengths) < 0.75 * statistics.mean(lengths)
    many = lognormal_lengths(200_000, mean=400, sigma=1.0, cap=10**9)
    assert abs(statistics.mean(many) - 400) < 5


def test_no_two_turns_have_the_same_prompts_and_siblings_share_one() -> None:
    load, group = Load.uniform(5, 7, 3), Load.uniform(5, 7, 3, is_group=True)
    first, second = (load.sample(vocabulary=1000, seed=seed) for seed in (0, 1))
    assert not set(first.prompts) & set(second.prompts) and len(set(first.prompts)) == 5
    assert first == load.sample(vocabulary=1000, seed=0) and first.num_tokens == 15
    siblings = group.sample(vocabulary=1000, seed=0)
    assert len(siblings.prompts) == 5 and len(set(siblings.prompts)) == 1 and siblings.is_group
    tail = Load.long_tail(6, 4, mean=20, cap=64, goals={}).shortened(2)
    assert max(tail.lengths) == 2 and len(tail.lengths) == 6


def test_a_load_comes_back_whole_and_its_steps_add_up(core) -> None:
    workload = Load("mixed", 6, (5, 2, 9)).sample(vocabulary=VOCABULARY, seed=3)
    turn = generate(core, workload, seed=3)
    assert [rollout.num_sampled for rollout in turn.rollouts] == [5, 2, 9]
    assert [tuple(rollout.token_ids[:6]) for rollout in turn.rollouts] == list(workload.prompts)
    assert sum(step.seconds for step in turn.steps) <= turn.seconds
    assert turn.tokens_per_second == pytest.approx(16 / turn.seconds)
    assert sum(step.prompt_rows for step in turn.steps) == 18
    # One token of each is drawn with its prompt; the second ends the shortest, in the only step that decodes all three.
    assert [step.cached_tokens for step in turn.steps if step.decode_rows == 3] == [18 + 3]


def test_a_load_that_comes_back_short_is_no_figure(folder) -> None:
    core = EngineCore(load_model(folder), name="bench", slots=2, context=16)
    with pytest.raises(AssertionError, match="were sampled where"):
        generate(core, Workload(((1, 2, 3),), (50,)), seed=0)


def test_a_step_reads_weights_once_and_every_cached_token(folder) -> None:
    model = load_model(folder)
    assert bytes_read(model) == (sum(parameter.numel() * 4 for parameter in model.parameters()), 2 * 4 * 2 * 32 * 4)


def test_a_table_of_embeddings_that_is_only_looked_up_is_not_read(tmp_path) -> None:
    write_random_model({**SMALL, "tie_word_embeddings": False}, tmp_path, dtype="float32")
    model = load_model(str(tmp_path))
    every = sum(parameter.nbytes for parameter in model.parameters())
    assert bytes_read(model)[0] == every - SMALL["vocab_size"] * SMALL["hidden_size"] * 4


def test_the_share_is_of_the_steps_that_decode_every_request() -> None:
    steps = (
        StepRecord(9.0, prompt_rows=4, decode_rows=0, cached_tokens=0),
        StepRecord(9.0, prompt_rows=1, decode_rows=2, cached_tokens=0),
        StepRecord(2.0, prompt_rows=0, decode_rows=2, cached_tokens=10),
        StepRecord(4.0, prompt_rows=0, decode_rows=2, cached_tokens=10),
        StepRecord(8.0, prompt_rows=0, decode_rows=2, cached_tokens=10),
        StepRecord(0.1, prompt_rows=0, decode_rows=1, cached_tokens=12),
    )
    rollouts = (SimpleNamespace(num_sampled=3), SimpleNamespace(num_sampled=4))
    read = {"weights": 100, "per_token": 10, "bandwidth": 100.0}
    load = Load.uniform(2, 2, 3)
    step, share = decode_rows(load, [Turn(30.0, rollouts, steps)], **read)
    assert (step.value, step.bound, share.value, share.bound) == (4000.0, 2000.0, 0.5, 1.0)
    assert decode_rows(load, [Turn(1.0, rollouts, steps[:2])], **read) == []


def test_a_copys_bandwidth_counts_reads_and_writes(monkeypatch) -> None:
    now = iter(np.arange(0.0, 100.0, 0.5))
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    assert copy_bandwidth("cpu", times=10, repetitions=1) == pytest.approx(2 * (1 << 27) / 0.05)


def test_ours_and_peers_take_turns_and_one_that_fails_is_gone_for_good(monkeypatch, capsys) -> None:
    order: list[str] = []
    seconds = {"ours": iter([99.0, 1.0, 4.0, 2.0]), "slower": iter([99.0, 8.0, 10.0, 20.0])}

    def ours(core, workload, *, seed):
        order.append(f"ours {workload.prompts[0]}")
        rollouts = tuple(SimpleNamespace(num_sampled=length) for length in workload.lengths)
        return Turn(next(seconds["ours"]), rollouts, ())

    def slower(workload):
        order.append(f"slower {workload.prompts[0]}")
        return next(seconds["slower"])

    def broken(workload):
        order.append("broken")
        if order.count("broken") == 2:
            raise PeerFailed("broken: it fell over")
        return 1.0

    monkeypatch.setattr(engine, "generate", ours)
    load = Load.uniform(2, 3, 10, goals={"": "≥ 7", "slower": "≥ 2"})
    peers = {"slower": slower, "broken": broken}
    _, rows = alternate(None, load, vocabulary=50, turns=3, peers=peers, is_slow=False)
    prompts = [load.sample(vocabulary=50, seed=seed).prompts[0] for seed in range(4)]
    assert order == [
        f"ours {prompts[0]}", f"slower {prompts[0]}", "broken",
        f"ours {prompts[1]}", f"slower {prompts[1]}", "broken",
        f"ours {prompts[2]}", f"slower {prompts[2]}",
        f"ours {prompts[3]}", f"slower {prompts[3]}",
    ]  # fmt: skip
    assert rows == [  # ours is the median, a peer's its best turn
        Row(load.name, 10.0, "tokens/s", goal="≥ 7", peers={"slower": 2.5}),
        Row(f"{load.name} ÷ slower", 4.0, "ratio", goal="≥ 2"),
    ]
    assert peers.keys() == {"slower"} and "broken: it fell over; it is absent" in capsys.readouterr().out


def test_padded_generate_runs_until_the_longest_is_done(folder, monkeypatch) -> None:
    model = load_plain(folder, dtype="float32", device="cpu")
    asked = []
    real = model.generate
    monkeypatch.setattr(
        model, "generate", lambda *given, **more: asked.append(more["generation_config"]) or real(*given, **more)
    )
    workload = Workload(((1, 2, 3), (4, 5, 6)), (2, 6))
    assert padded_generate(model, workload) > 0
    assert (asked[0].max_new_tokens, asked[0].top_k, asked[0].do_sample) == (6, 0, True)
    monkeypatch.setattr(model, "generate", lambda *given, **more: torch.zeros(2, 4))
    with pytest.raises(PeerFailed, match=r"model\.generate: "):
        padded_generate(model, workload)


def test_a_batch_that_fails_leaves_the_model_as_it_was(folder, monkeypatch) -> None:
    model = load_plain(folder, dtype="float32", device="cpu")

    def fail(**_):
        raise MemoryError("more than there is\nand a second line")

    monkeypatch.setattr(model, "generate_batch", fail)
    with pytest.raises(PeerFailed, match=r"model\.generate_batch: MemoryError: more than there is$"):
        continuous_generate(model, Load.uniform(2, 3, 4).sample(vocabulary=VOCABULARY, seed=0))
    assert model.config._attn_implementation == "sdpa"
    monkeypatch.setattr(model, "generate_batch", lambda **_: {"a": SimpleNamespace(generated_tokens=[1, 2, 3])})
    with pytest.raises(PeerFailed, match="3 tokens where 8 were asked for"):
        continuous_generate(model, Load.uniform(2, 3, 4).sample(vocabulary=VOCABULARY, seed=0))


def test_vllm_answers_from_its_own_process_whatever_it_prints(fake_vllm) -> None:
    peer = open_vllm(fake_vllm)
    try:
        workload = Workload(((7, 8), (20,)), (3, 1))
        assert peer.generate(workload) >= 0
        assert "version = 0.26.0" in peer.settings and "max_num_seqs = 8" in peer.settings and "logprobs = 0" in peer.settings
        assert "VLLM_USE_FLASHINFER_SAMPLER = " in peer.settings
    finally:
        peer.close()
    assert "noise where the answers go" in fake_vllm.read_text()
    assert peer.process.poll() is not None


@pytest.mark.parametrize(
    ("how", "message"),
    [
        pytest.param("loading", "vLLM: it has ended: RuntimeError: no kernel image for this GPU", marks=pytest.mark.long),
        ("answering", "vLLM: it has ended: out of memory"),
        pytest.param("short", "vLLM: 2 tokens where 4 were asked for", marks=pytest.mark.long),
    ],
)
def test_what_goes_wrong_with_vllm_is_one_line(fake_vllm, monkeypatch, how, message) -> None:
    monkeypatch.setenv("FAKE_VLLM_FAILS", how)
    with pytest.raises(PeerFailed) as failed:
        peer = open_vllm(fake_vllm)
        try:
            peer.generate(Workload(((7, 8), (20,)), (3, 1)))
        finally:
            peer.close()
    assert str(failed.value) == message


def test_vllm_that_does_not_answer_is_given_up(fake_vllm, monkeypatch) -> None:
    monkeypatch.setattr(engine_peers, "_START_SECONDS", 0.0)
    with pytest.raises(PeerFailed, match="no answer within 0 s"):
        open_vllm(fake_vllm)


def test_without_vllm_one_line_says_so(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert engine.open_vllm(make_plan("cuda", quick=False), "model", tmp_path) is None
    assert capsys.readouterr().out == "vLLM: not installed here; it is absent from the table\n"


def test_mismatch_is_over_drawn_tokens_and_never_negative(core) -> None:
    rollouts = generate(core, Load.uniform(3, 4, 5).sample(vocabulary=VOCABULARY, seed=0), seed=0).rollouts
    shifted = [rollout.logprobs + np.float32(0.25) for rollout in rollouts]  # on prompt tokens too, which must not count
    found = compare(rollouts, shifted)
    assert found == pytest.approx({MEAN: 0.25, MAX: 0.25, KL: np.exp(0.25) - 1.25}, rel=1e-5)
    assert compare(rollouts, [rollout.logprobs for rollout in rollouts]) == {MEAN: 0.0, MAX: 0.0, KL: 0.0}


def test_engine_and_trainer_agree_and_other_weights_do_not(core, folder, tmp_path) -> None:
    rollouts = generate(core, Load.uniform(4, 6, 8).sample(vocabulary=VOCABULARY, seed=1), seed=1).rollouts
    (again,) = trainer_logprobs(folder, [rollouts], dtype="float32", device="cpu")
    assert 0 < compare(rollouts, again)[MEAN] < 1e-5
    write_random_model(SMALL, tmp_path, dtype="float32", seed=1)
    (other,) = trainer_logprobs(str(tmp_path), [rollouts], dtype="float32", device="cpu")
    assert compare(rollouts, other)[MEAN] > 1e-2


def test_scheduling_is_measured_without_the_model(monkeypatch) -> None:
    """The engine looks once at what its layers leave in the cache; after that no layer is run."""
    runs = []
    layer = "transformers.models.qwen3.modeling_qwen3.Qwen3Attention"
    forward = pydoc.locate(layer).forward
    monkeypatch.setattr(f"{layer}.forward", lambda self, *given, **named: (runs.append(1), forward(self, *given, **named))[1])
    assert 0 < scheduling_cost(requests=8, repetitions=1, slots=8, tokens=2) < 100_000
    once = len(runs)
    assert 0 < scheduling_cost(requests=64, repetitions=1, slots=16, tokens=2) < 10_000
    assert len(runs) == 2 * once


def test_an_engine_that_does_not_start_says_why(tmp_path) -> None:
    with pytest.raises(RuntimeError, match=r"the engine: it has ended: .*the folder does not exist"):
        first_token_seconds(str(tmp_path / "absent"), make_plan("cpu", quick=True))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_load_fits_the_engine_and_every_goal_can_be_read(device) -> None:
    plan = make_plan(device, quick=False)
    loads = [*plan.loads, plan.tail, plan.once]
    most = max(load.prompt_tokens + max(load.lengths) for load in [*loads, plan.group])
    assert most <= plan.context and max(len(load.lengths) for load in loads) <= plan.slots
    goals = {goal for load in loads for goal in load.goals.values()} | {plan.start_goal, plan.logprob_goal} - {""}
    assert len(missed([Row("", float("nan"), "", goal=goal) for goal in goals])) == len(goals) > 1
    assert {name for load in loads for name in load.goals} <= {"", "vLLM", "model.generate", "roofline"}
