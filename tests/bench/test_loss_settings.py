"""The settings that losses are compared with are ones a run would take."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.loss_settings import LOSS_SETTINGS
from headrace.config import load_recipe
from headrace.orchestrate.build import check_columns, check_loss
from headrace.orchestrate.inputs import UserInputs

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"


@pytest.mark.parametrize("name", LOSS_SETTINGS)
def test_the_quickstart_takes_them(name: str) -> None:
    recipe = load_recipe(QUICKSTART, LOSS_SETTINGS[name])
    assert recipe.train.loss == name
    check_loss(recipe)
    check_columns(recipe, UserInputs())


def test_the_losses_that_must_solve_it_are_there() -> None:
    assert {"grpo", "gspo", "cispo", "decoupled_ppo"} <= LOSS_SETTINGS.keys()
