"""A trainer on several ranks gives what one rank gives: loss, metrics, gradient, step, scores."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from families import make
from torch._C._distributed_c10d import FileStore
from trainer_ranks import CASES, GROUPS, read, resume, run_case, run_ranks

from headrace.durable import seal
from headrace.model.load import prepare
from headrace.model.tiny import build_tokenizer
from headrace.settings import ConfigError
from headrace.trainer import DeviceTrainer, ParallelSettings, RankError, Ranks, TrainSettings

if TYPE_CHECKING:
    from pathlib import Path

Found = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Found]:
    """What one rank gives, case by case."""
    return {case: run_case(case, None, folder) for case in CASES}


@pytest.fixture(scope="module")
def two(folder: Path, alone: dict[str, Found]) -> Path:
    run_ranks(folder, replicate=1, shard=2, cases=list(alone))
    return folder


def whole(parts: list[dict[str, torch.Tensor]], what: str, expected: dict[str, tuple[int, torch.Tensor]]) -> torch.Tensor:
    """The ranks' pieces put together, in the order of `expected`; each element must come from exactly one rank."""
    found = {name: torch.full_like(each, float("nan")) for name, (_, each) in expected.items()}
    for part in parts:
        for key, piece in part.items():
            kind, _, rest = key.partition("/")
            start, _, name = rest.partition("/")
            if kind == what:
                place = found[name][int(start) : int(start) + len(piece)]
                assert place.isnan().all() and len(place) == len(piece)
                place.copy_(piece)
    return torch.cat([each.float() for each in found.values()])


def check(case: str, expected: Found, folder: Path, *, ranks: int, shard: int) -> None:
    every = [read(folder / f"{case}-{rank}") for rank in range(ranks)]
    tensors, plain = [each[0] for each in every], [each[1] for each in every]
    is_narrow = case in ("bfloat16", "float16")
    near = {"rel": 3e-2, "abs": 3e-3} if is_narrow else {"rel": 2e-4, "abs": 1e-5}
    assert len({each["passes"] for each in plain}) == 1
    for what in ("first", "stepped", "second"):
        for other in plain:
            assert other[what].keys() == expected[what].keys() - {"memory_peak"}
            assert other[what] == plain[0][what]
        for name, value in plain[0][what].items():
            if is_narrow and name not in ("loss", "tokens", "entropy", "grad_norm", "loss_scale"):
                continue  # rounding differs from pass to pass
            assert value == pytest.approx(expected[what][name], **near), (case, what, name)
    assert plain[0]["first"]["loss"] == pytest.approx(expected["first"]["loss"], rel=1e-5, abs=1e-3 if is_narrow else 1e-7)
    theirs = torch.cat([each for _, each in expected["gradient"].values()])
    difference = whole(tensors, "gradient", expected["gradient"]) - theirs
    assert float(difference.norm() / theirs.norm()) < (2e-2 if is_narrow else 1e-5), case
    theirs = torch.cat([each.float() for _, each in expected["after"].values()])
    difference = (whole(tensors, "after", expected["after"]) - theirs).abs()
    assert float(difference.max()) < 5e-7, f"{case}: another step, given the same gradient"
    theirs = torch.cat([each.float() for _, each in expected["weights"].values()])
    for what in ("weights", "resumed"):
        difference = (whole(tensors, what, expected["weights"]) - theirs).abs()
        assert float(difference.max()) < 5e-3 and float(difference.mean()) < (1e-4 if is_narrow else 2e-6), (case, what)
    for part in tensors:
        for place, scores in enumerate(expected["forward"]):
            np.testing.assert_allclose(part[f"forward/{place}"].numpy(), scores, atol=0.3 if is_narrow else 2e-4)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_give_what_one_gives(two: Path, alone: dict[str, Found], case: str) -> None:
    check(case, alone[case], two, ranks=2, shard=2)


@pytest.mark.parametrize("case", CASES)
def test_one_rank_goes_on_from_the_checkpoint_of_two(two: Path, alone: dict[str, Found], case: str) -> None:
    saved = two / f"saved-{case}-2"
    files = {path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()}
    told = [read(two / f"{case}-{rank}")[1]["files"] for rank in range(2)]
    assert files == told[0].keys() | told[1].keys() and not told[0].keys() & told[1].keys()
    assert {**told[0], **told[1]} == seal(saved)
    theirs, ours = alone[case]["weights"], resume(case, None, saved)["weights"]
    for name, (_, expected) in theirs.items():
        torch.testing.assert_close(ours[name][1], expected, atol=5e-3, rtol=0.0)
    difference = torch.cat([(ours[name][1].float() - each.float()).abs() for name, (_, each) in theirs.items()])
    assert float(difference.mean()) < (1e-4 if case in ("bfloat16", "float16") else 2e-6)


def test_a_rank_reads_its_share_of_the_files(two: Path, alone: dict[str, Found]) -> None:
    for case in ("plain", "tied", "lora", "bfloat16", "experts"):
        of = case if case in ("tied", "experts") else "plain"  # the same model, all of it trained in float32
        sizes = [each.nbytes for _, each in alone[of]["weights"].values()]
        reads = [read(two / f"{case}-{rank}")[1]["read"] for rank in range(2)]
        assert max(max(each) for each in reads) <= max(sizes)
        if case != "experts":  # whose tensors are made of many in files
            rows = 2 * 4 * 96 * len(sizes)  # the first and the last of a range are read whole
            assert all(sum(sizes) / 2 - rows <= sum(each) <= sum(sizes) / 2 + rows for each in reads), case


@pytest.mark.long
@pytest.mark.parametrize(("replicate", "shard"), [(2, 1), (2, 2), (1, 4)])
def test_other_layouts_give_it_too(folder: Path, alone: dict[str, Found], replicate: int, shard: int, tmp_path: Path) -> None:
    cases = [case for case in CASES if shard > 1 or case != "full disk"]  # with one shard, only rank 0 writes
    for case in cases:
        (tmp_path / f"saved-{case}-1").symlink_to(folder / f"saved-{case}-1")
    run_ranks(tmp_path, replicate=replicate, shard=shard, cases=cases)
    for case in cases:
        check(case, alone[case], tmp_path, ranks=replicate * shard, shard=shard)


def test_a_rank_that_is_missing_or_of_another_layout_is_named(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/missing"
    with pytest.raises(RankError, match=r"of 2 trainer ranks, 1 did not join within 0.2 s"):
        Ranks.join(ParallelSettings(shard=2), rank=0, address=address, timeout=0.2)
    store = FileStore(str(tmp_path / "other"), 2)
    store.set("joined/1", '{"wire": 0}')
    with pytest.raises(RankError, match=r"rank 1 is not like rank 0: it has \{\"wire\": 0\}"):
        Ranks.join(ParallelSettings(shard=2), rank=0, address=f"file://{tmp_path}/other", timeout=5)


def test_a_rank_may_write_its_share_of_a_checkpoint_for_longer_than_a_collective_may_take(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        address = f"file://{tmp_path}/slow"
        ranks = Ranks.join(ParallelSettings(shard=2), rank=rank, address=address, timeout=1.0)
        time.sleep(1.5 * rank)
        ranks.wait(ranks.saving.barrier(), "saving")
        ranks.close()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(save, range(2)))


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    ranks = Ranks(ParallelSettings(shard=2), rank=0, device=torch.device("cpu"))
    follows = {"kl": 0.1, "reference_every": 2}
    for family, settings, told in (
        ("llama", {"optimizer": "muon"}, "train.optimizer = 'muon' needs whole matrices"),
        ("llama", {**follows, "parameters": GROUPS}, r"train.reference_every.*model.layers.0.* is not"),
        ("deepseek_v3", follows, r"train.reference_every.*e_score_correction_bias is not"),  # a buffer
    ):
        model = prepare(make(family), name=family)
        with pytest.raises(ConfigError, match=told):
            DeviceTrainer(model, tokenizer=build_tokenizer(), settings=TrainSettings(**settings), ranks=ranks)
