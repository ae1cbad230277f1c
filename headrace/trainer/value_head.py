"""The value head estimates the reward still to come from the hidden state that a token is sampled from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class ValueHead(nn.Module):
    """One float32 value per hidden state. All values start at 0, so that the first advantages are plain rewards."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        width, device = int(model.config.get_text_config().hidden_size), next(model.parameters()).device
        self.weight = nn.Parameter(torch.zeros(1, width, device=device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows]."""
        return nn.functional.linear(hidden.float(), self.weight, self.bias).squeeze(1)
