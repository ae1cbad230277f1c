"""The learning rate as a function of the version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from headrace.config import make_recipe
from headrace.launch.build import check_optimizer
from headrace.launch.folder import Comparison
from headrace.launch.inputs import UserInputs, fingerprint_inputs
from headrace.settings import ConfigError
from headrace.trainer import TrainSettings, learning_rate

if TYPE_CHECKING:
    from pathlib import Path


def rates(steps: int = 10, **settings) -> list[float]:
    chosen = TrainSettings(learning_rate=1.0, **settings)
    return [learning_rate(chosen, version=version, steps=steps) for version in range(steps)]


def test_each_schedule_falls_to_its_floor() -> None:
    assert rates() == [1.0] * 10
    assert rates(schedule="linear") == pytest.approx([1 - version / 10 for version in range(10)])
    cosine = rates(steps=1000, schedule="cosine", final_learning_rate=0.1)
    assert cosine[0] == 1 and cosine[500] == pytest.approx(0.55) and cosine[-1] == pytest.approx(0.1, abs=1e-4)
    wsd = rates(schedule="wsd", decay_steps=4, warmup_steps=1, final_learning_rate=0.2)
    assert wsd == pytest.approx([0.5, *[1.0] * 6, 0.8, 0.6, 0.4])
    assert rates(steps=30, schedule="wsd") == pytest.approx([*[1.0] * 28, 2 / 3, 1 / 3])


def test_a_schedule_of_ones_own_gives_the_factor(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def steps(version, steps):\n    return 1.0 if version < steps // 2 else 0.1\n")
    found = rates(steps=4, schedule=f"{tmp_path / 'mine.py'}:steps", warmup_steps=1)
    assert found == pytest.approx([0.5, 1.0, 0.1, 0.1])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("f = 3", "it is no function; it must take (version, steps)"),
        ("def f(version, steps): return version - 1", "it returned -1 for version 0 of 100; return the factor"),
        (
            "def f(version, steps): return 1 / (steps - version - 1)",
            "it raised ZeroDivisionError('division by zero')",
        ),
        ("def f(version): return 1", "it raised TypeError"),
        ("def g(version, steps): return 1", "has no 'f'"),
    ],
)
def test_a_wrong_one_is_refused_before_anything_is_loaded(tmp_path: Path, code: str, message: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(code)
    sft = {"sft.epochs": 2, "sft.batch": 4, "sft.tasks": [{"source": str(tmp_path / "rows.jsonl")}]}
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 200)
    for section, more in (("train", {}), ("sft", sft)):
        with pytest.raises(ConfigError) as refused:
            check_optimizer(make_recipe({f"{section}.schedule": f"{file}:f", **more}), UserInputs())
        assert str(refused.value).startswith(f"{section}.schedule = '{file}:f': ") and message in str(refused.value)


def test_a_run_without_steps_needs_no_factor(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(version, steps): return 1 - version / steps")
    settings = {"steps": 0, "train.schedule": f"{tmp_path / 'mine.py'}:f", "sft.steps": 3}
    check_optimizer(make_recipe(settings), UserInputs())


@pytest.mark.parametrize(("version", "steps", "is_noted"), [(0, 0, False), (4, 4, False), (2, 4, False), (4, 8, True)])
def test_a_resumed_run_asks_for_factors_of_its_steps_only(tmp_path: Path, version: int, steps: int, is_noted: bool) -> None:
    (tmp_path / "mine.py").write_text("def f(version, steps): return 1 / (steps - version)")
    recipe = make_recipe({"steps": steps, "train.schedule": f"{tmp_path / 'mine.py'}:f", "sft.steps": 3})
    before = Comparison(tmp_path, {"status": "stopped"}, steps=min(4, steps))
    notes = before.check(recipe, version=version, resume_anyway=False)
    assert any("schedule now ends at version 8" in note for note in notes) == is_noted


def test_another_schedule_under_the_same_name_is_noticed(tmp_path: Path) -> None:
    """A resumed run, and the cache of fine-tuned models, are told apart by it."""
    for key in ("train.schedule", "sft.schedule"):
        found = []
        for number in (1, 2):
            file = tmp_path / str(number) / "mine.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"def f(version, steps): return {number}")
            recipe = make_recipe({key: f"{file}:f", "tasks": [{"source": "builtin:sort_digits"}]})
            found.append(fingerprint_inputs(recipe, UserInputs())[key][1])
        assert found[0] != found[1]
