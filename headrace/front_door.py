"""The front door of a room: its public names, imported when they are first asked for, so that importing a room is quick."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def front_door(room: str) -> Callable[[str], Any]:
    """The `__getattr__` of a room whose `__init__.py` lists its public names as imports under `if TYPE_CHECKING`."""
    module = sys.modules[room]
    tree = ast.parse(Path(str(module.__file__)).read_text())
    homes = {
        alias.asname or alias.name: (str(node.module), alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def fetch(name: str) -> Any:  # noqa: ANN401  (whatever the room calls so)
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        home, original = homes[name]
        value = getattr(importlib.import_module(home), original)
        setattr(module, name, value)
        return value

    return fetch
