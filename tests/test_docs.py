"""The docs name only what exists, their links lead somewhere, and their lines fit a screen."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path

import pytest

from headrace.config import Recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("headrace", "tests", "docs", "recipes", "examples", "tools")
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
)
RUN_FOLDERS = ("rollouts/", "logs/", "checkpoints/", "checkpoints/step-N/")
"""Folders that a run makes."""
on_every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(page: Path) -> list[tuple[int, str]]:
    """(line number, line) of a page without its code blocks, fenced or indented."""
    lines, is_fenced = [], False
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if line.startswith("```"):
            is_fenced = not is_fenced
        elif not is_fenced and not line.startswith("    "):
            lines.append((number, line))
    return lines


def quoted(page: Path) -> list[str]:
    """What stands in backticks, also where it runs over two lines."""
    text = "\n".join(line for _, line in prose(page))
    return [" ".join(part.split()) for part in re.findall(r"`([^`]+)`", text)]


def exists(path: str) -> bool:
    """Whether a path is a file or folder from the root, or below a room; a file may be named by the end of its path."""
    if path.endswith(".py") or path.startswith(tuple(f"{folder}/" for folder in FOLDERS)):
        return (ROOT / path).exists() or any(file.endswith(f"/{path}") for file in FILES)
    return path in RUN_FOLDERS or any(f"/{path}" in file for file in FILES)


def is_path(text: str) -> bool:
    """Whether it looks like a path in this repository: `headrace/rpc.py`, `run/loops.py`, `core.py`, `sync/`."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]*)*", text):
        return False
    return text.endswith((".py", "/")) or text.startswith(tuple(f"{folder}/" for folder in FOLDERS))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = [line.lstrip("#").strip() for _, line in prose(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def settings(section: type = Recipe, prefix: str = "") -> set[str]:
    """Every setting by its full name, and every section."""
    names = set()
    for name, hint in typing.get_type_hints(section).items():
        inner = next((part for part in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(part)), None)
        names |= {prefix + name} | (settings(inner, f"{prefix}{name}.") if isinstance(inner, type) else set())
    return names


@on_every_page
def test_lines_fit_a_screen(page) -> None:
    long = [f"{page.name}:{number}" for number, line in prose(page) if len(line) > 120 and not line.startswith("|")]
    assert not long


@on_every_page
def test_paths_exist(page) -> None:
    missing = [text for text in quoted(page) if is_path(text) and not exists(text)]
    assert not missing


@on_every_page
def test_links_lead_to_files_and_headings(page) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", "\n".join(line for _, line in prose(page))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            broken.append(link)
    assert not broken


@on_every_page
def test_settings_exist(page) -> None:
    """`train.loss`, `staleness.max_lag = 0`; files (`buffer.wire`) and calls (`engine.sleep()`) are no settings."""
    known = settings()
    sections = {name.partition(".")[0] for name in known if "." in name}
    named = [re.fullmatch(r"(?:--)?([a-z_]+(?:\.[a-z_]+)+)(?: ?[=≥≤].*)?", text) for text in quoted(page)]
    keys = [match[1] for match in named if match]
    suffixes = (".wire", ".json", ".jsonl", ".md", ".py", ".toml", "model.generate")
    wrong = [key for key in keys if key.split(".")[0] in sections and key not in known and not key.endswith(suffixes)]
    assert not wrong


@on_every_page
def test_modules_and_their_names_exist(page) -> None:
    """`headrace.algorithms.TokenTensors`: the longest module of the path, and a name that stands in it."""
    for text in quoted(page):
        match = re.match(r"headrace(\.\w+)+", text)
        parts = match[0].split(".") if match else []
        depth = len(parts)
        while depth > 1 and not module_file(parts[:depth]).exists():
            depth -= 1
        source = module_file(parts[:depth]).read_text() if parts else ""
        assert all(re.search(rf"\b{name}\b", source) for name in parts[depth:]), text


def module_file(parts: list[str]) -> Path:
    """Where a module is defined: a file, or a package's `__init__.py`."""
    path = ROOT.joinpath(*parts)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
