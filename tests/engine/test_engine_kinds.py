"""The seam of `engine.kind`: what a choice says of itself is all that the rest of Headrace asks for."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
import typing

import numpy as np
import pytest
import torch
from helpers import mismatches
from transformers import AutoModelForCausalLM

from headrace.config import make_recipe
from headrace.engine.kind import EngineKind
from headrace.engine.native.kind import build_core
from headrace.engine.protocol import EngineState
from headrace.engine.request import append_call
from headrace.engine.settings import KINDS, EngineSettings, engine_kind
from headrace.engine.stop_strings import stop_tokens
from headrace.launch.inputs import UserInputs
from headrace.launch.launcher import Launch, launch
from headrace.model import ModelError, StagedWeights, load_tokenizer
from headrace.observe.sinks import read_metrics
from headrace.records import Call, FinishReason
from headrace.settings import ConfigError

KIND = "recomputing"


class RecomputingEngine:
    """The slowest engine there is: one rollout at a time, all of it computed again for every token."""

    def __init__(self, model, sync, timeline) -> None:
        self.model, self.sync, self.timeline = model, sync, timeline
        self.spare = StagedWeights(model)
        self.version, self.lineage, self.policy = -1, "", ""
        self.calls = self.tokens = 0
        self.peak_memory = 0
        self.running = asyncio.Event()
        self.running.set()

    async def serve(self):
        await asyncio.Event().wait()

    @torch.no_grad()
    def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        return torch.log_softmax(self.model(torch.tensor([token_ids])).logits[0].float() / temperature, dim=-1)

    async def generate(self, rollout, sampling):
        self.calls += 1
        random = torch.Generator().manual_seed(sampling.seed & (2**63 - 1))
        ids, started = rollout.token_ids.tolist(), time.time()
        tokens, logprobs, versions, reason = [], [], [], FinishReason.LENGTH
        while len(tokens) < sampling.max_tokens:
            await self.running.wait()
            last = self.logprobs(ids + tokens, sampling.temperature or 1.0)[-1]
            token = int(torch.multinomial(last.exp(), 1, generator=random) if sampling.temperature else last.argmax())
            tokens.append(token)
            logprobs.append(float(last[token]) if sampling.temperature else 0.0)
            versions.append(self.version)
            self.tokens += 1
            if token in sampling.stop_ids:
                reason = FinishReason.STOP
                break
            await asyncio.sleep(0)
        call = Call(
            start=len(ids),
            stop=len(ids) + len(tokens),
            engine=KIND,
            sampling=sampling,
            finish_reason=reason,
            started=started,
            finished=time.time(),
        )
        return append_call(
            rollout,
            call,
            token_ids=np.asarray(tokens, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            versions=np.asarray(versions, np.int32),
            policy=self.policy,
            lineage=self.lineage,
        )

    async def score(self, rollouts):
        found = []
        for rollout in rollouts:
            rows = self.logprobs(rollout.token_ids.tolist())
            ids = torch.from_numpy(rollout.token_ids[1:].astype(np.int64))
            found.append(np.concatenate([[0], rows[:-1].gather(1, ids[:, None])[:, 0].numpy()]).astype(np.float32))
        return found

    async def pause(self, interrupt):
        self.running.clear()

    async def resume(self):
        self.running.set()

    async def load(self, update, *, interrupt=None):
        self.spare.receive(update, lambda incoming: self.sync.receive(update, incoming))
        self.spare.exchange()
        self.version, self.lineage, self.policy = update.version, update.lineage, update.policy

    async def state(self):
        return EngineState(
            version=self.version, lineage=self.lineage, running=0, waiting=0, slots=1, free_blocks=0, tokens=self.tokens
        )

    async def in_flight(self):
        return []


class RecomputingKind(EngineKind):
    name = KIND
    can_sleep = False

    def __init__(self) -> None:
        self.made: list[RecomputingEngine] = []

    def make_inline(self, recipe, model_path, *, device, sync, timeline, most_blocks):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(model_path).eval(), load_tokenizer(model_path)
        self.made.append(RecomputingEngine(model, sync, timeline))
        return self.made[-1], stop_tokens(model.generation_config, tokenizer)


@pytest.fixture
def kind(monkeypatch) -> RecomputingKind:
    made = RecomputingKind()
    monkeypatch.setitem(KINDS, KIND, made)
    return made


def recipe_with(kind: str, **settings):
    recipe = make_recipe(
        {
            "model": {"path": "builtin:tiny", "hidden_size": 32, "num_heads": 1, "num_layers": 1, "context": 32},
            "sampling": {"max_tokens": 4},
            "train": {"batch": 8, "group_size": 4, "learning_rate": 1e-3},
            "engine": {"slots": 8},
            "threads": 1,
            "steps": 3,
            "orchestrate": "inline",
            **settings,
        }
    )
    return dataclasses.replace(recipe, engine=dataclasses.replace(recipe.engine, kind=kind))


def test_a_second_kind_of_engine_trains_an_inline_run(kind: RecomputingKind, tmp_path) -> None:
    tasks = [{"prompt": str(number)} for number in range(12)]
    given = UserInputs(tasks=tasks, reward=lambda prompt, completion, **_: 1.0 / (1 + len(completion)))
    result = launch(recipe_with(KIND), given, Launch(name="kinds", run_dir=tmp_path / "run", quiet=True))
    assert result.summary["status"] == "finished" and result.summary["version"] == 3
    engine = kind.made[-1]
    assert engine.version == 3 and engine.calls >= 24 and engine.tokens
    found = mismatches(read_metrics(result.folder / "metrics.jsonl"))
    assert max(found) < 1e-4 and not any(math.isnan(each) for each in found)


def test_what_a_kind_cannot_do_is_refused(kind: RecomputingKind) -> None:
    with pytest.raises(ConfigError, match=rf"^engine.sleep = 'cache': engine.kind = '{KIND}' cannot sleep"):
        recipe_with(KIND, **{"engine.sleep": "cache", "staleness.max_lag": 0})
    with pytest.raises(ConfigError, match=rf"^engine.kind = '{KIND}': exact = true needs the embedded engine"):
        recipe_with(KIND, **{"exact": True, "staleness.max_lag": 1})
    with pytest.raises(ConfigError, match=rf"^engine.record_routing = true: engine.kind = '{KIND}' does not record it"):
        recipe_with(KIND, **{"engine.record_routing": True})
    kind.payloads = frozenset()
    with pytest.raises(ConfigError, match=rf"^sync.payload = 'full': engine.kind = '{KIND}' cannot do that"):
        recipe_with(KIND)


def test_routing_that_cannot_be_read_is_refused(tiny_model: str) -> None:
    recipe = recipe_with("native", **{"engine.record_routing": True})
    with pytest.raises(ModelError, match=r"^engine.record_routing = true: .* has no experts"):
        build_core(recipe, tiny_model, name="e", device="cpu")


def test_the_setting_offers_the_kinds_of_the_table() -> None:
    assert set(typing.get_args(typing.get_type_hints(EngineSettings)["kind"])) == set(KINDS)
    assert engine_kind(EngineSettings()) is KINDS["native"]


def test_where_servers_run_does_not_change_what_a_run_is() -> None:
    def hash_of(**settings) -> str:
        return make_recipe({"engine.kind": "vllm", **settings}).hash

    here, there = hash_of(), hash_of(**{"engine.vllm.urls": ["http://host:8000"]})
    assert here == there != hash_of(**{"engine.vllm.arguments": {"quantization": "fp8"}})
    assert here != make_recipe({}).hash
