"""Two trainer ranks on one GPU, joined over NCCL, give what one gives. A rank that hangs ends by itself and says where; the
logs of both are in the failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from trainer_ranks import read, run_case, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("case", ["plain", "tied", "lora", "experts", "reference", "bfloat16"])  # the last is compiled
def test_two_ranks_give_what_one_gives(case: str, tmp_path: Path) -> None:
    expected = run_case(case, None, tmp_path, "cuda")
    run_ranks(tmp_path, replicate=1, shard=2, cases=[case], device="cuda")
    every = [read(tmp_path / f"{case}-{rank}") for rank in range(2)]
    is_narrow = case == "bfloat16"
    near: dict[str, Any] = {"rel": 3e-2, "abs": 3e-3} if is_narrow else {"rel": 1e-4}
    for what, name in (("first", "loss"), ("stepped", "grad_norm"), ("second", "loss")):
        assert every[0][1][what][name] == pytest.approx(expected[what][name], **near), what
    for what in ("gradient", "weights"):
        squares, difference = 0.0, 0.0
        pieces = [(*key.split("/", 2), each) for part, _ in every for key, each in part.items() if key.startswith(what)]
        for _, start, name, piece in pieces:
            theirs = expected[what][name][1][int(start) : int(start) + len(piece)].float()
            squares += float(theirs.norm() ** 2)
            difference += float((theirs - piece.float()).norm() ** 2)
        assert difference <= squares * (2e-2 if is_narrow else 1e-5) ** 2, what
