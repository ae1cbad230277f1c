"""Where the kernels are tested: on a GPU if there is one, else in Triton's interpreter, which `tests/conftest.py` turns on."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ints(numbers: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device=DEVICE)
