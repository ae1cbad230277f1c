"""The settings under which each loss solves the quickstart, as overrides of its recipe: for `bench learn` to compare them by.

Losses whose clip drops tokens stand the recipe's learning rate. CISPO keeps a gradient on every token, and with one optimizer
step a version decoupled PPO has nothing to clip: at 1e-3 they ended at 96 and 91 % on seed 0, at half of it at 96 % or more on
each of five seeds (docs/losses.md).
"""

from __future__ import annotations

from typing import Any

LOSS_SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"train.loss": "grpo"},
    "gspo": {"train.loss": "gspo"},
    "cispo": {"train.loss": "cispo", "train.learning_rate": 5e-4},
    "decoupled_ppo": {"train.loss": "decoupled_ppo", "train.learning_rate": 5e-4},
}
