"""The command and the harness: parts that fail stop no others, rows are on disk as they come, contestants take turns, children
answer."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from headrace.bench import partial, ranks
from headrace.bench.child import Child, PeerFailed
from headrace.bench.command import BENCH_OPTIONS, BENCHES
from headrace.bench.harness import Row, choose, missed, run_parts, show, take_turns
from headrace.cli import main
from headrace.settings import ConfigError


def test_a_part_that_fails_keeps_its_rows_and_the_others_go_on(tmp_path, capsys, monkeypatch):
    file, commit = tmp_path / "out.json", subprocess.getoutput("git rev-parse --short HEAD 2>/dev/null")

    def names() -> list[str]:
        return [row["name"] for row in json.loads(file.read_text())["rows"]]

    def broken():
        yield [Row("before", 1.0, "s")]
        monkeypatch.chdir(tmp_path)  # git knows another commit now, or none
        raise RuntimeError("it broke\nhere")

    def sound():
        assert names() == ["before"]  # written before this part began
        yield [Row("after", 2.0, "s", goal="≤ 3")]
        assert names() == ["before", "after"]

    parts = {"broken": broken, "sound": sound}
    assert run_parts("x", parts, only=None, quick=False, json_file=file) == 1
    assert json.loads(file.read_text())["commit"] == commit, "that of the start"
    assert names() == ["before", "after"] and "broken: failed: RuntimeError: it broke\n" in capsys.readouterr().out
    slow = {"slow": lambda: [[Row("slow", 4.0, "s", goal="≤ 3")]]}
    assert run_parts("x", slow, only=None, quick=True, json_file=file) == 0
    assert json.loads(file.read_text())["rows"][0]["goal"] == "≤ 3, not judged"
    assert run_parts("x", slow, only=None, quick=False, json_file=None) == 1
    assert "missed: slow: 4 s, goal ≤ 3" in capsys.readouterr().out


def test_goals_are_judged_by_what_they_say() -> None:
    rows = [
        Row("fast", 10.0, "tokens/s", goal="≥ 10"),
        Row("slow", 9.9, "tokens/s", goal="≥ 10"),
        Row("small", 1e-5, "nats", goal="≤ 1e-5"),
        Row("large", 2e-5, "nats", goal="≤ 1e-5"),
        Row("nothing", float("nan"), "s", goal="≤ 30"),
        Row("told", 1.0, "s"),
        Row("between", 0.2, "share", goal="0.20 to 0.40"),
        Row("below", 0.19, "share", goal="0.20 to 0.40"),
        Row("above", 0.41, "share", goal="0.20 to 0.40"),
    ]
    assert [line.split(":")[0] for line in missed(rows)] == ["slow", "large", "nothing", "below", "above"]


def test_bounds_and_peers_have_columns_only_where_there_are_some(capsys) -> None:
    show("other", [Row("a", 1.0, "s")])
    assert "bound" not in capsys.readouterr().out
    show("engine", [Row("a", 1.0, "s", bound=0.5), Row("b", 2.0, "s", peers={"vLLM": 3.25})])
    said = capsys.readouterr().out
    assert "bound" in said and "0.5" in said and "vLLM" in said and "3.25" in said


def test_parts_are_asked_for_by_name():
    parts = {"a": list, "b": list, "c": list}
    assert choose("x", parts, None) == ["a", "b", "c"] and choose("x", parts, "c, a") == ["a", "c"]
    with pytest.raises(ConfigError, match=r"--only = a,d: `headrace bench x` has no part 'd' here; it has a, b, c"):
        choose("x", parts, "a,d")


def test_contestants_take_turns_and_one_that_fails_is_dropped(capsys):
    order = []

    def steady(turn):
        order.append(f"steady {turn}")
        return turn

    def failing(turn):
        order.append(f"failing {turn}")
        if turn == 1:
            raise MemoryError("too large\nby far")
        return turn

    seen = take_turns({"steady": steady, "failing": failing}, 2, warmups=1, may_raise=MemoryError)
    assert seen == {"steady": [1, 2]}
    assert order == ["steady 0", "failing 0", "steady 1", "failing 1", "steady 2"]
    assert capsys.readouterr().out == "failing: MemoryError: too large; it is absent from the table\n"
    with pytest.raises(MemoryError):
        take_turns({"failing": failing}, 2)


def add_up(settings, orders):
    """A child's function: the sum of what it was told so far."""
    print("not an answer")
    total = settings["start"]
    yield total
    for order in orders:
        total += order["add"]
        yield {"total": total, "array": np.full(2, total)}


def test_a_child_answers_orders_and_ends_when_it_is_closed(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{Path(__file__).parents[2]}")
    with Child("adder", "test_bench_parts:add_up", {"start": 3}, log=tmp_path / "log") as child:
        assert child.hear() == 3
        answer = child.ask({"add": 4})
        assert answer["total"] == 7 and answer["array"].tolist() == [7, 7]
        with pytest.raises(PeerFailed, match="adder: it has ended: KeyError: 'add'"):
            child.ask({})
    assert child.process.returncode == 1 and "not an answer" in (tmp_path / "log").read_text()


def test_the_command_gives_each_benchmark_the_options_it_has_and_exits_as_its_goals_were_met(monkeypatch, capsys):
    for name in BENCHES:
        parameters = inspect.signature(importlib.import_module(f"headrace.bench.{name}").run).parameters.keys()
        takers = {option for option, how in BENCH_OPTIONS.items() if name in how["help"].partition(":")[0].split(", ")}
        assert parameters == {"quick", "json_file", *takers}, name
    slow = {"slow": lambda: [[Row("slow", 2.0, "s", goal="≤ 1")]]}

    def measured(*, quick, json_file, device):
        assert device == "cpu"
        return run_parts("partial", slow, quick=quick, json_file=json_file)

    monkeypatch.setattr(partial, "run", measured)
    for arguments, status in ([], 1), (["--quick"], 0):
        with pytest.raises(SystemExit) as ended:
            main(["bench", "partial", "--device", "cpu", *arguments])
        assert ended.value.code == status
    assert capsys.readouterr().out.count("missed: slow: 2 s, goal ≤ 1") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine", "--seeds", "3"], "only `headrace bench lag or learn or presets or trl` has seeds"),
        (["step", "--losses=grpo"], "only `headrace bench learn` has losses"),
        (["overlap", "--device", "cpu"], "--device = cpu: only `headrace bench partial` has device"),
        (["engine", "--model", "no/such/folder"], "--model = no/such/folder: the folder does not exist"),
        (["trainer", "--only=heads"], "it has speed, long, head, mix, sharing"),
        (["learn", "--losses=grpo,gpro"], "'gpro' is none of those with settings here: grpo, grpo+dual_clip, cispo"),
        (["learn", "--losses=,"], "name at least one of grpo"),
    ],
)
def test_a_mistake_is_answered_before_anything_is_measured(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_two_ranks_are_held_to_twice_one_alone():
    seconds = {"one": 10.0, "alone": 12.0, "sharded": 6.25, "replicated": 6.25, "FSDP2 alone": 12.0, "FSDP2": 8.0}
    rows = {row.name: row for row in ranks._rows(seconds, tokens=100)}
    held = rows["sharded ÷ twice one alone"]
    assert [row for row in rows.values() if row.goal] == [held] and missed([held]) and held.value == 0.8
    assert rows["sharded ÷ two trainers at once"].value == rows["replicated ÷ two trainers at once"].value == 0.96
    assert rows["sharded ÷ two trainers at once"].peers == {"FSDP2": 0.75}
