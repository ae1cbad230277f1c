"""What the engine promises, kept on every family: however a rollout is computed, its tokens, logprobs and routing are the same.

Ways of computing one: alone, in a crowd, in chunks, after a cached beginning, computed again after its blocks were taken,
beside siblings, as a fork. The slow and obvious way is one packed pass over the whole rollout.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from families import make
from stepping import TOLERANCE, ask, assert_nothing_is_held, assert_same_draws, generate, make_core, prompt_rows, run

from headrace.engine.native.engine import NativeEngine
from headrace.model.attention import EXACT_ROWS, AttentionSpec, PackedContext, attend, causal
from headrace.model.head import Head
from headrace.model.load import ModelError, hidden_states, prepare
from headrace.model.packing import score
from headrace.model.routers import find_readable_routers
from headrace.observe import Timeline
from headrace.records import FinishReason, Rollout, Sampling, unknown_expert
from headrace.sync import Lineage, MemoryTransport, WeightSync

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from headrace.engine.native.core import EngineCore
    from headrace.records import Array

DENSE = ["llama", "qwen3", "gemma3"]
ROUTED = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"]
FAMILIES = DENSE + ROUTED
BLOCK = 8
PROMPT, NEW = 21, 24


def each(families: list[str]) -> pytest.MarkDecorator:
    """`make test` takes one of each kind: plain, sliding, with latent heads and experts, with sinks, sliding and experts."""
    usual = ("llama", "gemma3", "deepseek_v3", "gpt_oss")
    return pytest.mark.parametrize(
        "family", [name if name in usual else pytest.param(name, marks=pytest.mark.long) for name in families]
    )


every_family = each(FAMILIES)


@functools.cache
def shared_model(family: str, *, exact: bool = False) -> PreTrainedModel:
    """For tests that leave the weights as they are."""
    return prepare(make(family), name=family, exact=exact)


def prompt(length: int = PROMPT, *, id: str = "r", seed: int = 0) -> Rollout:
    return Rollout.from_prompt(np.random.default_rng(seed).integers(3, 96, size=length), id=id)


def scores(model: PreTrainedModel, rollout: Rollout, *, exact: bool = False) -> Array:
    """[T] logprobs of one packed pass."""
    return score(model, Head(model, exact=exact), [rollout], budget=4096, exact=exact)[0]


def assert_logprobs_are(rollout: Rollout, expected: Array, *, where: Array | None = None) -> None:
    at = rollout.is_sampled if where is None else where
    assert at.any()
    np.testing.assert_allclose(rollout.logprobs[at], expected[at], atol=TOLERANCE, rtol=TOLERANCE)


def nudge(model: PreTrainedModel, core: EngineCore, *, version: int) -> None:
    """Other weights, from the next step on."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    core.changed_weights(policy="policy", lineage="", version=version)


# Logprobs


@every_family
def test_generated_logprobs_are_those_of_one_packed_pass(family: str) -> None:
    model = shared_model(family)
    core = make_core(model, slots=4)
    ways = [{}, {"temperature": 0.6}, {"top_k": 7}, {"top_p": 0.8, "temperature": 1.3}, {"min_p": 0.05}]
    asked = [
        ask(core, prompt(3 + 6 * index, id=str(index), seed=index), Sampling(max_tokens=NEW, seed=index, **way))
        for index, way in enumerate(ways)
    ]
    run(core)
    for each in asked:
        assert each.done.num_sampled == NEW
        assert_logprobs_are(each.done, scores(model, each.done))
    assert_nothing_is_held(core)


# One seed, many ways


def in_a_crowd(model: PreTrainedModel, exact: bool, sampling: Sampling) -> Rollout:
    core = make_core(model, slots=6, exact=exact, record_routing=True)
    crowd = [prompt(2 + 5 * index, id=f"other {index}", seed=10 + index) for index in range(9)]
    others = [ask(core, each, Sampling(max_tokens=11, seed=index)) for index, each in enumerate(crowd)]
    asked = ask(core, prompt(), sampling)
    assert max(step.decode_rows for step in run(core)) == 6
    assert all(each.is_over for each in others)
    return asked.done


def in_chunks(model: PreTrainedModel, exact: bool, sampling: Sampling) -> Rollout:
    core = make_core(model, max_prompt_tokens=5, exact=exact, record_routing=True)
    asked = ask(core, prompt(), sampling)
    assert [step.prompt_rows for step in run(core)][:5] == [5, 5, 5, 5, 1]
    return asked.done


def after_a_cached_beginning(model: PreTrainedModel, exact: bool, sampling: Sampling) -> Rollout:
    core = make_core(model, exact=exact, record_routing=True)
    generate(core, prompt(id="before"), Sampling(max_tokens=4, seed=99))
    asked = ask(core, prompt(), sampling)
    assert prompt_rows(run(core)) == PROMPT % BLOCK
    return asked.done


def after_its_blocks_were_taken(model: PreTrainedModel, exact: bool, sampling: Sampling) -> Rollout:
    core = make_core(model, num_blocks=10 + 1, exact=exact, record_routing=True)
    first = ask(core, prompt(30, id="first", seed=1), Sampling(max_tokens=30, seed=1))
    core.step()
    asked = ask(core, prompt(), sampling)
    run(core)
    assert core.scheduler.num_retractions > 0 and first.is_over
    assert_nothing_is_held(core)
    return asked.done


def beside_siblings(model: PreTrainedModel, exact: bool, sampling: Sampling) -> Rollout:
    core = make_core(model, exact=exact, record_routing=True)
    group = [ask(core, prompt(id=f"sibling {index}"), Sampling(max_tokens=9, seed=50 + index)) for index in range(3)]
    asked = ask(core, prompt(), sampling)
    assert prompt_rows(run(core)) == PROMPT
    assert len({tuple(each.done.token_ids[:30].tolist()) for each in [*group, asked]}) == 4
    return asked.done


def aborted_and_resumed(model: PreTrainedModel, exact: bool, sampling: Sampling) -> Rollout:
    core = make_core(model, exact=exact, record_routing=True)
    begun = ask(core, prompt(), sampling)
    for _ in range(10):
        core.step()
    core.abort_running()
    assert begun.done.finish_reason is FinishReason.ABORT and begun.done.num_sampled == 10
    return generate(core, begun.done, Sampling(max_tokens=NEW - 10, seed=sampling.seed))


WAYS = [in_a_crowd, in_chunks, after_a_cached_beginning, after_its_blocks_were_taken, beside_siblings, aborted_and_resumed]


@functools.cache
def alone(family: str, *, exact: bool = False) -> Rollout:
    return generate(make_core(shared_model(family, exact=exact), exact=exact), prompt(), Sampling(max_tokens=NEW, seed=5))


@every_family
@pytest.mark.parametrize("way", WAYS)
def test_the_same_seed_draws_the_same_tokens(family: str, way: Callable[..., Rollout]) -> None:
    rollout = way(shared_model(family), False, Sampling(max_tokens=NEW, seed=5))
    assert_same_draws(rollout, alone(family))


@every_family
@pytest.mark.parametrize("way", WAYS)
def test_exact_mode_has_the_bits_of_the_packed_pass(family: str, way: Callable[..., Rollout]) -> None:
    model = shared_model(family, exact=True)
    rollout = way(model, True, Sampling(max_tokens=NEW, seed=5))
    assert rollout.token_ids.tolist() == alone(family, exact=True).token_ids.tolist()
    at = rollout.is_sampled
    assert np.array_equal(rollout.logprobs[at], scores(model, rollout, exact=True)[at])


# Forks

FORKED = Sampling(max_tokens=9, seed=6)
PLACES = [1, 16, 17, 32, 39, PROMPT + NEW]
"""The first token, whole blocks of the prompt and of what was drawn, inside blocks, the last token."""


@every_family
@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_fork_of_a_finished_parent_is_a_fresh_engines(family: str, exact: bool) -> None:
    model = shared_model(family, exact=exact)
    core = make_core(model, exact=exact)
    parent = generate(core, prompt(), Sampling(max_tokens=NEW, seed=5))
    forks = [ask(core, parent.forked(at, id=f"fork {at}"), FORKED) for at in PLACES]
    assert prompt_rows(run(core)) == len(PLACES)
    for each in forks:
        check_fork(each.done, model, exact=exact)
    assert_nothing_is_held(core)


@every_family
@pytest.mark.parametrize("exact", [pytest.param(False, marks=pytest.mark.long), True])
def test_forks_of_a_running_parent_are_a_fresh_engines(family: str, exact: bool) -> None:
    """All begin in one step while the parent goes on, which feels nothing of it."""
    model = shared_model(family, exact=exact)
    core = make_core(model, exact=exact)
    parent = ask(core, prompt(), Sampling(max_tokens=NEW, seed=5))
    for _ in range(15):
        core.step()
    so_far = alone(family, exact=exact).forked(PROMPT + 15, id="so far")
    assert core.scheduler.sampled_tokens(parent.request).token_ids.tolist() == so_far.token_ids[PROMPT:].tolist()
    forks = []
    for at in (1, 16, 17, 24, 32, PROMPT + 15):
        fork = so_far.forked(at, id=f"fork {at}").replace(parent=("r", at))
        forks.append(ask(core, fork, FORKED))
    steps = run(core)
    assert prompt_rows(steps) == 6
    for each in forks:
        check_fork(each.done, model, exact=exact)
    assert_same_draws(parent.done, alone(family, exact=exact))
    assert_nothing_is_held(core)


def check_fork(fork: Rollout, model: PreTrainedModel, *, exact: bool) -> None:
    at = fork.parent[1]
    begun = Rollout.from_prompt(fork.token_ids[:at], id="fresh")
    fresh = generate(make_core(model, exact=exact), begun, FORKED)
    assert fork.token_ids.tolist() == fresh.token_ids.tolist()
    if exact:
        assert np.array_equal(fork.logprobs[at:], fresh.logprobs[at:])
        assert np.array_equal(fork.logprobs[at:], scores(model, fork, exact=True)[at:])
    np.testing.assert_allclose(fork.logprobs[at:], fresh.logprobs[at:], atol=TOLERANCE, rtol=TOLERANCE)


# Weights that change


class KeepingKeys(PackedContext):
    """One pass over a beginning that keeps each layer's keys and values."""

    def __init__(self, length: int) -> None:
        super().__init__([length])
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, module, query, key, value, spec: AttentionSpec) -> torch.Tensor:
        self.kept[module.layer_idx] = (key, value)
        return super().attend(module, query, key, value, spec)


class AfterKeptKeys:
    """A pass over the tokens after a beginning, whose keys and values are those of another pass."""

    def __init__(self, kept: dict[int, tuple[torch.Tensor, torch.Tensor]], positions: torch.Tensor) -> None:
        self._kept, self._positions = kept, positions

    def attend(self, module, query, key, value, spec: AttentionSpec) -> torch.Tensor:
        keys, values = (torch.cat([old, new]) for old, new in zip(self._kept[module.layer_idx], (key, value), strict=True))
        seen = causal(self._positions, torch.arange(len(keys)), window=spec.sliding_window).unsqueeze(0)
        return attend(query.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), spec, allowed=seen)[0]


@torch.no_grad()
def kept_keys(model: PreTrainedModel, token_ids: Array) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    context = KeepingKeys(len(token_ids))
    hidden_states(model, torch.from_numpy(token_ids.astype(np.int64)), torch.arange(len(token_ids)), context)
    return context.kept


@torch.no_grad()
def scores_after(model: PreTrainedModel, kept: dict[int, tuple[torch.Tensor, torch.Tensor]], rollout: Rollout) -> Array:
    """[T] logprobs of the tokens after the kept ones and one more, which is computed; 0 before."""
    start = len(next(iter(kept.values()))[0])
    token_ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
    positions = torch.arange(start, len(token_ids) - 1)
    hidden = hidden_states(model, token_ids[start:-1], positions, AfterKeptKeys(kept, positions))
    logprobs = torch.log_softmax(Head(model).logits(hidden).float(), dim=-1)
    results = np.zeros(len(rollout), dtype=np.float32)
    results[start + 1 :] = logprobs.gather(1, token_ids[start + 1 :].unsqueeze(1)).squeeze(1).numpy()
    return results


@every_family
def test_a_next_turn_goes_on_from_the_keys_of_the_turn_before(family: str) -> None:
    """With the weights that computed them, as if all were computed at once; after a swap over the old keys."""
    model = prepare(make(family), name=family)
    core = make_core(model)
    first = generate(core, prompt(), Sampling(max_tokens=NEW, seed=5))
    asked = ask(core, first.append([7, 8]), Sampling(max_tokens=6, seed=6))
    assert prompt_rows(run(core)) == 1 + 2
    second = asked.done
    assert_logprobs_are(second, scores(model, second), where=second.is_sampled)
    old = kept_keys(model, second.token_ids[:-1])
    nudge(model, core, version=1)
    asked = ask(core, second.append([9]), Sampling(max_tokens=6, seed=7))
    assert prompt_rows(run(core)) == 1 + 1
    third = asked.done
    drawn = np.arange(len(third)) >= len(second) + 1
    assert third.versions[drawn].tolist() == [1] * 6
    assert_logprobs_are(third, scores_after(model, old, third), where=drawn)
    assert_nothing_is_held(core)


@every_family
@pytest.mark.parametrize("at", [24, 27], ids=["whole blocks", "inside a block"])
def test_a_fork_after_a_swap_goes_on_from_the_old_keys_with_the_new_weights(family: str, at: int) -> None:
    """It computes its last token and no other."""
    model = prepare(make(family), name=family)
    core = make_core(model)
    parent = generate(core, prompt(), Sampling(max_tokens=NEW, seed=5))
    old = kept_keys(model, parent.token_ids[: at - 1])
    nudge(model, core, version=1)
    asked = ask(core, parent.forked(at, id="fork"), Sampling(max_tokens=15, seed=6))
    assert prompt_rows(run(core)) == 1
    fork = asked.done
    assert fork.versions[at:].tolist() == [1] * 15
    drawn = np.arange(len(fork)) >= at
    assert_logprobs_are(fork, scores_after(model, old, fork), where=drawn)
    fresh = scores(model, fork)
    assert np.abs(fork.logprobs[drawn] - fresh[drawn]).max() > 1e-3  # or the weights had not changed enough to tell
    core.forget_kept()
    again = ask(core, parent.forked(at, id="again"), Sampling(max_tokens=15, seed=6))
    assert prompt_rows(run(core)) == at
    assert_logprobs_are(again.done, scores(model, again.done), where=drawn)
    assert_nothing_is_held(core)


@every_family
def test_versions_do_not_mix_in_the_prefix_cache(family: str) -> None:
    model = prepare(make(family), name=family)
    core = make_core(model)
    old = generate(core, prompt(id="old"), Sampling(max_tokens=NEW, seed=5))
    running = ask(core, prompt(id="running", seed=1), Sampling(max_tokens=NEW, seed=5))
    for _ in range(3):
        core.step()
    nudge(model, core, version=1)
    run(core)  # what ran across the swap is remembered by nobody
    assert len(set(running.done.versions[PROMPT:].tolist())) == 2
    for begun in (old.token_ids[:PROMPT], old.token_ids, running.done.token_ids):
        asked = ask(core, Rollout.from_prompt(begun, id="new"), Sampling(max_tokens=8, seed=6))
        assert prompt_rows(run(core)) in (len(begun), len(begun) - PROMPT // BLOCK * BLOCK)
        assert_logprobs_are(asked.done, scores(model, asked.done))
    first = ask(core, prompt(id="first", seed=2), Sampling(max_tokens=4))
    assert prompt_rows(run(core)) == PROMPT and first.is_over
    core.changed_weights(policy="policy", lineage="", version=2)
    ask(core, prompt(id="second", seed=2), Sampling(max_tokens=4))
    assert prompt_rows(run(core)) == PROMPT  # the numbers are the same, the version is not
    ask(core, prompt(id="third", seed=2), Sampling(max_tokens=4))
    assert prompt_rows(run(core)) == PROMPT % BLOCK
    assert_nothing_is_held(core)


@every_family
@pytest.mark.parametrize("is_retracted", [False, True], ids=["keep", "retract"])
def test_weights_that_change_under_a_rollout(family: str, is_retracted: bool) -> None:
    """Kept, it goes on over old keys and values; retracted, over those the new weights make of its tokens."""
    model = prepare(make(family), name=family)
    core = make_core(model)
    asked = ask(core, prompt(), Sampling(max_tokens=NEW, seed=5))
    for _ in range(10):
        core.step()
    tokens = np.concatenate([asked.request.rollout.token_ids, core.scheduler.sampled_tokens(asked.request).token_ids])
    length = PROMPT + 10
    assert len(tokens) == length
    old = kept_keys(model, tokens[: length - 1])
    before = scores(model, Rollout.from_prompt(tokens, id="so far"))
    if is_retracted:
        core.retract_running()
    nudge(model, core, version=3)
    rows = prompt_rows(run(core))
    rollout = asked.done
    assert rows == (length if is_retracted else 0)
    assert rollout.token_ids[:length].tolist() == tokens.tolist()
    assert rollout.versions[PROMPT:].tolist() == [0] * 10 + [3] * (NEW - 10)
    np.testing.assert_allclose(rollout.logprobs[PROMPT:length], before[PROMPT:], atol=TOLERANCE, rtol=TOLERANCE)
    fresh, kept = scores(model, rollout), scores_after(model, old, rollout)
    after = np.arange(len(rollout)) >= length
    assert_logprobs_are(rollout, fresh if is_retracted else kept, where=after)
    assert np.abs(fresh[after] - kept[after]).max() > 1e-3
    assert_nothing_is_held(core)


# Experts

every_routed = each(ROUTED)


def routing_of(model: PreTrainedModel, rollout: Rollout) -> Array:
    """[T, layers, top k] of one packed pass over all tokens."""
    routers = find_readable_routers(model)
    assert routers is not None
    length = len(rollout)
    kept = torch.zeros((length, routers.num_layers, routers.top_k), dtype=routers.dtype)
    padding = -length % EXACT_ROWS
    tokens = torch.from_numpy(np.pad(rollout.token_ids, (0, padding)).astype(np.int64))
    positions = torch.cat([torch.arange(length), torch.arange(padding)])
    with torch.no_grad(), routers.recording(lambda layer, indices: kept[:, layer].copy_(indices[:length])):
        hidden_states(model, tokens, positions, PackedContext([length, padding] if padding else [length], exact=True))
    return kept.numpy()


def check_routing(rollout: Rollout, model: PreTrainedModel) -> None:
    """Each token's experts are those of the pass, its last token's are unknown."""
    routing = rollout.expert_routing
    assert routing is not None and len(routing) == len(rollout)
    assert (routing[-1] == unknown_expert(routing.dtype)).all()
    assert np.array_equal(np.sort(routing[:-1]), np.sort(routing_of(model, rollout)[:-1]))


@every_routed
@pytest.mark.parametrize("way", WAYS)
def test_recorded_experts_are_those_of_one_packed_pass(family: str, way: Callable[..., Rollout]) -> None:
    model = shared_model(family, exact=True)
    rollout = way(model, True, Sampling(max_tokens=NEW, seed=5))
    check_routing(rollout, model)
    assert len(np.unique(rollout.expert_routing[:-1])) == 4  # or all of them are one expert, and nothing is tested


@every_routed
def test_every_sibling_and_every_fork_has_its_own_experts(family: str) -> None:
    model = shared_model(family, exact=True)
    core = make_core(model, exact=True, record_routing=True)
    group = [ask(core, prompt(id=f"sibling {index}"), Sampling(max_tokens=9, seed=index)) for index in range(4)]
    run(core)
    parent = group[0].done
    forks = [ask(core, parent.forked(at, id=f"fork {at}"), Sampling(max_tokens=9, seed=7)) for at in (5, 16, 24, 27, 30)]
    assert prompt_rows(run(core)) == len(forks)
    fresh = ask(core, Rollout.from_prompt(parent.token_ids, id="cached"), Sampling(max_tokens=9, seed=7))
    assert prompt_rows(run(core)) < len(parent)
    for each in [*group, *forks, fresh]:
        check_routing(each.done, model)


@every_routed
def test_an_aborted_rollout_knows_the_experts_of_all_but_its_last_token(family: str) -> None:
    model = shared_model(family, exact=True)
    core = make_core(model, max_prompt_tokens=8, exact=True, record_routing=True)
    asked = ask(core, prompt(), Sampling(max_tokens=NEW, seed=5))
    waiting = ask(core, prompt(id="in part", seed=1), Sampling(max_tokens=NEW, seed=5))
    for _ in range(5):
        core.step()
    core.abort_running()
    check_routing(asked.done, model)
    routing = waiting.done.expert_routing
    computed = np.flatnonzero((routing != unknown_expert(routing.dtype)).all(axis=(1, 2)))
    assert 0 < len(computed) < PROMPT and computed.tolist() == list(range(len(computed)))
    assert np.array_equal(np.sort(routing[computed]), np.sort(routing_of(model, waiting.done)[computed]))


@every_routed
async def test_an_engine_scores_with_the_recorded_experts(family: str) -> None:
    core = make_core(shared_model(family, exact=True), exact=True, record_routing=True)
    engine = NativeEngine(core, sync=WeightSync(Lineage("life"), MemoryTransport()), timeline=Timeline("engine"))
    rollout = generate(core, prompt(), Sampling(max_tokens=NEW, seed=5))
    shifted = rollout.expert_routing.copy()
    shifted[:-1] = (shifted[:-1] + 1) % 4
    recorded, moved = await engine.score([rollout, rollout.replace(expert_routing=shifted)])
    assert np.array_equal(recorded[rollout.is_sampled], rollout.logprobs[rollout.is_sampled])
    assert np.abs(moved - recorded)[rollout.is_sampled].mean() > 0.1
    with pytest.raises(ModelError, match="names expert 9"):
        await engine.score([rollout.replace(expert_routing=np.full_like(shifted, 9))])


@each(DENSE)
def test_a_model_without_experts_records_none(family: str) -> None:
    core = make_core(shared_model(family), record_routing=True)
    assert generate(core, prompt(), Sampling(max_tokens=2)).expert_routing is None


@every_routed
def test_experts_are_recorded_only_if_asked_for(family: str) -> None:
    core = make_core(shared_model(family, exact=True), exact=True)
    assert core.cache.routing is None and alone(family, exact=True).expert_routing is None


def test_a_model_whose_routers_cannot_be_read_is_served_without_its_routing(monkeypatch) -> None:
    monkeypatch.setattr("headrace.model.load._ROUTER", re.compile("no such router"))
    core = make_core(prepare(make("qwen3_moe"), name="qwen3_moe"), record_routing=True)
    rollout = generate(core, Rollout.from_prompt([3, 4, 5], id="r"), Sampling(max_tokens=4))
    assert rollout.num_sampled == 4 and rollout.expert_routing is None
