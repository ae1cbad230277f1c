"""Environments that push scored groups over HTTP, as Atropos's do, into real runs and into places without one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

import numpy as np
import pytest
from agent_bench import END, Answering, client_of
from helpers import books_close, small_run

from headrace.envs import PushedEnvironment, make_environment, push_server, run_episode
from headrace.envs.scored_groups import SampledSequences
from headrace.envs.settings import EnvironmentSettings
from headrace.records import Episode, InfraAbort, Rollout
from headrace.settings import ConfigError
from headrace.user_code import then_end_tasks

OURS, THEIRS = "ours-0123456789abcdef", "theirs-0123456789abcdef"
SIZE = 2


@pytest.fixture(autouse=True)
def tokens(monkeypatch):
    monkeypatch.setenv("HEADRACE_PUSH_TOKENS", f"{OURS} {THEIRS}")


def call(url: str, path: str, body: Any = None, *, token: str = OURS, **headers: str) -> tuple[int, Any]:
    """(status, answer) of a request by the standard library."""
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", **headers}
    request = urllib.request.Request(f"{url}{path}", data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def sample(url: str, prompt: list[int], n: int = SIZE, *, token: str = OURS) -> list[list[int]]:
    """Whole sequences."""
    status, answer = call(url, "/generate", {"prompt": {"prompt_token_ids": prompt}, "logprobs": 0, "n": n}, token=token)
    assert status == 200, answer
    for new, logprobs in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert [[str(id)] for id in new] == [list(each[0]) for each in logprobs]
    return [[*prompt, *new] for new in answer["token_ids"]]


def scored(sequences: list[list[int]], prompt: list[int], scores: list[float] | None = None, **more: Any) -> dict[str, Any]:
    masks = [[-100] * len(prompt) + ids[len(prompt) :] for ids in sequences]
    return {"tokens": sequences, "masks": masks, "scores": scores or [float(n) for n in range(len(sequences))], **more}


class Places:
    """Open places of groups, without a run: the server in a thread, episodes as they end."""

    def __init__(self, groups: int = 1, **options: Any) -> None:
        self.environment = PushedEnvironment(**{"port": 0, "wait": 0.2, **options})
        self.url, self.groups, self.ended = self.environment.url, groups, dict[str, Episode]()
        self.engine = Answering(lambda text: f"{len(text)} it is{END}")
        self.loop, self._is_ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(then_end_tasks(self._main()),))

    def __enter__(self) -> Places:
        self._thread.start()
        assert self._is_ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    async def _main(self) -> None:
        self._over = asyncio.Event()
        waiting = [self.loop.create_task(self._episode(f"g{group}", at)) for group in range(self.groups) for at in range(SIZE)]
        await asyncio.sleep(0.05)
        self._is_ready.set()
        await self._over.wait()
        for task in waiting:
            task.cancel()

    async def _episode(self, group: str, index: int) -> None:
        client = client_of(self.engine, f"{group}/{index}", group_size=SIZE)
        client.index = index
        limits = {"timeout": 0.1, "deadline": 0.4}
        self.ended[client.episode] = await run_episode(self.environment, {"prompt": "pushed"}, client, **limits)

    def wait(self, count: int) -> None:
        until = time.monotonic() + 10
        while len(self.ended) < count and time.monotonic() < until:
            time.sleep(0.01)
        assert len(self.ended) == count


def test_what_is_pushed_is_what_the_engine_sampled() -> None:
    """Over two turns: the second prompt begins with the first answer, which stays sampled."""
    with Places() as places:
        first = sample(places.url, [5, 6, 7])
        turns = [[*ids, 8, 9] for ids in first]
        whole = [sample(places.url, ids, 1)[0] for ids in turns]
        lies = {"inference_logprobs": [[0.5] * len(ids) for ids in whole], "messages": [[], []]}
        group = scored(list(whole), [5, 6, 7], [0.25, 1.0], **lies)
        for mask, ids, turn in zip(group["masks"], first, turns, strict=True):
            mask[len(ids) : len(turn)] = [-100, -100]
        group["masks"][1][3] = -100  # a sampled token that is not to be trained
        group["tokens"][0], group["masks"][0] = [*whole[0], 11], [*group["masks"][0], -100]  # what follows is left out
        assert call(places.url, "/scored_data", group) == (200, {"status": "received"})
        places.wait(2)
    for index, episode in enumerate(places.ended[f"g0/{index}"] for index in range(SIZE)):
        (rollout,) = episode.rollouts
        assert (episode.environment, rollout.id, rollout.group, rollout.index) == ("pushed", f"g0/{index}", "g0", index)
        assert rollout.rewards == {"environment": [0.25, 1.0][index]} and episode.outcome is None
        assert rollout.token_ids.tolist() == whole[index] and len(rollout.calls) == 2
        sampled = rollout.is_sampled
        assert sampled.sum() == len(first[index]) - 3 + len(whole[index]) - len(turns[index])
        assert (rollout.logprobs[sampled] == -1).all() and (rollout.versions[sampled] == 0).all()
        assert np.flatnonzero(sampled & ~rollout.loss_mask).tolist() == ([3] if index else [])


def test_a_place_waits_longer_than_an_episode_may_take_or_idle() -> None:
    with Places() as places:
        time.sleep(0.2)
        first = sample(places.url, [5, 6, 7])
        assert call(places.url, "/scored_data", scored(first, [5, 6, 7]))[0] == 200
        places.wait(SIZE)
    assert all(episode.outcome is None for episode in places.ended.values())


def test_who_has_no_token_is_told_nothing() -> None:
    with Places() as places:
        for path in ("/scored_data", "/generate", "/register-env", "/no-such"):
            assert call(places.url, path, {}, token="wrong")[0] == 401
        assert call(places.url, "/status", token="")[0] == 401
        basic = f"Basic {base64.b64encode(f'me:{OURS}'.encode()).decode()}"
        assert call(places.url, "/health", Authorization=basic)[0] == 200, "as of http://me:TOKEN@HOST"
        assert call(places.url, "/health", Authorization="Basic ?")[0] == 401


def test_one_token_cannot_push_what_another_sampled() -> None:
    with Places() as places:
        group = scored(sample(places.url, [5, 6]), [5, 6])
        status, answer = call(places.url, "/scored_data", group, token=THEIRS)
        assert status == 400 and answer["error"]["code"] == "not_sampled"
        env = {"desired_name": "e", "group_size": SIZE, "weight": 1.0, "max_token_length": 9}
        assert call(places.url, "/register-env", env)[1]["env_id"] == 0
        assert call(places.url, "/scored_data", {**group, "env_id": 0}, token=THEIRS)[0] == 403
        assert call(places.url, "/disconnect-env", {"env_id": 0}, token=THEIRS)[0] == 403
        assert call(places.url, "/status", token=THEIRS)[1]["refused"] == {"not_sampled": 1, "env_id": 1}
        assert call(places.url, "/scored_data", {**group, "env_id": 0})[0] == 200, "nothing was lost by that"
        places.wait(2)


def test_registrations_are_bounded(monkeypatch) -> None:
    """An environment that has left is forgotten first, then the oldest; those of others stay."""
    monkeypatch.setattr(push_server, "_MOST_ENVIRONMENTS", 2)
    env = {"desired_name": "e", "group_size": SIZE, "weight": 1.0}
    with Places() as places:

        def is_known(id: int, token: str = OURS) -> bool:
            return call(places.url, "/disconnect-env", {"env_id": id}, token=token)[0] == 200

        assert call(places.url, "/register-env", env, token=THEIRS)[1]["env_id"] == 0
        assert [call(places.url, "/register-env", env)[1]["env_id"] for _ in range(2)] == [1, 2]
        assert is_known(2)
        assert [call(places.url, "/register-env", env)[1]["env_id"] for _ in range(2)] == [3, 4]
        assert [is_known(id) for id in range(1, 5)] == [False, False, True, True] and is_known(0, THEIRS)
        assert call(places.url, "/register-env", {**env, "desired_name": "e" * 300})[0] == 400
        assert call(places.url, "/register-env", {**env, "weight": 10**400})[0] == 400


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": []}, "tokens: has no sequence"),
        ({"tokens": [[3.5], [1]]}, "tokens[0]: must be a list of whole numbers"),
        ({"tokens": [[2**40], [1]]}, "tokens[0]: holds a number that is no token"),
        ({"masks": [[1]]}, "masks: has 1 entries for 2 sequences"),
        ({"scores": [1.0, "x"]}, "scores[1]: must be a number"),
        ({"scores": [float("nan"), 1.0]}, "scores[0]: nan is not a number"),
        ({"scores": [1.0, float("-inf")]}, "scores[1]: -inf is not a number"),
        ({"scores": [10**400, 1.0]}, "scores[0]: is too large"),
        ({"scores": [1.0, -1e308]}, "scores[1]: must be between -1e+12 and 1e+12"),
        ({"tokens": [[1], [2]], "masks": [[1], [3]]}, "masks[1]: must have the token where it is trained"),
        ({"tokens": [[1], [2]], "masks": [[1], [-100]]}, "masks[1]: trains no token"),
        ({"tokens": [[1], [2]], "masks": [[1], [2]]}, "tokens[0]: no engine of this run sampled"),
        ({"tokens": [[1]], "masks": [[1]], "scores": [1.0]}, "train.group_size is 2"),
        ({"advantages": [[1.0], [2.0]]}, "advantages: is not supported"),
        ({"what": 1}, "what: is not a parameter"),
    ],
)
def test_garbage_is_refused_by_name_and_counted(change: dict[str, Any], says: str) -> None:
    with Places() as places:
        group = scored(sample(places.url, [5, 6]), [5, 6])
        status, answer = call(places.url, "/scored_data", {**group, **change})
        assert status == 400 and says in answer["error"]["message"]
        assert sum(call(places.url, "/status")[1]["refused"].values()) == 1
        assert call(places.url, "/scored_data_list", [group])[0] == 200
        places.wait(2)


def test_bodies_are_bounded_and_must_be_json() -> None:
    with Places(max_mb=1) as places:
        assert call(places.url, "/scored_data", b"nonsense")[0] == 400
        assert call(places.url, "/scored_data", b"{}", **{"Content-Type": "text/plain"})[0] == 415
        bomb = gzip.compress(b" " * (2 << 20))
        assert call(places.url, "/scored_data", bomb, **{"Content-Encoding": "gzip"})[0] == 413
        assert call(places.url, "/generate", {"prompt": {"prompt_token_ids": [10**6]}})[0] == 400
        group = gzip.compress(json.dumps(scored(sample(places.url, [5, 6]), [5, 6])).encode())
        assert call(places.url, "/scored_data", group, **{"Content-Encoding": "gzip"})[0] == 200


def test_a_sequence_is_trained_once_and_a_lost_answer_costs_nothing() -> None:
    with Places(groups=2) as places:
        ids, *others = sample(places.url, [5, 6], 8)
        others = [other for other in others if other == ids]
        assert others, "this engine says the same in a few ways"
        for other in others[1:]:
            places.environment.senders[0].sampled.remove(places.environment.senders[0].sampled.find(other).id)
        twice, again = scored([ids, ids], [5, 6]), scored([ids, ids], [5, 6], [1.0, 0.0])
        assert call(places.url, "/scored_data", twice)[0] == 200, "it was sampled twice"
        assert call(places.url, "/scored_data", twice)[0] == 200, "the same push again"
        status, answer = call(places.url, "/scored_data", again)
        assert status == 400 and "pushed already" in answer["error"]["message"]
        places.wait(2)
        assert call(places.url, "/status")[1]["accepted"] == 1


def test_a_full_run_says_later_and_keeps_what_was_sampled() -> None:
    with Places() as places:
        groups = [scored(sample(places.url, [5, number]), [5, number]) for number in (6, 7)]
        assert call(places.url, "/info")[1]["batch_size"] == SIZE
        assert call(places.url, "/scored_data", groups[0])[0] == 200
        places.wait(2)
        status, answer = call(places.url, "/scored_data", groups[1])
        assert status == 503 and answer["error"]["code"] == "later"
        state = call(places.url, "/status")[1]
        assert (state["open"], state["queue_size"], state["refused"]) == (0, 1, {"later": 1})
        places.loop.call_soon_threadsafe(
            lambda: [places.loop.create_task(places._episode("g9", index)) for index in range(SIZE)]
        )
        assert call(places.url, "/scored_data", groups[1])[0] == 200, "a place has opened"
        places.wait(4)
        assert not any(isinstance(episode.outcome, InfraAbort) for episode in places.ended.values()), "places have no timeout"


def test_the_oldest_samples_are_forgotten() -> None:
    kept = SampledSequences(max_tokens=7)
    rollouts = [Rollout.from_prompt([number, 1, 2], id=str(number)) for number in range(3)]
    kept.add(rollouts)
    assert len(kept) == 2 and kept.find([0, 1, 2]) is None
    assert kept.find([1, 1, 2, 5]) is rollouts[1] and kept.find([1, 1]) is None


def test_mistakes_are_named(monkeypatch) -> None:
    named = EnvironmentSettings(name="headrace.envs:PushedEnvironment", options={"port": 0, "wait": -1})
    with pytest.raises(ConfigError, match=r"environment.options.wait = -1"):
        make_environment(named)
    for given in ("", "short", f"{OURS} {OURS}"):
        monkeypatch.setenv("HEADRACE_PUSH_TOKENS", given)
        with pytest.raises(ConfigError, match="HEADRACE_PUSH_TOKENS: set it to a token of at least 16"):
            PushedEnvironment(port=0)


def test_a_run_trains_on_what_is_pushed(tmp_path) -> None:
    """Two environments push until the run ends: it takes three steps, and every group is accounted for."""
    environment = PushedEnvironment(port=0)
    problems: list[str] = []

    def push(token: str, prompt: list[int]) -> None:
        with contextlib.suppress(OSError, ConnectionError):  # the run has ended
            while True:
                sequences = sample(environment.url, prompt, 4, token=token)
                status, answer = call(environment.url, "/scored_data", scored(sequences, prompt), token=token)
                if status not in (200, 503):
                    problems.append(str(answer))

    pushing = [
        threading.Thread(target=push, args=(token, [5, 6 + number]), daemon=True) for number, token in enumerate((OURS, THEIRS))
    ]
    for thread in pushing:
        thread.start()
    how = {"tasks": "pushed:groups", "environment": environment, "reward": None, "held_out": None}
    run = small_run(tmp_path / "run", **how, steps=3)
    for thread in pushing:
        thread.join(10)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert run.summary["steps"] == 3 and not problems
    assert all(row["reward"] == row["reward/environment"] == 1.5 for row in rows if "reward/environment" in row)
    counts = run.summary["accounting"]
    assert counts["trained"] == 48 and counts["submitted"] == sum(counts.values()) - counts["submitted"]


def test_garbage_between_good_groups_costs_a_run_nothing_and_is_counted(tmp_path) -> None:
    """The sampled group itself comes later, well scored: no refusal costs what was sampled."""
    environment, problems, garbage = PushedEnvironment(port=0), list[Any](), Counter[str]()

    def push() -> None:
        with contextlib.suppress(OSError, ConnectionError):  # the run has ended
            while True:
                prompt = [5, 6]
                group = scored(sample(environment.url, prompt, 4), prompt)
                for reason, body in (
                    ("400", {**group, "scores": [float("nan")] * 4}),
                    ("400", {**group, "scores": [1e308] * 4}),
                    ("400", {**group, "scores": [1.0, 2.0, 3.0, float("inf")]}),
                    ("400", {**group, "masks": [[1]]}),
                    ("group_size", {**scored(group["tokens"][:2], prompt)}),
                    ("not_sampled", scored([[*prompt, 7 + at] for at in range(4)], prompt)),
                    ("invalid_json", b"\xff nonsense"),
                ):
                    status, answer = call(environment.url, "/scored_data", body)
                    garbage[reason] += 1
                    if status != 400:
                        problems.append((reason, status, answer))
                status, answer = call(environment.url, "/scored_data", group)
                if status not in (200, 503):
                    problems.append((status, answer))

    pushing = threading.Thread(target=push, daemon=True)
    pushing.start()
    how = {"tasks": "pushed:groups", "environment": environment, "reward": None, "held_out": None}
    summary = small_run(tmp_path / "run", **how, steps=3).summary
    pushing.join(10)
    assert summary["status"] == "finished" and not problems
    assert summary["accounting"]["trained"] == 3 * 16 and books_close(summary) and summary["skipped_steps"] == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    versions = [row for row in rows if "reward" in row]
    assert [row["reward"] for row in versions] == [1.5] * 3, "of good groups alone"
    last, told, final = versions[-1], summary["pushed"], environment.push_counts
    assert all(row["pushed/accepted"] >= 4 * row["version"] for row in versions)
    for reason, count in garbage.items():
        name = f"refused/{reason}"
        assert 0 < versions[0][f"pushed/{name}"] < last[f"pushed/{name}"] <= told[name] <= final[name]
        assert 0 <= final[name] - count <= 1, "the last answer may be lost as the run ends"
    assert final.keys() - {"refused/later"} == {"accepted", *(f"refused/{reason}" for reason in garbage)}
