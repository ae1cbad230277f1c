"""How a section refuses a value; `settings.build` puts the section's name and the line of the file before it."""

from __future__ import annotations

from headrace.settings import ConfigError


def check(holds: bool, name: str, value: object, wanted: str) -> None:
    """Refuse a setting that does not hold what is wanted of it."""
    if not holds:
        raise ConfigError(f"{name} = {value!r}: must be {wanted}")
