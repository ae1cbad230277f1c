"""Rows from files, folders, pandas, `datasets` and a hub, which is a server in this file."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from headrace.settings import ConfigError
from headrace.tasks import TaskError, TaskSettings, open_source
from headrace.tasks.files import is_hub_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROWS = [{"question": f"q{number}", "solution": str(number)} for number in range(5)]
RENAMED = {"prompt": "question", "answer": "solution"}


def taken(source: object, function: Callable | None = None, **settings: Any) -> list[dict]:
    how = TaskSettings(source="", **settings)
    opened = open_source(source, seed=0, split="train", settings=how, function=function)
    return opened.rows


def parquet_of(rows: list[dict]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


# Files


def test_csv(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('\ufeffprompt,answer\n"two, or\n""three""?",3\nx,\n', encoding="utf-8")
    assert taken(file) == [{"prompt": 'two, or\n"three"?', "answer": "3"}, {"prompt": "x", "answer": ""}]
    file.write_text("prompt,answer\na,b\nc\n")
    with pytest.raises(TaskError, match=r"rows\.csv:3: must have 2 cells, like the first line"):
        taken(file)
    file.write_text('prompt\n"open\n')
    with pytest.raises(TaskError, match=r"rows\.csv:\d: not CSV"):
        taken(file)


def test_a_json_file_is_an_array_or_lines(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    file.write_text(json.dumps(rows, indent=2))
    assert taken(file) == rows
    for encoding in ("utf-8", "utf-8-sig"):  # the second is how Windows writes it
        file.write_text("\n".join(map(json.dumps, rows)), encoding=encoding)
        assert taken(file) == rows
    file.write_text('[{"prompt": "a"},\n {"prompt" "b"}]')
    with pytest.raises(TaskError, match=r"rows\.json:2: not JSON"):
        taken(file)


def test_a_folder_of_parquet_has_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    for split, rows in (("train", ROWS), ("test", ROWS[:2])):
        (folder / f"{split}-00000-of-00001.parquet").write_bytes(parquet_of(rows))
    assert [row["prompt"] for row in taken(folder, columns=RENAMED)] == ["q0", "q1", "q2", "q3", "q4"]
    assert len(taken(str(folder), split="test", columns=RENAMED)) == 2
    assert len(taken(str(folder), split="train[1:4]", limit=2, columns=RENAMED)) == 2
    with pytest.raises(TaskError, match=r"Unknown split \"dev\".*'test'.*; set split to one of them"):
        taken(folder, split="dev")


# Objects


def test_pandas() -> None:
    import pandas

    frame = pandas.DataFrame({"prompt": ["a", "b"], "answer": [1.0, None], "tags": [["x"], []]}, index=[7, 9])
    assert taken(frame) == [{"prompt": "a", "answer": 1.0, "tags": ["x"]}, {"prompt": "b", "answer": None, "tags": []}]
    with pytest.raises(TaskError, match=r"a DataFrame: .* give each column values of one type"):
        taken(pandas.DataFrame({"prompt": ["a", 3]}))


def test_an_iterable_dataset_needs_a_limit() -> None:
    from datasets import Dataset, DatasetDict

    data = Dataset.from_list([{"prompt": str(number)} for number in range(9)])
    assert [row["prompt"] for row in taken(data.to_iterable_dataset(), limit=3)] == ["0", "1", "2"]
    with pytest.raises(TaskError, match=r"IterableDataset may have no end; pass \{'source': data, 'limit'"):
        taken(data.to_iterable_dataset())
    with pytest.raises(TaskError, match=r"DatasetDict has the splits train, test; pass one, such as data\['train'\]"):
        taken(DatasetDict(train=data, test=data))


# Rows on their way


def test_columns_then_map_then_the_system_prompt() -> None:
    def drop_odd(row: dict) -> dict | None:
        assert set(row) == {"prompt", "answer", "extra"}
        row["answer"] += "!"  # its own copy
        return row if int(row["prompt"][1:]) % 2 == 0 else None

    rows = [{**row, "extra": 1} for row in ROWS]
    found = taken(rows, drop_odd, columns=RENAMED, limit=4, system_prompt="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert [row["prompt"] for row in found] == [[system, {"role": "user", "content": f"q{number}"}] for number in (0, 2)]
    assert [row["answer"] for row in found] == ["0!", "2!"] and rows[0]["solution"] == "0"
    own = [{"role": "system", "content": "Own."}, {"role": "user", "content": "x"}]
    assert taken([{"prompt": own}], system_prompt="Be brief.") == [{"prompt": own}]


def test_a_map_that_changes_nested_values_changes_no_source() -> None:
    def asked_twice(row: dict) -> dict:
        row["prompt"][0]["content"] *= 2
        return row

    rows = [{"prompt": [{"role": "user", "content": "a"}]}]
    for _ in range(2):
        opened = open_source(rows, seed=0, split="train", function=asked_twice)
        assert opened.row(0)["prompt"][0]["content"] == "aa"  # type: ignore[index, call-overload]


def test_a_limit_makes_generated_tasks_a_list() -> None:
    found = taken("builtin:sort_digits", lambda row: row | {"more": 1}, limit=4, system_prompt="Sort.")
    assert len(found) == 4 and all(row["more"] == 1 and len(row["prompt"]) == 2 for row in found)


@pytest.mark.parametrize(
    ("source", "settings", "function", "problem"),
    [
        (
            ROWS,
            {"columns": {"prompt": "questoin"}},
            None,
            r"no column 'questoin' for columns\.prompt; it has: question",
        ),
        (ROWS, {}, None, r"row 0 has no 'prompt' column; it has: question, solution \(columns = \{ prompt"),
        (ROWS, {"columns": RENAMED}, lambda row: None, r"no tasks in it; map dropped all 5"),
        (ROWS, {"columns": RENAMED}, lambda row: "x", r"row 0: map returned a str; return the row, or None"),
        (ROWS, {"columns": RENAMED}, lambda row: row["x"], r"row 0: map raised KeyError: 'x'"),
        (ROWS, {"split": "train"}, None, r"a list: split = 'train': only datasets of the hub and folders have one"),
        ("rows.jsonl", {"revision": "v1"}, None, r"rows\.jsonl: revision = 'v1': only datasets"),
        ({"prompt": ["a"]}, {}, None, r"a dict is not a list of rows"),
        ("builtin:sort_digits", {"system_prompt": "x"}, None, r"have no end and take no system_prompt; set limit"),
        ("builtin:sort_digits", {}, lambda row: row, r"take no map; set limit"),
        ("builtin:sort_digits", {"split": "test"}, None, r"split = 'test': generated tasks have none; leave it out"),
        ("builtin:sort_digits", {"config": "main", "limit": 2}, None, r"config = 'main': generated tasks have none"),
        ("builtin:sort_digits", {"revision": "v1", "limit": 2}, None, r"revision = 'v1': generated tasks have none"),
        ("/", {"revision": "v1"}, None, r"revision = 'v1': only datasets of the hub have one"),
        ([{"prompt": "x", "chat_template_kwargs": 1}], {}, None, r"'chat_template_kwargs' must be a dict"),
        (
            [{"prompt": "x", "chat_template_kwargs": {"tokenize": False}}],
            {},
            None,
            r"row 0: chat_template_kwargs has 'tokenize'",
        ),
        (
            [{"prompt": "x", "chat_template_kwargs": {"max_length": 2}}],
            {},
            None,
            r"row 0: chat_template_kwargs has 'max_length'",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(source, settings: dict, function, problem: str) -> None:
    with pytest.raises((TaskError, ConfigError), match=problem):
        taken(source, function, **settings)


# The hub


@pytest.mark.parametrize(
    ("source", "is_hub"),
    [("owner/name", True), ("gsm8k", True), ("hub:a/b", True), ("./data", False), ("a/b/c", False), ("rows.jsonl", False)],
)
def test_names_of_the_hub(source: str, is_hub: bool) -> None:
    assert is_hub_name(source) == is_hub


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TaskError, match=r"owner/none: datasets of the hub and folders need `pip install headrace\[datasets\]`"):
        taken("owner/none")


README = """---
configs:
- config_name: main
  data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]
- config_name: other
  data_files: [{split: train, path: main/test-*}]
---
"""
COMMIT = "a" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """What `datasets` asks of the hub: files, their commit, and the tree of one repository."""

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        files, path = self.server.files, urlsplit(self.path).path
        self.server.asked.append(path)
        if path.startswith(start := "/datasets/owner/name/resolve/"):
            name = path.removeprefix(start).partition("/")[2]
            if name not in files:
                self.reply(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            else:
                self.reply(200, files[name], ETag=f'"{hashlib.sha256(files[name]).hexdigest()}"', X_Repo_Commit=COMMIT)
        elif path.startswith("/api/datasets/owner/name/revision/"):
            self.reply(200, json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": []}).encode())
        elif path.startswith(start := "/api/datasets/owner/name/tree/"):
            below = path.removeprefix(start).partition("/")[2]
            entries = [{"type": "file", "oid": "0", "size": len(data), "path": name} for name, data in files.items()]
            entries = [entry for entry in entries if entry["path"].startswith(below)]
            if not below:
                entries.append({"type": "directory", "oid": "0", "size": 0, "path": "main"})
            self.reply(200, json.dumps(entries).encode())
        else:
            self.reply(404, b"{}", X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Keeps quiet."""


CHILD = """
import json, sys
from headrace.launch.inputs import UserInputs, fingerprint_inputs, open_tasks
from headrace.config import make_recipe
for settings in json.loads(sys.argv[1]):
    source = {"columns": {"prompt": "question"}, **settings}
    recipe = make_recipe({"tasks": [source], "reward.functions": ["headrace.tasks.sort_digits:partial_credit"]})
    try:
        (opened,) = open_tasks(recipe, UserInputs()).sources
        (again,) = open_tasks(recipe, UserInputs(tasks=source)).sources
        assert again.rows == opened.rows
        print(json.dumps([[row["prompt"] for row in opened.rows], fingerprint_inputs(recipe, UserInputs())["tasks.0.source"]]))
    except ValueError as error:
        print(json.dumps(str(error)))
"""


def test_datasets_of_the_hub_by_name_config_split_and_revision(tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files = {"main/train-0.parquet": parquet_of(ROWS), "main/test-0.parquet": parquet_of(ROWS[3:])}
    server.files["README.md"], server.asked = README.encode(), []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    cases = [
        {"source": "owner/name", "config": "main"},
        {"source": "hub:owner/name", "config": "main", "split": "test", "revision": "v1"},
        {"source": "owner/name", "config": "main", "split": "train[:2]"},
        {"source": "owner/name"},
        {"source": "owner/name", "config": "mian"},
        {"source": "owner/name", "config": "main", "split": "dev"},
        {"source": "owner/missing"},
    ]
    home = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_DISABLE_TELEMETRY": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, json.dumps(cases)], env={**os.environ, **home}, capture_output=True, text=True
        )
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    train, test, two, no_config, wrong_config, wrong_split, unknown = map(json.loads, done.stdout.splitlines())
    assert train[0] == ["q0", "q1", "q2", "q3", "q4"] and test[0] == ["q3", "q4"] and two[0] == ["q0", "q1"]
    assert train[1][0] == "owner/name" and len({content for _, (_, content) in (train, test, two)}) == 3
    assert any("/resolve/v1/" in path for path in server.asked)
    assert "'main', 'other'" in no_config and no_config.endswith("; set config to one of them")
    assert "'mian' not found" in wrong_config and wrong_config.endswith("; set config to one of them")
    assert 'Unknown split "dev"' in wrong_split and wrong_split.endswith("; set split to one of them")
    assert "tasks: owner/missing: no file or folder of that name is in" in unknown and "`hf auth login`" in unknown
