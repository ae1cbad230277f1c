"""Two trainer ranks on one GPU, joined over NCCL, give what one gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from trainer_ranks import read, run_case, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CASES = ["plain", "tied", "lora", "experts", "reference"]


def test_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    alone = {case: run_case(case, None, tmp_path, "cuda") for case in CASES}
    run_ranks(tmp_path, replicate=1, shard=2, cases=CASES, device="cuda")
    for case, expected in alone.items():
        every = [read(tmp_path / f"{case}-{rank}") for rank in range(2)]
        for what, name in (("first", "loss"), ("stepped", "grad_norm"), ("second", "loss")):
            assert every[0][1][what][name] == pytest.approx(expected[what][name], rel=1e-4), (case, what)
        for what in ("gradient", "weights"):
            squares, difference = 0.0, 0.0
            pieces = [(*key.split("/", 2), each) for part, _ in every for key, each in part.items() if key.startswith(what)]
            for _, start, name, piece in pieces:
                theirs = expected[what][name][1][int(start) : int(start) + len(piece)]
                squares, difference = squares + float(theirs.norm() ** 2), difference + float((theirs - piece).norm() ** 2)
            assert difference <= squares * 1e-10, (case, what)
