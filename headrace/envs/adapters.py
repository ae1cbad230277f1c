"""The packages whose environments run here, for `headrace envs`."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass


@dataclass(frozen=True)
class Adapter:
    """One package."""

    package: str
    """As pip names it."""
    extra: str
    """Of headrace, that installs it; "" if the adapter does without the package."""
    how: str
    """What to write in a recipe."""
    how_in_0_1: str = ""
    """The same for version 0.1, if that is another."""

    @property
    def version(self) -> str:
        """That is installed; "" if none is."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return ""


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
    for adapter in ADAPTERS:
        fix = "" if adapter.version or not adapter.extra else f"  (pip install headrace[{adapter.extra}])"
        how = adapter.how_in_0_1 if adapter.how_in_0_1 and adapter.version.startswith("0.1.") else adapter.how
        lines.append(f"{adapter.package:<14} {adapter.version or 'missing':<9} {how}{fix}")
    return lines
