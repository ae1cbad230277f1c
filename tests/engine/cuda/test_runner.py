"""The engine with its kernels against the engine without: the same requests, step by step a step behind."""

from __future__ import annotations

import functools
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_device import DEVICE
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from headrace.engine.native.core import EngineCore
from headrace.engine.native.cuda import attention, buckets, compiled, runner
from headrace.engine.native.cuda.runner import CudaRunner
from headrace.engine.native.engine import NativeEngine
from headrace.engine.native.step import Chunk
from headrace.engine.protocol import NotFinite
from headrace.engine.request import Request
from headrace.engine.shaping import Shaping
from headrace.model.load import prepare
from headrace.observe import Timeline
from headrace.partial import Interrupt
from headrace.records import SAMPLED_ENTROPY, FinishReason, Rollout, Sampling
from headrace.sync import Lineage, MemoryTransport, WeightSync

BLOCK = 4
VOCABULARY = 40


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds for a program: small buckets, and keys are not split."""
    monkeypatch.setattr(attention, "_MAX_SPLITS", 1)
    monkeypatch.setattr(runner, "CudaRunner", functools.partial(CudaRunner, prompt_buckets=(4, 8)))


def make_model(*, layers: int = 2) -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    return prepare(Qwen3ForCausalLM(config).float().eval().to(DEVICE), name="small")


def text_of(token_ids: list[int]) -> str:
    return "".join(chr(ord("A") + token) for token in token_ids)


def make_core(*, kernels: bool, slots: int = 3, num_blocks: int = 0, record_entropy: bool = False) -> EngineCore:
    return EngineCore(
        make_model(),
        name="e",
        slots=slots,
        context=24,
        block_size=BLOCK,
        num_blocks=num_blocks,
        decode=text_of,
        kernels=kernels,
        graphs=False,
        record_entropy=record_entropy,
    )


def prompt(length: int, *, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, size=length).tolist()


def request(core: EngineCore, done: dict[str, Rollout], name: str, ids: list[int], **sampling: object) -> Request:
    """Submitted; `done` has it when it has ended."""
    given = Request(
        Rollout.from_prompt(ids, id=name), Sampling(**sampling), on_done=lambda each: done.__setitem__(each.id, each)
    )
    core.submit(given)
    return given


def finish(core: EngineCore) -> None:
    for _ in range(1000):
        if not core.has_work:
            return
        core.step()
    raise AssertionError("it does not end")


def alone(ids: list[int], **sampling: object) -> Rollout:
    """What the plain engine makes of one request."""
    done: dict[str, Rollout] = {}
    core = make_core(kernels=False, slots=1)
    request(core, done, "alone", ids, **sampling)
    finish(core)
    return done["alone"]


def assert_same(left: Rollout, right: Rollout) -> None:
    assert left.token_ids.tolist() == right.token_ids.tolist()
    np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-5, rtol=0)
    assert left.versions.tolist() == right.versions.tolist()
    assert left.finish_reason == right.finish_reason
    assert (left.sampling_mask is None) == (right.sampling_mask is None)
    if left.sampling_mask is not None and right.sampling_mask is not None:
        assert left.sampling_mask.ids.tolist() == right.sampling_mask.ids.tolist()
        assert left.sampling_mask.offsets.tolist() == right.sampling_mask.offsets.tolist()


KINDS = {
    "whole": ({}, {"temperature": 0.0}, {"temperature": 0.6}),
    "cut": ({"top_k": 5}, {"temperature": 0.0, "min_tokens": 3}, {"top_p": 0.8, "min_p": 0.05, "min_tokens": 2}, {}),
}
"""How the requests of one batch are drawn, in turn."""


@pytest.mark.parametrize("kind", [pytest.param("whole", marks=pytest.mark.long), "cut"])
def test_the_kernels_draw_what_the_plain_engine_draws(kind: str) -> None:
    """Siblings, prompts longer than a step, fewer slots than requests, and too few blocks for all that run."""
    results = []
    for core in (make_core(kernels=False, slots=8), make_core(kernels=True, num_blocks=7)):
        assert core.runner.ahead == (1 if isinstance(core.runner, CudaRunner) else 0)
        done: dict[str, Rollout] = {}
        for index, length in enumerate([1, 1, 10, 10, 7, 5]):
            sampling = {"max_tokens": 6, "seed": index, "stop_ids": (5, 6, 7, 8, 9), **KINDS[kind][index % len(KINDS[kind])]}
            request(core, done, str(index), prompt(length, seed=length), **sampling)
        finish(core)
        assert len(done) == 6
        results.append(done)
    assert core.scheduler.num_retractions > 0
    assert core.num_free_blocks == 6 and core.num_running == core.num_waiting == 0
    plain, with_kernels = results
    for name, rollout in plain.items():
        assert_same(with_kernels[name], rollout)
    assert {rollout.finish_reason for rollout in plain.values()} == {FinishReason.STOP, FinishReason.LENGTH}


def test_more_siblings_than_a_step_may_draw_for() -> None:
    core, done = make_core(kernels=True, slots=10), {}
    assert core.runner.max_sampled < 10
    for member in range(10):
        request(core, done, str(member), prompt(6), max_tokens=2, seed=member)
    finish(core)
    for member in range(10):
        assert_same(done[str(member)], alone(prompt(6), max_tokens=2, seed=member))


def test_more_stop_tokens_than_there_was_room_for() -> None:
    ids = prompt(5)
    first = alone(ids, max_tokens=8, seed=3)
    last = int(first.token_ids[-1])
    at = first.token_ids.tolist().index(last, len(ids))
    others = tuple(token for token in range(VOCABULARY) if token not in first.token_ids[len(ids) : at + 1])[:20]
    assert len(others) == 20
    core, done = make_core(kernels=True, slots=2), {}
    request(core, done, "few", ids, max_tokens=8, seed=3)
    core.step()
    request(core, done, "many", ids, max_tokens=8, seed=3, stop_ids=(*others, last))
    finish(core)
    assert_same(done["few"], first)
    assert done["many"].token_ids.tolist() == first.token_ids[: at + 1].tolist()
    assert done["many"].finish_reason is FinishReason.STOP


class TwoThenOne:
    """Stands for a grammar: an even token twice, then an odd one, and so on; it can be copied, as llguidance's can."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def deep_copy(self) -> TwoThenOne:
        return TwoThenOne()

    def consume_tokens(self, token_ids: list[int]) -> bool:
        self.read += token_ids
        return True

    def compute_bitmask(self) -> bytes:
        is_even = len(self.read) % 3 < 2
        return np.packbits([(token % 2 == 0) == is_even for token in range(VOCABULARY)], bitorder="little").tobytes()

    def is_error(self) -> bool:
        return False


def test_shaped_requests_run_beside_the_kernels() -> None:
    """Siblings of which one is not shaped, a prompt longer than a step, too few blocks for all: each as in the plain engine,
    with the same entropies."""
    shaping = Shaping(grammar=TwoThenOne(), repetition_penalty=1.5, presence_penalty=0.5, top_logprobs=3)
    results, tops = [], []
    sizes = {False: {"slots": 8}, True: {"slots": 4, "num_blocks": 7}}
    for core in (make_core(kernels=kernels, record_entropy=True, **given) for kernels, given in sizes.items()):
        done, told = {}, []
        for index, length in enumerate([5, 5, 5, 10]):
            given = request(core, done, str(index), prompt(length, seed=length), max_tokens=4 if index == 0 else 9, seed=index)
            if index > 0:
                given.shaping = shaping
                given.on_tokens = lambda part, told=told, index=index: told.append((index, part.top_logprobs))
        finish(core)
        assert len(done) == 4 and not core._slots.shapers and core.num_free_blocks == core.cache.num_blocks - 1
        results.append(done)
        tops.append(sorted(told, key=lambda each: each[0]))
    assert core.scheduler.num_retractions > 0
    for name, rollout in results[0].items():
        assert_same(results[1][name], rollout)
        entropies, same = (each.columns[SAMPLED_ENTROPY] for each in (rollout, results[1][name]))
        np.testing.assert_allclose(same, entropies, atol=1e-5)
        assert entropies[rollout.is_sampled].all()
        assert name == "0" or [token % 2 for token in rollout.token_ids[-9:].tolist()] == [0, 0, 1] * 3
    for (index, top), (same_index, same_top) in zip(*tops, strict=True):
        assert index == same_index and len(top[0]) == 3
        np.testing.assert_allclose(same_top, top, atol=1e-5)


@pytest.mark.long
def test_most_or_all_requests_may_be_shaped() -> None:
    """All get a block at once, which is more than the one row that the kernels compute has room for."""
    core, done = make_core(kernels=True, slots=8), {}
    for index in range(9):
        given = request(core, done, str(index), prompt(4), max_tokens=4 if index == 0 else 5, seed=index)
        given.shaping = Shaping(grammar=TwoThenOne()) if index else None
    finish(core)
    assert all([token % 2 for token in done[name].token_ids[-5:].tolist()] == [0, 0, 1, 0, 0] for name in "12345678")
    assert_same(done["0"], alone(prompt(4), max_tokens=4))


# A step is under way


@pytest.mark.parametrize("steps", [1, 3])
def test_what_is_cancelled_while_a_step_is_under_way_reaches_nobody(steps: int) -> None:
    core, done = make_core(kernels=True, slots=1), {}
    first = request(core, done, "first", prompt(3), max_tokens=12, seed=1)
    told: list[int] = []
    first.on_tokens = lambda increment: told.extend(increment.token_ids)
    for _ in range(steps):
        core.step()
    assert len(told) == steps - 1  # one draw is not known yet
    core.cancel(first)
    request(core, done, "second", prompt(5, seed=1), max_tokens=6, seed=2)
    finish(core)
    assert list(done) == ["second"] and len(told) == steps - 1
    assert_same(done["second"], alone(prompt(5, seed=1), max_tokens=6, seed=2))
    assert core.num_free_blocks == core.cache.num_blocks - 1


def test_a_stop_string_ends_a_rollout_of_which_more_was_drawn() -> None:
    ids, other = prompt(3), prompt(9, seed=1)
    whole = alone(ids, max_tokens=10, seed=1)
    stop = text_of(whole.token_ids[len(ids) + 2 : len(ids) + 4].tolist())
    expected = alone(ids, max_tokens=10, seed=1, stop=(stop,))
    assert len(ids) < len(expected) < len(whole) and expected.finish_reason is FinishReason.STOP
    core, done = make_core(kernels=True, slots=1), {}
    request(core, done, "stopped", ids, max_tokens=10, seed=1, stop=(stop,))
    request(core, done, "next", other, max_tokens=6, seed=2)
    finish(core)
    assert_same(done["stopped"], expected)
    assert_same(done["next"], alone(other, max_tokens=6, seed=2))


def test_a_token_has_the_version_of_the_weights_that_drew_it() -> None:
    """Weights change while a step is under way: what it draws is still the old weights'."""
    results = []
    for kernels in (False, True):
        core, done = make_core(kernels=kernels, slots=2), {}
        request(core, done, "long", prompt(6), max_tokens=7, seed=1)
        core.step()
        request(core, done, "short", prompt(4, seed=1), max_tokens=7, seed=2)
        core.step()
        weights = core.model.get_output_embeddings().weight
        core.exchange_weights(SimpleNamespace(exchange=lambda weights=weights, **_: weights.data.mul_(-1.0)))
        core.changed_weights(policy="policy", lineage="l", version=3)
        finish(core)
        results.append(done)
    for name, drawn_before in (("long", 2), ("short", 1)):
        plain, with_kernels = (done[name] for done in results)
        assert_same(with_kernels, plain)
        assert with_kernels.versions[-7:].tolist() == [0] * drawn_before + [3] * (7 - drawn_before)


ACTIONS = {
    "score": lambda engine: engine._score([Rollout.from_prompt(prompt(3), id="scored")]),
    "retract": lambda engine: engine._interrupt(Interrupt.RETRACT),
    "sleep": lambda engine: engine._sleep(weights=False),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_what_ends_between_two_steps_is_told_though_none_follows(name: str) -> None:
    """Whoever settles what is under way may end the last rollout there is: its end must not wait for the next step."""
    core = make_core(kernels=True)
    engine = NativeEngine(core, sync=WeightSync(Lineage("life"), MemoryTransport()), timeline=Timeline("engine"))
    done: dict[str, Rollout] = {}
    is_told = threading.Event()
    posted: list[str] = []

    def after_step() -> None:
        if done:
            is_told.set()
        elif core.num_running and not posted:
            posted.append(name)
            engine.post(lambda: ACTIONS[name](engine))

    engine.after_step = after_step
    engine.post(lambda: request(core, done, "last", prompt(3), max_tokens=1))
    engine.start()
    was_told = is_told.wait(timeout=20)
    engine.close()
    assert not engine.died.done() and posted == [name]
    assert was_told and done["last"].num_sampled == 1


def test_blocks_given_to_a_slot_do_not_reach_its_next_rollout() -> None:
    core, done = make_core(kernels=True, slots=1), {}
    given = request(core, done, "first", prompt(3), max_tokens=9, seed=1)
    core.step()
    slot = given.slot
    core.runner.add_block(slot, 5, 9)  # as for a rollout that grows and is retracted before the next launch
    core.scheduler.retract(given)
    core.step()
    core.step()  # blocks are given out with the first decode step
    assert given.slot == slot
    table = core.runner._state.table.cpu().numpy()
    assert table[slot, : len(given.blocks)].tolist() == given.blocks and table[slot, 5] == 0
    finish(core)
    assert_same(done["first"], alone(prompt(3), max_tokens=9, seed=1))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 3}], ids=["random", "greedy", "cut"])
def test_a_model_that_is_not_finite_fails_its_requests_and_keeps_no_blocks(sampling: dict[str, float], kernels: bool) -> None:
    core, done, failed = make_core(kernels=kernels, slots=2), {}, []
    for seed in range(3):
        request(core, done, str(seed), prompt(3, seed=seed), max_tokens=5, seed=seed, **sampling).on_failed = failed.append
    core.step()
    core.model.get_output_embeddings().weight.data[7] = float("nan")
    finish(core)
    assert not done and [type(error) for error in failed] == [NotFinite] * 3
    assert core.num_free_blocks == core.cache.num_blocks - 1


# Buckets


def test_what_is_only_tried_changes_nothing_that_is_read() -> None:
    """Before a step is captured it is tried out, by a thread beside the one that decodes."""
    core, done = make_core(kernels=True, slots=2), {}
    request(core, done, "cut", prompt(3), max_tokens=4, seed=1, top_k=3)
    for _ in range(2):
        core.step()
    used = core.runner.buckets.all()
    assert len(used) == 2
    read = [core.runner.buckets._allowed, *(bucket.out for bucket in used), *(bucket.control for bucket in used)]
    read += [getattr(core.runner._state, name) for name in ("tokens", "lengths", "alive", "table")]
    before = [tensor.clone() for tensor in read]
    cached = core.cache.keys[0][BLOCK:].clone()
    for bucket in used:
        with torch.no_grad():
            bucket.make_scratch().run(core.model, True)
    for now, then in zip(read, before, strict=True):
        assert torch.equal(now, then)
    assert torch.equal(core.cache.keys[0][BLOCK:], cached)
    finish(core)
    assert_same(done["cut"], alone(prompt(3), max_tokens=4, seed=1, top_k=3))


class SlowCaptures:
    """Stands for the capture of graphs: each waits until the test lets it end."""

    def __init__(self, core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.num_started = 0
        self.seen: list[int] = []
        self._core = core
        for name in ("set_device", "graph_pool_handle", "Stream"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(compiled, "compile_layers", lambda model: None)
        monkeypatch.setattr(core.runner.graphs, "_capture", self.capture)

    def capture(self, bucket: object, *streams: object, is_restricted: bool) -> None:
        self.num_started += 1
        self.began.release()
        assert self.may_end.acquire(timeout=30)
        self.seen.append(self.cache_bytes)

    @property
    def cache_bytes(self) -> int:
        return self._core.cache.memory.tensor.untyped_storage().nbytes()


@pytest.mark.skipif(DEVICE != "cpu", reason="looks at the memory of a CPU")
def test_no_memory_is_given_back_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried for a capture reads weights and cache: sleep waits for it, and the next capture waits for wake."""
    core = make_core(kernels=True)
    captures, whole = SlowCaptures(core, monkeypatch), core.cache.num_bytes
    core.runner.graphs.start()
    assert captures.began.acquire(timeout=30)
    sleeping = threading.Thread(target=lambda: core.sleep(weights=False))
    sleeping.start()
    sleeping.join(timeout=0.2)
    assert sleeping.is_alive() and captures.cache_bytes == whole
    captures.may_end.release(100)
    sleeping.join(timeout=30)
    assert not sleeping.is_alive() and captures.cache_bytes == 0
    assert not captures.began.acquire(timeout=0.2), "a graph is captured while the engine sleeps"
    core.wake()
    core.wait_warm()
    assert captures.num_started > 1 and captures.seen == [whole] * captures.num_started


@pytest.mark.skipif(DEVICE != "cpu", reason="looks at the memory of a CPU")
def test_an_engine_that_sleeps_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(kernels=True)
    captures = SlowCaptures(core, monkeypatch)
    core.sleep(weights=False)
    core.runner.graphs.start()
    closing = threading.Thread(target=core.close, daemon=True)
    closing.start()
    closing.join(timeout=10)
    assert not closing.is_alive() and captures.num_started == 0


def test_chunks_that_go_together_fit_the_largest_bucket() -> None:
    generator = np.random.default_rng(0)
    for tokens in (64, 256):
        shape = buckets.PromptShape(tokens)
        for _ in range(50):
            sizes = generator.integers(1, [3, 200][int(generator.integers(2))], size=int(generator.integers(1, 150)))
            chunks = [Chunk(slot, 5, 5 + min(int(size), tokens), [slot]) for slot, size in enumerate(sizes)]
            batches = buckets.split_chunks(chunks, shape)
            assert [chunk for batch in batches for chunk in batch] == chunks
            for batch in batches:
                assert 0 < sum(map(len, batch)) <= shape.tokens
                assert sum(len(chunk.sampling_slots) for chunk in batch) <= shape.sampled
                assert len(buckets.tiles_of(batch)) <= shape.tiles


@pytest.mark.parametrize("slots", [1, 4, 5, 100, 1024, 3000])
def test_every_number_of_rows_has_a_bucket_that_is_not_much_larger(slots: int) -> None:
    sizes = buckets.decode_buckets(slots)
    assert sizes[-1] == slots and sizes == sorted(set(sizes))
    for rows in range(4, slots + 1):
        assert next(size for size in sizes if size >= rows) < 2 * rows + 1
