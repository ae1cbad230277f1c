"""The packages whose environments run here, for `headrace envs`."""

from __future__ import annotations

import contextlib
import importlib.metadata
from typing import NamedTuple


class Adapter(NamedTuple):
    """One package."""

    package: str  # as pip names it
    extra: str  # of headrace, that installs it; "" if the adapter does without the package
    how: str  # what to write in a recipe
    how_in_0_1: str = ""  # the same for version 0.1, if that is another


def _environment(name: str, options: str) -> str:
    return f'environment = {{ name = "headrace.envs:{name}", options = {{ {options} }} }}'


ADAPTERS = (
    Adapter("atroposlib", "", _environment("PushedEnvironment", "port = 8000")),
    Adapter("gymnasium", "gymnasium", _environment("GymnasiumEnvironment", 'id = "MODULE:ID"')),
    Adapter("openenv-core", "openenv", _environment("OpenEnvEnvironment", 'url = "http://HOST:PORT"')),
    Adapter("trl", "", _environment("TrlEnvironment", 'factory = "MODULE:CLASS"')),
    Adapter(
        "verifiers",
        "verifiers",
        _environment("VerifiersEnvironment", 'taskset = "ID"'),
        how_in_0_1=_environment("LoadedVerifiersEnvironment", 'id = "ID"'),
    ),
    Adapter("reasoning-gym", "gym", 'tasks = { source = "reasoning_gym:NAME" }'),
)


def list_adapters() -> list[str]:
    """A line for each: package, installed version, how to name it, or how to install it."""
    lines = []
    for package, extra, how, how_in_0_1 in ADAPTERS:
        version = ""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
        fix = "" if version or not extra else f"  (pip install headrace[{extra}])"
        shown = how_in_0_1 if how_in_0_1 and version.startswith("0.1.") else how
        lines.append(f"{package:<14} {version or 'missing':<9} {shown}{fix}")
    return lines
