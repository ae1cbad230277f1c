"""`headrace envs`."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.envs.adapters import ADAPTERS, Adapter
from headrace.imports import import_name


def test_what_it_says_to_write_names_what_exists() -> None:
    for adapter in ADAPTERS:
        recipe = tomllib.loads(adapter.how)
        if "environment" in recipe:
            assert import_name(recipe["environment"]["name"], setting="environment.name")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {adapter.extra for adapter in ADAPTERS if adapter.extra} <= project["optional-dependencies"].keys()


def test_it_says_what_is_installed_and_how_to_install_the_rest(capsys, monkeypatch) -> None:
    absent = Adapter("no-such-package", "none", "…")
    monkeypatch.setattr("headrace.envs.adapters.ADAPTERS", (*ADAPTERS, absent))
    with pytest.raises(SystemExit) as ended:
        main(["envs"])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0 and len(lines) == len(ADAPTERS) + 1
    assert importlib.metadata.version("reasoning-gym") in next(line for line in lines if line.startswith("reasoning-gym"))
    assert "missing" in lines[-1] and "pip install headrace[none]" in lines[-1]
