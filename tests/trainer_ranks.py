"""A trainer on several ranks, one process each, joined over gloo. `run_ranks` starts this file once per rank; each runs the
same cases and leaves what it found in a folder."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from families import make
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from siblings import mixed

from headrace.algorithms.columns import REFERENCE, RETURNS, VALUES
from headrace.lora import LoraSettings, add_adapter, has_bitsandbytes, hold_in_four_bits, round_weights
from headrace.model import ShardedWeights, WeightFiles, load_model, weight_files
from headrace.model.load import prepare
from headrace.model.tiny import build_tokenizer
from headrace.records import Batch
from headrace.trainer import (
    DeviceTrainer,
    FrozenModel,
    ParallelSettings,
    ParameterSettings,
    Ranks,
    TrainSettings,
    saving,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PHASE_SECONDS = {"cpu": 280.0, "cuda": 120.0}
"""A rank that is in one phase for so long prints where, and ends. On a GPU its collectives give up shortly before."""
_AFTER_FAILURE = 5.0
FAMILY = {"experts": "qwen3_moe", "tied": "qwen3", "latent": "deepseek_v3"}
DTYPE = {"bfloat16": torch.bfloat16, "float16": torch.float16}
GROUPS = (ParameterSettings(match="*.layers.0.*", freeze=True), ParameterSettings(match="*.mlp.*", weight_decay=0.1))
CASES: dict[str, dict[str, Any]] = {
    "plain": {"max_grad_norm": 0.0},
    "clipped": {"max_grad_norm": 0.01, "weight_decay": 0.1},
    "tied": {"recompute": "layers"},
    "one pass": {"micro_batch_tokens": 4096},
    "groups": {"parameters": GROUPS, "optimizer": "adamw_8bit"},
    "rates": {"parameters": (ParameterSettings(match="*k_proj*", learning_rate=0.1),)},
    "lora": {},
    **({"four bits": {}} if has_bitsandbytes() else {}),
    "values": {"loss": "ppo", "advantage": "gae"},
    "reference": {"kl": 0.05, "reference_every": 1, "reference_mix": 0.5, "offload": ("reference",)},  # on a GPU
    "experts": {"router_aux": 0.01, "router_z": 0.01},
    "latent": {},
    "bfloat16": {},
    "float16": {},
    "corrected": {},
    "parts": {"max_grad_norm": 0.01},
    "full disk": {},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "reference": {"kl": "k3", "kl_weight": 0.05},
    "clipped": {"loss": "grpo"},
    "corrected": {"corrections": {"tis": {"cap": 2.0, "floor": 0.0}, "m2po": {"limit": 4.0}}},
    "values": {"loss": "ppo", "constants": {}},
    "parts": {"gradient_scale": 0.5},
}


def make_batch(case: str) -> Batch:
    random, rollouts = np.random.default_rng(1), mixed()
    total = sum(rollout.num_sampled for rollout in rollouts)
    if case == "values":
        zeros = [np.zeros(len(each), np.float32) for each in rollouts]
        rollouts = [
            each.replace(columns={VALUES: zero, RETURNS: each.loss_mask.astype(np.float32)})
            for each, zero in zip(rollouts, zeros, strict=True)
        ]
    columns: dict[str, Any] = {
        "rollouts": tuple(rollouts),
        "advantages": tuple(np.where(each.loss_mask, random.normal(), 0).astype(np.float32) for each in rollouts),
        "weights": tuple((each.loss_mask / total).astype(np.float32) for each in rollouts),
        "loss": "reinforce",
        "version": 0,
    }
    return Batch(**{**columns, **OPTIONS.get(case, {})})


def in_parts(batch: Batch) -> list[Batch]:
    """In three, of which the last scales the gradient."""
    found = []
    for number, places in enumerate(np.array_split(np.arange(len(batch.rollouts)), 3)):
        members = slice(places[0], places[-1] + 1)
        fields: dict[str, Any] = {name: getattr(batch, name)[members] for name in ("rollouts", "advantages", "weights")}
        last = {"gradient_scale": batch.gradient_scale} if number == 2 else {"is_last": False, "gradient_scale": 1.0}
        found.append(dataclasses.replace(batch, **fields, **last, part=number))
    return found


def make_trainer(case: str, ranks: Ranks | None, device: str = "cpu") -> DeviceTrainer:
    def model(lora: LoraSettings | None = None) -> Any:
        made = make(FAMILY.get(case, "llama"), **({"tie_word_embeddings": True} if case == "tied" else {}))
        if ranks is not None and ranks.shard > 1 and case != "four bits":  # each reads its share of the files
            made.save_pretrained(saved.name, max_shard_size="100KB" if case == "plain" else "1GB")
            return load_model(saved.name, lora=lora, seed=3, in_parts=True)
        prepare(made if ranks is not None else made.to(device), name=case)
        if lora is not None:
            add_adapter(made, lora, seed=3)
        return made

    saved = tempfile.TemporaryDirectory()
    learner, frozen = model(LoraSettings(rank=4) if case == "lora" else None), {}
    if case == "four bits":
        lora = LoraSettings(rank=4, quantize="nf4")
        round_weights(learner, lora, device="cpu")
        add_adapter(learner, lora, seed=3)
        hold_in_four_bits(learner, lora, device="cpu" if ranks is not None else device)
    if case == "reference":
        frozen = {REFERENCE: FrozenModel(model(), offload=True, ranks=ranks)}
    settings = TrainSettings(**{"micro_batch_tokens": 64, "eps": 1e-2, **CASES[case]})
    dtype = DTYPE.get(case, torch.float32)
    with saved:
        return DeviceTrainer(learner, tokenizer=build_tokenizer(), settings=settings, dtype=dtype, frozen=frozen, ranks=ranks)


class CountedFile:
    """A safetensors file that counts the bytes that are read of it."""

    num_bytes = 0

    def __init__(self, path: str, framework: str) -> None:
        self._file = safe_open(path, framework)

    def __enter__(self) -> CountedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__(None, None, None)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_tensor(self, key: str) -> torch.Tensor:
        return self.counted(self._file.get_tensor(key))

    def get_slice(self, key: str) -> Any:
        rows = self._file.get_slice(key)
        read = type("Rows", (), {"get_shape": lambda _: rows.get_shape(), "__getitem__": lambda _, at: self.counted(rows[at])})
        return read()

    @staticmethod
    def counted(tensor: torch.Tensor) -> torch.Tensor:
        CountedFile.num_bytes += tensor.nbytes
        return tensor


def make_counted(case: str, ranks: Ranks | None, device: str) -> tuple[DeviceTrainer, list[int]]:
    """A trainer, and the bytes that were read for each tensor of its model, or its models."""
    found: list[int] = []
    read = WeightFiles.read

    def counted(self: WeightFiles, *given: Any) -> torch.Tensor:
        before = CountedFile.num_bytes
        tensor = read(self, *given)
        found.append(CountedFile.num_bytes - before)
        return tensor

    with patch.object(weight_files, "safe_open", CountedFile), patch.object(WeightFiles, "read", counted):
        return make_trainer(case, ranks, device), found


def pieces(trainer: DeviceTrainer, tensor_of: Callable[[str], torch.Tensor]) -> dict[str, tuple[int, torch.Tensor]]:
    """What this rank trains: of each tensor its first element, and the elements."""
    first = trainer.arena.first
    return {name: (first.get(name, 0), tensor_of(name).flatten()) for name in trainer.optimizer.names}


def copied_once(mine: dict[str, tuple[int, torch.Tensor]], trainer: DeviceTrainer, ranks: Ranks | None) -> dict[str, Any]:
    """Without what another rank has as well."""
    is_first = ranks is None or ranks.rank == 0
    is_own = {name: is_first or not (ranks.replica or name not in trainer.arena.first) for name in mine}
    return {name: (start, each.to("cpu", copy=True)) for name, (start, each) in mine.items() if is_own[name]}


def gradient_file(folder: Path, case: str) -> Path:
    return folder / f"saved-{case}-1" / "gradient.safetensors"


@contextlib.contextmanager
def one_gradient(trainer: DeviceTrainer, ranks: Ranks | None, path: Path, found: dict[str, Any]) -> Iterator[None]:
    """Note the gradient that a step takes, and let the step of several ranks take that of one rank, if there is its file."""
    add_up = trainer.optimizer._add_up

    def noted() -> None:
        add_up()
        mine = pieces(trainer, trainer.optimizer.gradient)
        found["gradient"] = copied_once(mine, trainer, ranks)
        if ranks is None:
            path.parent.mkdir(exist_ok=True)
            save_file({name: each for name, (_, each) in found["gradient"].items()}, path)
        elif path.exists():
            theirs = load_file(path)
            for name, (start, each) in mine.items():
                each.copy_(theirs[name][start : start + len(each)])

    with patch.object(trainer.optimizer, "_add_up", noted):
        yield


def weights(trainer: DeviceTrainer) -> dict[str, tuple[int, torch.Tensor]]:
    given = trainer.tensors()
    if isinstance(given, ShardedWeights):
        return {name: (start, tensor.cpu()) for name, start, _, tensor in given}
    return {name: (0, tensor.flatten().cpu()) for name, tensor in given}


def begin(phase: str, case: str, ranks: Ranks | None, device: str) -> None:
    """A rank says what it does next; another than the last must begin in time."""
    if ranks is None:
        return
    if device == "cuda":
        torch.cuda.synchronize()  # or a collective that hangs would be found in a later phase
    faulthandler.dump_traceback_later(_PHASE_SECONDS[device], exit=True)
    print(f"{time.strftime('%X')} rank {ranks.rank}: {case}: {phase}", flush=True)


def run_case(case: str, ranks: Ranks | None, folder: Path, device: str = "cpu") -> dict[str, Any]:
    """A step, a checkpoint, and a second step of a trainer that has loaded it; and another of one that has loaded that of one
    rank, if there is such a folder."""
    begin("make", case, ranks, device)
    (trainer, read), batch = make_counted(case, ranks, device), make_batch(case)
    begin("forward_backward", case, ranks, device)
    batches = in_parts(batch) if case == "parts" and ranks is not None else [batch]
    found: dict[str, Any] = {"first": [trainer.forward_backward(each) for each in batches][-1], "read": read}
    begin("optim_step", case, ranks, device)
    with one_gradient(trainer, ranks, gradient_file(folder, case), found):
        found["stepped"] = trainer.optim_step(1e-3)
    found["after"] = copied_once(pieces(trainer, trainer.optimizer.master), trainer, ranks)  # in float32
    if CASES[case].get("reference_every"):
        trainer.mix_reference(0.5)
    begin("forward", case, ranks, device)
    found["forward"] = trainer.forward(batch)
    begin("save", case, ranks, device)
    saved = folder / f"saved-{case}-{1 if ranks is None else ranks.count}"
    saved.mkdir(exist_ok=True)
    if case == "full disk" and ranks is not None:
        check_full_disk(trainer, ranks, folder)
    found["files"] = trainer.save(saved)
    if ranks is not None:
        ranks.exchange({})  # all have written
    found |= resume(case, ranks, saved, device)
    found["passes"] = trainer.num_passes
    other = folder / f"saved-{case}-1"
    if ranks is not None and other.exists():
        found["resumed"] = resume(case, ranks, other, device)["weights"]
    return found


def check_full_disk(trainer: DeviceTrainer, ranks: Ranks, folder: Path) -> None:
    """A rank that cannot write says so, and does not leave the others in a collective: the next checkpoint is whole."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    lost = folder / "saved-in-vain"
    lost.mkdir(exist_ok=True)
    if ranks.rank != 1:
        trainer.save(lost)
        return
    with patch.object(saving, "save_file", fail), pytest.raises(OSError, match="No space left"):
        trainer.save(lost)


def resume(case: str, ranks: Ranks | None, saved: Path, device: str = "cpu") -> dict[str, Any]:
    """A step of a trainer that goes on from a checkpoint."""
    begin(f"resume from {saved.name}", case, ranks, device)
    trainer = make_trainer(case, ranks, device)
    trainer.load(saved)
    begin(f"step from {saved.name}", case, ranks, device)
    found: dict[str, Any] = {"second": trainer.forward_backward(make_batch(case))}
    trainer.optim_step(1e-3)
    return {**found, "weights": weights(trainer)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--replicate", type=int, required=True)
    parser.add_argument("--shard", type=int, required=True)
    parser.add_argument("--cases", nargs="+", required=True)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.dump_traceback_later(_PHASE_SECONDS[given.device], exit=True)
    print(f"rank {given.rank}: join", flush=True)
    settings = ParallelSettings(replicate=given.replicate, shard=given.shard)
    ranks = Ranks.join(settings, rank=given.rank, address=f"file://{given.folder}/rendezvous", device=given.device, timeout=100)
    for case in given.cases:
        write(run_case(case, ranks, given.folder, given.device), given.folder / f"{case}-{given.rank}")
    begin("leave", "all cases", ranks, given.device)
    ranks.exchange({})  # one that leaves ends the collectives that others are still in
    ranks.close()
    faulthandler.cancel_dump_traceback_later()


def write(found: dict[str, Any], path: Path) -> None:
    tensors, plain = {}, {"passes": found["passes"], "files": found["files"], "read": found["read"]}
    for what in ("gradient", "after", "weights", "resumed"):
        tensors |= {f"{what}/{start}/{name}": each.contiguous() for name, (start, each) in found.get(what, {}).items()}
    tensors |= {f"forward/{place}": torch.from_numpy(each.copy()) for place, each in enumerate(found["forward"])}
    for what in ("first", "stepped", "second"):
        plain[what] = {name: value for name, value in found[what].items() if name != "memory_peak"}
    save_file(tensors, path.with_suffix(".safetensors"))
    path.with_suffix(".json").write_text(json.dumps(plain))


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return load_file(path.with_suffix(".safetensors")), json.loads(path.with_suffix(".json").read_text())


def run_ranks(folder: Path, *, replicate: int, shard: int, cases: list[str], device: str = "cpu", seconds: float = 300) -> None:
    """Start the ranks and wait for them. On a GPU they share it, which NCCL allows to ranks of different hosts alone."""
    command = [sys.executable, __file__, str(folder), "--replicate", str(replicate), "--shard", str(shard)]
    command += ["--device", device, "--cases", *cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NCCL_SOCKET_IFNAME": "lo"}
    environment |= {f"NCCL_{way}_DISABLE": "1" for way in ("P2P", "SHM", "IB")}
    logs = [(folder / f"rank-{rank}.log").open("w+") for rank in range(replicate * shard)]
    running = [
        subprocess.Popen(
            [*command, "--rank", str(rank)], env={**environment, "NCCL_HOSTID": f"host{rank}"}, stdout=log, stderr=log
        )
        for rank, log in enumerate(logs)
    ]
    end, codes = time.monotonic() + seconds, list[int | None]()
    try:
        while None in (codes := [each.poll() for each in running]) and time.monotonic() < end:
            end = min(end, time.monotonic() + _AFTER_FAILURE) if any(codes) else end
            time.sleep(0.05)
    finally:
        for process in running:
            process.send_signal(signal.SIGABRT)  # it says where it was
            process.wait()
    assert codes == [0] * len(codes), "\n".join([f"exit codes {codes}", *(Path(log.name).read_text() for log in logs)])


if __name__ == "__main__":
    main()
