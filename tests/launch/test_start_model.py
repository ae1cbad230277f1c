"""The cache of models that runs start from: bounded, and nothing goes that a run has in use."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from headrace.config import make_recipe
from headrace.launch import model_cache, start_model
from headrace.launch.inputs import UserInputs
from headrace.leftovers import FOLDER_LOCK, remove_unused, use_folder

if TYPE_CHECKING:
    import contextlib


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(start_model, "_NUM_KEPT", 2)
    monkeypatch.setattr(start_model.tiny, "build_folder", lambda folder, *_, **__: (folder / "config.json").touch())
    return tmp_path / "warmup"


def model(seed: int) -> contextlib.AbstractContextManager[str]:
    recipe = make_recipe({"tasks": [{"source": "builtin:sort_digits"}], "seed": seed})
    return start_model.model_folder(recipe, UserInputs(), say=lambda _: None)


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
        os.utime(folder, (1000, 1000))
    with use_folder(alive):
        os.utime(alive, (1000, 1000))
        with model(0):
            assert not dead.exists() and alive.exists()


def test_a_model_that_another_process_removes_meanwhile(cache, monkeypatch):
    listed = type(cache).iterdir
    monkeypatch.setattr(type(cache), "iterdir", lambda folder: [*listed(folder), folder / "gone"])
    with model(0) as folder:
        assert os.path.exists(f"{folder}/config.json")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("has_lock", [True, False])
def test_a_cached_model_that_may_only_be_read_is_used(cache, monkeypatch, code, has_lock):
    with model(0) as made:
        pass
    if not has_lock:
        os.remove(f"{made}/{FOLDER_LOCK}")
    for number in range(3):  # more than are kept
        (cache / f"other{number}").mkdir()
        used_at(str(cache / f"other{number}"), 1000.0)
    really = Path.open

    def refuse(path: object, *_: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    def opened(path: Path, mode: str = "r") -> IO[str]:
        return really(path) if mode == "r" else refuse(path)

    before = sorted(os.listdir(cache))
    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *_: refuse(cache))
    with model(0) as folder:
        assert folder == made
        use_folder(Path(folder)).close()
        remove_unused(Path(folder))
    model_cache._remove_old(cache, 0)
    assert sorted(os.listdir(cache)) == before
    with pytest.raises(OSError, match=os.strerror(code)), model(1):
        pass


def test_what_decides_the_model_decides_its_place_in_the_cache():
    def key(**settings: object) -> str:
        given = {"tasks": [{"source": "builtin:sort_digits"}], "sft": {"steps": 2}}
        return start_model._key(make_recipe({**given, **settings}), UserInputs())

    others = {"train.beta1": 0.8}, {"model.chat_template_kwargs": {"a": 1}}, {"seed": 1}, {"sft": {"steps": 3}}
    assert key() == key(**{"train.micro_batch_tokens": 64}) == key(**{"train.loss": "gspo"})
    assert len({key(), *(key(**other) for other in others)}) == 5
    alone = {"sft": {"steps": 2, "tasks": [{"source": "builtin:sort_digits"}]}}
    assert key(**alone) == key(**alone, **{"sampling.max_tokens": 3}) and key() != key(**{"sampling.max_tokens": 3})
