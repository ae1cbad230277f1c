"""One server, the model and several adapters of it, chosen by the name that a request gives."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import torch
from test_serve_command import served

from headrace.cli import main
from headrace.engine.native.core import EngineCore
from headrace.engine.request import HeldAdapter, Request
from headrace.launch.serving import _load
from headrace.lora import LoraSettings, add_adapter
from headrace.model import load_model
from headrace.records import Rollout, Sampling
from headrace.run import FORMAT, MANIFEST

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PROMPTS = {"base": [7, 8, 9, 10] * 6, "one": [7, 8, 9, 10] * 6, "two": [7, 8, 9, 10] * 6}
"""The same for all, and longer than a KV block, so that a prefix computed with one adapter would be found by another."""
CACHED = 16
"""Of a prompt's 24 tokens, those in its full KV block."""


def write_adapter(folder: Path, base: str, *, seed: int, **settings: Any) -> Path:
    adapter = add_adapter(load_model(base), LoraSettings(**{"rank": 4, **settings}))
    draws = torch.Generator().manual_seed(seed)
    adapter.write(folder, {name: 0.1 * torch.randn(t.shape, generator=draws) for name, t in adapter.own.items()}, base=base)
    return folder


@pytest.fixture(scope="module")
def folders(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(parent / name, str(tiny_model), seed=seed) for seed, name in enumerate(("one", "two"))}


def options(model: object, folders: Mapping[str, Path]) -> Namespace:
    sizes: dict[str, Any] = {"slots": 8, "queue": 8, "context": 64, "dtype": "float32", "device": "cpu", "threads": 1}
    adapters = tuple((name, str(folder)) for name, folder in folders.items())
    tokens: dict[str, Any] = {"api_token": None, "control_token": None}
    return Namespace(model=str(model), name="base", host="", adapters=adapters, **sizes, **tokens)


def sample(core: EngineCore, held: Mapping[str, HeldAdapter | None]) -> dict[str, Rollout]:
    return sample_counting(core, held)[0]


def sample_counting(core: EngineCore, held: Mapping[str, HeldAdapter | None]) -> tuple[dict[str, Rollout], int]:
    """A rollout of each, and how many tokens of their prompts were computed."""
    done: dict[str, Rollout] = {}
    for name, each in held.items():
        sampling = Sampling(max_tokens=12, seed=3)
        on_done: Any = lambda rollout: done.__setitem__(rollout.id, rollout)  # noqa: E731
        core.submit(Request(Rollout.from_prompt(PROMPTS[name], id=name), sampling, on_done=on_done, held=each))
    num_rows = 0
    while core.has_work:
        num_rows += core.step().prompt_rows
    return done, num_rows


def test_in_one_batch_each_gives_what_it_gives_alone(tiny_model: str, folders: dict[str, Path]) -> None:
    core, _, adapters = _load(options(tiny_model, folders))
    held: dict[str, HeldAdapter | None] = {"base": None, **adapters}
    together, num_rows = sample_counting(core, held)
    assert num_rows == 3 * 24, "they shared what each computes differently"
    for name in (*held, "base"):  # the second time in a row, and after the others, with their prefixes cached
        rollouts, num_rows = sample_counting(core, {name: held[name]})
        again = rollouts[name]
        assert num_rows == 24 - CACHED, name
        alone = EngineCore(load_model(str(folders.get(name, tiny_model))), name="alone", slots=8, context=64)
        expected = sample(alone, {name: None})[name]
        for found in (together[name], again):
            assert found.token_ids.tolist() == expected.token_ids.tolist()
            np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    first = {name: round(float(rollout.logprobs[24]), 4) for name, rollout in together.items()}
    assert len(set(first.values())) == 3, "they do not differ"


def test_rows_of_one_adapter_lie_side_by_side_and_have_its_version_and_lineage(
    tiny_model: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """A kernel takes three times as long for adapters that take turns; plain folders all have version 0."""
    checkpoint = write_adapter(tmp_path / "three", str(tiny_model), seed=3)
    (checkpoint / MANIFEST).write_text(json.dumps({"format": FORMAT, "version": 7, "lineage": "run"}))
    core, _, adapters = _load(options(tiny_model, {**folders, "three": checkpoint}))
    core.lineage, done = "base's", dict[str, Rollout]()
    for index in range(8):
        name = [*adapters, "base"][index % 4]
        request = Request(
            Rollout.from_prompt([7, 8, 9], id=f"{name} {index}"),
            Sampling(max_tokens=4, seed=index),
            on_done=lambda rollout: done.__setitem__(rollout.id, rollout),
            held=adapters.get(name),
        )
        core.submit(request)
    core.step()
    names = [core.scheduler.running[slot].rollout.id.split()[0] for slot in core.step().decoding.tolist()]
    assert names[:2] == ["three"] * 2 and names[-2:] == ["base"] * 2, "the newest version first, the engine's own last"
    assert names[2:6] in (["one"] * 2 + ["two"] * 2, ["two"] * 2 + ["one"] * 2)
    while core.has_work:
        core.step()
    found = {id.split()[0]: (rollout.lineage, int(rollout.versions[-1])) for id, rollout in done.items()}
    assert found == {"one": ("", 0), "two": ("", 0), "three": ("run", 7), "base": ("base's", 0)}


def test_a_prefix_is_found_as_long_as_its_adapter_is_there(tiny_model: str, folders: dict[str, Path]) -> None:
    core, _, adapters = _load(options(tiny_model, folders))

    def count(name: str) -> int:
        return sample_counting(core, {name: adapters.get(name)})[1]

    assert [count(name) for name in ("base", "one", "two")] == [24, 24, 24]
    core.changed_weights(policy="policy", lineage="", version=1)
    assert [count(name) for name in ("base", "one", "two")] == [24, 24 - CACHED, 24 - CACHED]
    one = adapters.pop("one")
    adapters["one"] = HeldAdapter(one.version, one.tensors)  # the same values, but nobody knows that
    assert count("one") == 24
    core.forget_kept()
    pool = core.scheduler.pool
    cached, free = len(pool._key_of), len(pool._free)
    del one
    core.changed_weights(policy="policy", lineage="", version=1)  # the base's prefixes go, and those of the first "one"
    assert (len(pool._key_of), len(pool._free)) == (cached // 2, free + cached // 2)
    assert [count(name) for name in ("one", "two")] == [24 - CACHED, 24 - CACHED]


def test_a_next_turn_computes_what_is_new_with_the_same_adapter(tiny_model: str, folders: dict[str, Path]) -> None:
    core, _, adapters = _load(options(tiny_model, folders))
    first = sample(core, {"one": adapters["one"]})["one"]
    reply = first.append([5, 6])
    done: list[Rollout] = []
    core.submit(Request(reply, Sampling(max_tokens=2, seed=4), on_done=done.append, held=adapters["one"]))
    core.submit(Request(reply, Sampling(max_tokens=2, seed=4), on_done=done.append, held=adapters["two"]))
    assert core.step().prompt_rows == (1 + 2) + len(reply)
    while core.has_work:
        core.step()
    for held, rollout in zip(("one", "two"), tuple(done), strict=True):
        alone = EngineCore(load_model(str(folders[held])), name="alone", slots=8, context=64)
        alone.submit(Request(reply, Sampling(max_tokens=2, seed=4), on_done=done.append))
        while alone.has_work:
            alone.step()
        assert done[-1].token_ids.tolist() == rollout.token_ids.tolist()
        np.testing.assert_allclose(done[-1].logprobs, rollout.logprobs, atol=1e-5)


def test_requests_choose_by_name(tiny_model: str, folders: dict[str, Path]) -> None:
    given = [f"--adapter={name}={folder}" for name, folder in folders.items()]
    with served(str(tiny_model), "--name", "base", "--port", "0", "--context", "64", *given) as (_, url, _):
        cards = httpx.get(f"{url}/v1/models").json()["data"]
        assert [(card["id"], card.get("parent")) for card in cards] == [("base", None), ("one", "base"), ("two", "base")]
        assert httpx.get(f"{url}/v1/models/two").json()["id"] == "two"

        def ask(name: str) -> dict[str, Any]:
            flags = {"return_token_ids": True, "ignore_eos": True, "echo": True}
            body = {"model": name, "prompt": [7, 8, 9, 10], "max_tokens": 3, "logprobs": 0, **flags}
            answer = httpx.post(f"{url}/v1/completions", json=body).json()
            assert answer["model"] == name
            return dict(answer["choices"][0])

        for name in ("base", "one", "two"):
            choice = ask(name)
            scored, tokens = choice["logprobs"]["token_logprobs"], [8, 9, 10, choice["token_ids"][-3]]
            with torch.no_grad():
                model = load_model(str(folders.get(name, tiny_model)))
                model.set_attn_implementation("eager")
                logits = model(torch.tensor([[7, 8, 9, 10]]), use_cache=False).logits[0].log_softmax(-1)
            expected = [float(logits[at, token]) for at, token in enumerate(tokens)]
            assert scored[1:5] == pytest.approx(expected, abs=1e-4), name
        missing = httpx.post(f"{url}/v1/completions", json={"model": "three", "prompt": "1"})
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
        assert "'base' or 'one' or 'two'" in missing.json()["error"]["message"]


def test_an_adapter_that_does_not_fit_is_refused_by_name(
    tiny_model: str, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["serve", str(tiny_model), "--port", "0", *arguments])
        assert caught.value.code == 2
        return capsys.readouterr().err

    one = f"--adapter=one={folders['one']}"
    assert "write NAME=FOLDER" in told("--adapter=one")
    assert "'one' is taken" in told(one, one)
    assert "the folder does not exist" in told("--adapter=gone=no/such")
    assert "there is no adapter" in told(f"--adapter=whole={tiny_model}")
    wide = write_adapter(tmp_path / "wide", str(tiny_model), seed=1, rank=8)
    assert "--adapter wide: it has" in told(one, f"--adapter=wide={wide}")
    some = write_adapter(tmp_path / "some", str(tiny_model), seed=1, targets=("q_proj",))
    assert "--adapter some: the adapter was made for another base model or other targets" in told(one, f"--adapter=some={some}")
    config = json.loads((some / "adapter_config.json").read_text())
    (some / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(tmp_path)}))
    assert f"--adapter some: it belongs to {tmp_path}" in told(f"--adapter=some={some}")
