"""The table of engine kinds: to add one, write its `EngineKind` and name it here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.engine.native.kind import NativeKind
from headrace.engine.vllm.kind import VllmKind
from headrace.settings import ConfigError, to_dict

if TYPE_CHECKING:
    from headrace.config import Recipe
    from headrace.engine.kind import EngineKind
    from headrace.engine.settings import EngineSettings

KINDS: dict[str, EngineKind] = {kind.name: kind for kind in (NativeKind(), VllmKind())}


def engine_kind(settings: EngineSettings) -> EngineKind:
    """The kind that `engine.kind` names."""
    return KINDS[settings.kind]


def check_engine_kind(recipe: Recipe) -> None:
    """Refuse what the chosen engine cannot do, and settings that only another engine reads."""
    engine, kind = recipe.engine, engine_kind(recipe.engine)
    named = f"engine.kind = '{kind.name}'"
    if recipe.exact and not kind.is_exact:
        raise ConfigError(f"{named}: exact = true needs the embedded engine; set it to 'native'")
    if engine.sleeps and not kind.can_sleep:
        raise ConfigError(f"engine.sleep = '{engine.sleep}': {named} cannot sleep; leave it 'never'")
    if recipe.is_inline and not kind.runs_inline:
        raise ConfigError(f"{named}: a server is a process of its own; set orchestrate = 'local'")
    for name, value, can in (
        ("partial.interrupt", recipe.partial.interrupt, kind.interrupts),
        ("sync.payload", recipe.sync.payload, kind.payloads),
    ):
        if can is not None and value not in can:
            raise ConfigError(f"{name} = '{value}': {named} cannot do that; set it to one of {', '.join(sorted(can))}")
    for other in KINDS.values():
        if other.section and other is not kind:
            _check_left_alone(other, engine, named)
    kind.check(recipe)


def _check_left_alone(other: EngineKind, engine: EngineSettings, named: str) -> None:
    given, usual = (to_dict(each)[other.section] for each in (engine, type(engine)()))
    for name, value in given.items():
        if value != usual[name]:
            raise ConfigError(
                f"engine.{other.section}.{name} = {value!r}: {named} does not look at it; set engine.kind = '{other.name}'"
            )
