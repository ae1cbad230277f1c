"""Keeps the gradients of a float16 model within float16's range: below 6e-8 they would round to 0, above 65,504 overflow."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MOST = 2.0**24
_GROWS_AFTER = 200  # steps without an overflow
_TOLERATED = 8  # overflows in a row: the scale is then 256 times smaller, and scaling is not what is wrong


@dataclass
class LossScale:
    """What the loss is multiplied by, a power of two, and gradients divided by after they are summed in float32."""

    value: float = 2.0**16
    num_clean: int = 0  # steps without an overflow since the scale last changed
    num_overflows: int = 0  # in a row

    def adapt(self, *, is_finite: bool) -> bool:
        """Take a step's outcome; return whether a gradient that is not finite is an overflow, which a smaller scale cures."""
        if is_finite:
            self.num_overflows, self.num_clean = 0, self.num_clean + 1
            if self.num_clean == _GROWS_AFTER:
                self.value, self.num_clean = min(2 * self.value, _MOST), 0
            return False
        self.value, self.num_clean, self.num_overflows = max(1.0, self.value / 2), 0, self.num_overflows + 1
        return self.num_overflows <= _TOLERATED

    def state(self) -> torch.Tensor:
        return torch.tensor([self.value, self.num_clean, self.num_overflows], dtype=torch.float64)

    def load(self, state: torch.Tensor) -> None:
        value, num_clean, num_overflows = state.tolist()
        self.value, self.num_clean, self.num_overflows = value, int(num_clean), int(num_overflows)
