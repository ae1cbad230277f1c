"""The cache of models that runs start from: bounded, and nothing goes that a run has in use."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from headrace.config import make_recipe
from headrace.engine.native.demand import blocks_for
from headrace.orchestrate import warmup
from headrace.orchestrate.folder import FolderLock
from headrace.orchestrate.inputs import UserInputs

if TYPE_CHECKING:
    import contextlib


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(warmup, "_NUM_KEPT", 2)
    monkeypatch.setattr(warmup.tiny, "build_folder", lambda folder, *_, **__: (folder / "config.json").touch())
    return tmp_path / "warmup"


def model(seed: int) -> contextlib.AbstractContextManager[str]:
    recipe = make_recipe({"tasks": [{"source": "builtin:sort_digits"}], "seed": seed})
    return warmup.model_folder(recipe, UserInputs(), say=lambda _: None)


def used_at(folder: str, moment: float) -> None:
    os.utime(folder, (moment, moment))


def test_the_models_used_last_are_kept(cache):
    folders = []
    for seed in range(4):
        with model(seed) as folder:
            folders.append(folder)
        used_at(folder, 1000.0 + seed)
    with model(2) as again:
        assert again == folders[2]
    assert sorted(map(str, cache.iterdir())) == sorted(folders[2:])


def test_a_model_in_use_is_not_removed(cache):
    with model(0) as oldest:
        for seed in range(1, 5):
            with model(seed) as folder:
                used_at(oldest, 1000.0)
            used_at(folder, 1000.0 + seed)
        assert os.path.exists(f"{oldest}/config.json")
    with model(5):
        assert not os.path.exists(oldest)


def test_what_a_killed_process_left_half_made_goes(cache):
    dead, alive = cache / ".making-dead", cache / ".making-alive"
    for folder in (dead, alive):
        folder.mkdir(parents=True)
    lock = FolderLock(alive)
    assert lock.acquire()
    with model(0):
        assert not dead.exists() and alive.exists()
    lock.release()


def test_the_engine_has_a_cache_for_the_tasks_that_are_checked(tmp_path, monkeypatch, tiny_model):
    class Built(Exception):
        pass

    def build_roles(*_, most_blocks, **__):
        raise Built(most_blocks)

    monkeypatch.setattr(warmup, "build_roles", build_roles)
    settings = {"engine.slots": 4096, "sampling.max_tokens": 12, "warmup.steps": 1}
    given = UserInputs(tasks=[{"prompt": "1" * 30, "answer": "1"}], reward=len)
    with pytest.raises(Built) as built:
        asyncio.run(warmup._warm_up(make_recipe(settings), tiny_model, given, tmp_path, lambda _: None))
    assert built.value.args == (blocks_for(512, tokens=42, block_size=16),)
