"""What makes each library itself, seen on its preset: how much is in flight, what leaves the buffer, and what an update does to
rollouts in flight. Settings are changed only to reach the behaviour within a few versions."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import threading
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from families import make
from watched import GROUPS, SIBLINGS, TurnsTrainer, Watched, has_resumed, run_preset, simulate, versions_of

from headrace.bench.emulated import emulate
from headrace.bench.emulated_load import Load
from headrace.buffer import GroupBuffer
from headrace.config import make_recipe
from headrace.engine import EnginePool
from headrace.engine.native.core import EngineCore
from headrace.envs import PushedEnvironment
from headrace.model import build_tokenizer
from headrace.run.policy import PolicyState
from headrace.run.state import Run
from headrace.trainer.local import LocalTrainer

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = "0123456789abcdef"
"""Of what pushes to a run."""
AT_AN_UPDATE = {
    "drain": ("trl", "verifiers-rl", "atropos", "oat"),
    "keep": ("trl-async", "open-instruct", "tunix", "skyrl", "nemo-rl", "prime-rl", "torchforge", "openrlhf"),
    "abort": ("verl", "areal", "roll"),
}
"""The other presets have a test of their own for it."""


@pytest.fixture
def retracted(monkeypatch) -> list[int]:
    """How many rollouts were running, each time that the engine dropped its KV cache."""
    retract, counts = EngineCore.retract_running, []
    monkeypatch.setattr(EngineCore, "retract_running", lambda self: (counts.append(self.num_running), retract(self))[1])
    return counts


@pytest.mark.parametrize(("does", "name"), [(does, name) for does, names in AT_AN_UPDATE.items() for name in names])
def test_an_update_drains_keeps_or_aborts_what_is_in_flight(does, name, tmp_path, monkeypatch, retracted):
    """With room for five batches, so that rollouts are in flight at every update."""
    room = {"staleness": {"max_lag": 4}, "buffer": {"kind": "stream", "depth": 0, "order": "completion", "window": 0.0}}
    watched = run_preset(name, tmp_path, monkeypatch, steps=6, **room)
    assert max(watched.lags) >= 4 and bool(watched.spanning) == (does != "drain"), "drained ones have one version"
    assert {has_resumed(rollout) for rollout in watched.spanning} <= {does == "abort"}, "one call, or more after an abort"
    assert not any(retracted)


@pytest.mark.parametrize("name", ["trl-async", "art", "roll", "torchforge"])
def test_groups_are_as_old_as_the_version_they_began_with(name, monkeypatch):
    """Not as their oldest trained token: here only the last of a rollout is trained."""
    watched = simulate(name, monkeypatch, staleness={"max_lag": 1}, last_only=True)
    assert max(watched.lags) == 1 and any(reason.startswith("rejected: lag") for reason in watched.reasons)


def test_trl_trains_on_policy_and_nothing_is_in_flight_meanwhile(tmp_path, monkeypatch):
    step, start, runs, in_flight = LocalTrainer.step, Run.start_leg, [], []

    async def stepping(self, batch, *, learning_rate):
        in_flight.append(len(runs[0].policies["policy"].in_flight))
        return await step(self, batch, learning_rate=learning_rate)

    monkeypatch.setattr(Run, "start_leg", lambda self, tasks: (runs.append(self), start(self, tasks))[1])
    monkeypatch.setattr(LocalTrainer, "step", stepping)
    watched = run_preset("trl", tmp_path, monkeypatch, steps=4)
    assert set(watched.lags) == {0} and in_flight == [0] * 4
    assert watched.counts["trained"] == watched.counts["submitted"]


def test_trl_async_bounds_the_samples_in_flight(monkeypatch):
    watched = simulate("trl-async", monkeypatch)
    assert max(each.unfinished for each in watched.submissions) == 4 * GROUPS * SIBLINGS, "max_staleness × batch samples"


def test_verl_trains_a_mini_batch_when_it_is_there_and_refills_one_for_one(monkeypatch):
    put, step, events = GroupBuffer.put, TurnsTrainer.step, []

    def putting(self, group, **how):
        events.append((f"g{group.number}", None))
        put(self, group, **how)

    async def stepping(self, batch, **how):
        events.append((batch.version, {rollout.group for rollout in batch.rollouts}))
        return await step(self, batch, **how)

    with monkeypatch.context() as patched:
        patched.setattr(GroupBuffer, "put", putting)
        patched.setattr(TurnsTrainer, "step", stepping)
        watched = simulate("verl", patched, staleness={"max_lag": 1})
    assert watched.num_steps == 4 * 30, "four optimizer steps for each weight update"
    num_early = 0
    for version in range(30):
        steps = [at for at, (trained_at, _) in enumerate(events) if trained_at == version]
        complete = [events.index((group, None)) for at in steps for group in events[at][1]]
        assert len(steps) == len(complete) == 4, "one group each"
        assert all(step > group for step, group in zip(steps, complete, strict=True))
        num_early += steps[0] < max(complete)
    assert num_early > 15, "most begin before their last group is complete, some while the trainer is busy"
    assert watched.reasons["rejected: lag"] > 0 and watched.counts["trained"] == 30 * GROUPS * SIBLINGS
    after_drops = [each.ahead for each in watched.submissions if each.dropped]
    assert max(after_drops) == 2 * GROUPS, "a dropped group is replaced, and by one"
    assert watched.num_retried == 0, "with another task"


@pytest.mark.parametrize("name", ["tunix", "pipelinerl"])
def test_gradients_add_up_to_a_step_as_groups_come(name, monkeypatch):
    assert make_recipe({"preset": name, "train.batch": 64}).stream_parts == 4, "where training is not inline"
    watched = simulate(name, monkeypatch, train={"stream_parts": 2})
    assert len(watched.batches) > watched.num_steps == 30, "part after part leaves the buffer, for one optimizer step"
    assert watched.counts["trained"] == 30 * GROUPS * SIBLINGS


def test_art_holds_each_rollout_to_the_version_it_began_with(tmp_path, monkeypatch):
    changed, held = EngineCore.changed_weights, []

    def changing(self, **how):
        changed(self, **how)
        held.append(sum(request.held is not None for request in self.scheduler.running.values()))

    monkeypatch.setattr(EngineCore, "changed_weights", changing)
    watched = run_preset("art", tmp_path, monkeypatch)
    assert 1 <= max(watched.lags) <= 4 and max(held) > 0, "some outlived an update, under a lease"
    assert all(len(versions_of(rollout)) == 1 and len(rollout.calls) == 1 for _, rollout in watched.trained)


def test_art_tunes_how_far_it_runs_ahead_and_resizes_its_queue(monkeypatch):
    submit, seen = PolicyState.submit, set()

    def submitting(policy, task, **options):
        seen.add((policy.gate.depth, policy.buffer.capacity()))
        return submit(policy, task, **options)

    monkeypatch.setattr(PolicyState, "submit", submitting)
    sizes = {
        "engines": 2,
        "slots": 32,
        "groups_per_batch": GROUPS,
        "group_size": SIBLINGS,
        "mean_tokens": 64,
        "max_tokens": 256,
    }
    emulate(
        Load(name="few", sigma=0.5, training=1.05, warm_versions=4, versions=20, last_versions=2, **sizes), {"preset": "art"}
    )
    assert len(seen) > 1 and max(depth for depth, _ in seen) == 4, "up to its max_steps_off_policy"
    assert all(capacity == depth * GROUPS for depth, capacity in seen)


def test_slime_stops_when_a_batch_is_whole_and_recycles_the_partials(tmp_path, monkeypatch):
    watched = run_preset("slime", tmp_path, monkeypatch)
    assert_tis_and_opsm(watched)
    assert max(each.running + each.waiting for each in watched.submissions) == 2 * GROUPS, "twice what a batch needs"
    assert watched.spanning and all(map(has_resumed, watched.spanning)) and not watched.reasons, "no partial is lost"


def assert_tis_and_opsm(watched: Watched) -> None:
    """Both were applied: importance weights, and a mask that left something out."""
    assert any(abs(row["train/correction_tis"] - 1) > 1e-4 for row in watched.metrics)
    assert min(row["train/correction_opsm"] for row in watched.metrics) < 1


def test_slime_leaves_deltas_on_disk(tmp_path, monkeypatch):
    load, updates = EnginePool.load, []
    monkeypatch.setattr(EnginePool, "load", lambda self, update, **how: (updates.append(update), load(self, update, **how))[1])
    run_preset("slime", tmp_path, monkeypatch, orchestrate="local", steps=2)
    assert {part.transport for update in updates for part in update.parts} == {"files"}
    assert [update.base_version for update in updates] == [None, 0, 1], "after the first, only what changed"


def test_miles_retracts_and_counts_samples(tmp_path, monkeypatch, retracted):
    watched = run_preset("miles", tmp_path, monkeypatch)
    assert_tis_and_opsm(watched)
    assert any(retracted) and watched.spanning and not any(map(has_resumed, watched.spanning)), "no call ends"
    watched = simulate("miles", monkeypatch, staleness={"max_lag": 1}, buffer={"depth": 1})
    assert max(each.unfinished for each in watched.submissions) == 2 * GROUPS * SIBLINGS
    assert any(each.running > 2 * GROUPS for each in watched.submissions), "the ended of a group leave their slots to others"
    assert watched.reasons["rejected: lag"] > 0 and watched.num_retried > 0, "what is stale is generated again"


def test_miles_replays_the_routing_that_the_engine_recorded(tmp_path, monkeypatch):
    make("qwen3_moe", vocab_size=len(build_tokenizer()), max_position_embeddings=128).save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    model = {"path": str(tmp_path / "model")}
    watched = run_preset("miles", tmp_path / "run", monkeypatch, steps=2, model=model, engine={"record_routing": True})
    assert all(rollout.expert_routing is not None for _, rollout in watched.trained)
    assert all("train/routing_differs" in row for row in watched.metrics), "the trainer was made to use it"


def test_areal_never_exceeds_its_capacity_under_load(monkeypatch):
    watched, capacities = simulate("areal", monkeypatch), []
    for each in watched.submissions:
        accepted = each.version * GROUPS + each.in_training + each.waiting  # trained, in training, ready
        capacities.append((4 + each.held_version + 1) * GROUPS - accepted - each.running)
    assert min(capacities) == 0, "(η + version + 1)·B − accepted − running is used up, and never exceeded"
    assert not watched.reasons


def test_verifiers_rl_trains_one_batch_behind_in_order(tmp_path, monkeypatch):
    watched = run_preset("verifiers-rl", tmp_path, monkeypatch, steps=5)
    assert watched.batches == [list(range(GROUPS * step, GROUPS * (step + 1))) for step in range(5)]
    assert max(watched.lags) == 1 and not watched.reasons


def test_open_instruct_tops_up_after_filtering(monkeypatch):
    def reward(prompt: str, completion: str, **_: Any) -> float:
        return 0.0 if int(prompt[-1]) % 2 else 1.0 / (1 + len(completion))  # every second task is tied

    watched, rewards = simulate("open-instruct", monkeypatch, reward=reward), {}
    assert watched.counts["filtered"] > 0 and watched.counts["trained"] == 30 * GROUPS * SIBLINGS, "every batch is whole"
    for _, rollout in watched.trained:
        rewards.setdefault(rollout.group, set()).add(rollout.reward)
    assert all(len(each) > 1 for each in rewards.values()), "and no group of it is tied"
    assert max(each.ahead for each in watched.submissions) == 9 * GROUPS


def test_roll_submits_a_fraction_of_a_batch_ahead_and_aborts_what_expires(monkeypatch):
    watched = simulate("roll", monkeypatch)
    assert max(each.ahead for each in watched.submissions) == 2.5 * GROUPS, "(1 + α)·B with α = 1.5"
    assert max(watched.lags) == 2, "⌈α⌉"
    assert watched.reasons["rejected: lag, cancelled in flight"] > 0


def test_tunix_rewinds_what_was_not_acknowledged(tmp_path, monkeypatch):
    """A step fails: its groups go back, and are the next batch, in the same order."""
    loss = tmp_path / "loss.py"
    loss.write_text(
        "calls = []\n"
        "def fails(tokens):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 4:\n"
        "        raise RuntimeError('out of luck')\n"
        "    return -tokens.ratio() * tokens.advantages, {}\n"
    )
    watched, changes = Watched(), {"train": {"loss": f"{loss}:fails"}, "steps": 6}
    with pytest.raises(RuntimeError, match="out of luck"):
        run_preset("tunix", tmp_path / "run", monkeypatch, watched=watched, **changes)
    run_preset("tunix", tmp_path / "run", monkeypatch, watched=watched, **changes)
    taken = watched.batches
    assert taken[3] == taken[4], "taken, not acknowledged, taken again"
    acknowledged = list(itertools.chain.from_iterable(taken[:3] + taken[4:]))
    assert len(acknowledged) == len(set(acknowledged)) == 6 * GROUPS and not watched.reasons


def test_skyrl_never_drops(monkeypatch):
    watched = simulate("skyrl", monkeypatch)
    assert max(each.ahead for each in watched.submissions) == 5 * GROUPS, "the capacity of max_staleness + 1 mini-batches"
    assert not watched.reasons and max(watched.lags) > 4, "what is overtaken is trained all the same"
    assert watched.counts["submitted"] == watched.counts["trained"] + watched.counts["in_flight"] + watched.counts["buffered"]


def test_nemo_rl_reserves_a_place_when_it_submits_and_commits_in_order(monkeypatch):
    watched = simulate("nemo-rl", monkeypatch, staleness={"max_lag": 4})  # the gate alone would let five batches in
    assert max(each.waiting + each.running for each in watched.submissions) == 2 * GROUPS, "reserved and committed places"
    taken = list(itertools.chain.from_iterable(watched.batches))
    assert taken == sorted(taken)


def test_prime_rl_cancels_over_age_groups_while_they_run(tmp_path, monkeypatch):
    watched = run_preset("prime-rl", tmp_path, monkeypatch, staleness={"max_lag": 1})
    assert watched.reasons["rejected: lag, cancelled in flight"] > 0 and max(watched.lags) <= 1


def test_prime_rl_masks_tokens_by_its_own_loss(tmp_path, monkeypatch):
    moving = {"learning_rate": 0.03, "constants": {"mask": 0.01}}
    watched = run_preset("prime-rl", tmp_path, monkeypatch, steps=6, train=moving)
    assert max(row["train/masked"] for row in watched.metrics) > 0, "those that have moved too far the way they are pushed"
    assert all(row["train/correction"] == 1 and "train/clipped" not in row for row in watched.metrics), "no other correction"


def push_groups(environment: PushedEnvironment, prompt: list[int], pushed: list[list[int]], is_over: threading.Event) -> None:
    """An environment of its own: it samples, scores and pushes groups until the run is over."""

    def call(path: str, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{environment.url}{path}", data=json.dumps(body).encode(), headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    while not is_over.is_set():
        with contextlib.suppress(OSError):  # no place is open yet, or the run is over
            sampled = call("/generate", {"prompt": {"prompt_token_ids": prompt}, "logprobs": 0, "n": SIBLINGS})["token_ids"]
            tokens = [[*prompt, *new] for new in sampled]
            masks = [[-100] * len(prompt) + new for new in sampled]
            call("/scored_data", {"tokens": tokens, "masks": masks, "scores": [0.25, 0.75]})
            pushed += tokens


def test_atropos_trains_groups_that_environments_push(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_PUSH_TOKENS", TOKEN)
    environment, pushed, is_over = PushedEnvironment(port=0, wait=0.2), list[list[int]](), threading.Event()
    pushing = [
        threading.Thread(target=push_groups, args=(environment, [5, 6 + number], pushed, is_over), daemon=True)
        for number in range(4)
    ]
    for thread in pushing:
        thread.start()
    try:
        how = {"tasks": "pushed:groups", "environment": environment, "reward": None}
        watched = run_preset("atropos", tmp_path, monkeypatch, **how, steps=4, sampling={"max_tokens": 16})
    finally:
        is_over.set()
    assert watched.counts["trained"] == 4 * GROUPS * SIBLINGS and not watched.reasons
    assert {rollout.reward for _, rollout in watched.trained} == {0.25, 0.75}, "as the environment scored them"
    for thread in pushing:
        thread.join(60)
    assert all(rollout.token_ids.tolist() in pushed for _, rollout in watched.trained), "what was pushed is what is trained"


def test_atropos_takes_no_more_groups_above_its_ceiling(monkeypatch):
    watched = simulate("atropos", monkeypatch, staleness={"max_lag": 8})  # the gate alone would let nine batches in
    assert GROUPS <= max(each.waiting for each in watched.submissions) < 2 * GROUPS, "no place is opened above two batches"


@contextlib.contextmanager
def oracle() -> Iterator[tuple[str, list[str]]]:
    """(the URL of an OpenAI-compatible server that scores completions, what it was asked)"""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body["messages"][-1]["content"])
            reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": str(len(asked[-1]) % 10)}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked
    finally:
        server.shutdown()
        server.server_close()


def test_oat_asks_a_reward_oracle_that_is_a_service(tmp_path, monkeypatch):
    with oracle() as (url, asked):
        options = {"url": url, "model": "oracle", "template": "{completion}", "highest": 10}
        reward = {"functions": "headrace.score:judge", "options": {"judge": options}}
        watched = run_preset("oat", tmp_path, monkeypatch, reward=reward, steps=4)
    assert len(asked) >= watched.counts["trained"] == 4 * GROUPS * SIBLINGS
    assert len({rollout.reward for _, rollout in watched.trained}) > 1, "what it answers is the reward"
    assert max(watched.lags) == 1, "one batch ahead"


def test_torchforge_lets_groups_leave_only_from_the_window(monkeypatch):
    watched = simulate("torchforge", monkeypatch, staleness={"reject": "never"})
    window, left, overtaken = max(1, round(0.3 * 2 * GROUPS)), set[int](), 0
    for number in itertools.chain.from_iterable(watched.batches):
        older = number - sum(other < number for other in left)
        assert older < window, "among the W oldest that were submitted and not trained"
        overtaken += older > 0
        left.add(number)
    assert overtaken and max(watched.lags) <= 1 + -(-(window - 1) // GROUPS), "S + ⌈(W − 1)/P⌉"


def test_pipelinerl_changes_versions_inside_a_rollout_without_a_pause(tmp_path, monkeypatch):
    changed, step, swaps = EngineCore.changed_weights, EngineCore.step, []

    def stepping(self):
        done = step(self)
        if swaps and swaps[-1][1] is None:
            swaps[-1][1] = done.decode_rows
        return done

    def changing(self, **how):
        changed(self, **how)
        swaps.append([len(self.scheduler.running), None])

    monkeypatch.setattr(EngineCore, "step", stepping)
    monkeypatch.setattr(EngineCore, "changed_weights", changing)
    watched = run_preset("pipelinerl", tmp_path, monkeypatch)
    under_way = [(running, decoded) for running, decoded in swaps if running and decoded is not None]
    assert len(under_way) >= 7 and all(decoded >= running for running, decoded in under_way), "each goes on in the next step"
    assert max(len(versions_of(rollout)) for rollout in watched.spanning) > 2
    assert all(len(rollout.calls) == 1 for rollout in watched.spanning), "one call, one KV cache, several versions"


def test_pipelinerl_never_stops_generating_for_a_slow_trainer(monkeypatch):
    watched = simulate("pipelinerl", monkeypatch, step_turns=60, steps=10, staleness={"max_lag": 2})
    assert watched.reasons.keys() == {"rejected: overwritten"}, "the oldest make room for the newest"
    assert max(each.waiting for each in watched.submissions) == 2 * GROUPS
    assert max(each.ahead for each in watched.submissions) > 5 * GROUPS, "a gate would let three batches in"


def test_openrlhf_keeps_a_queue_of_one_batch_and_drops_nothing(monkeypatch):
    watched = simulate("openrlhf", monkeypatch)
    assert max(each.ahead for each in watched.submissions) == 2 * GROUPS, "the batch being trained and one in the queue"
    watched = simulate("openrlhf", monkeypatch, staleness={"max_lag": 4})  # the gate alone would let five batches in
    assert max(each.waiting for each in watched.submissions) < GROUPS, "nothing is submitted while a batch waits"
    assert not watched.reasons
