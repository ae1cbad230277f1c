"""The trainer on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from headrace.model.head import Head
from headrace.model.load import served_dtype
from headrace.model.packing import Packed, micro_batches, pack, packed_logprobs
from headrace.model.weights import named_tensors
from headrace.staleness import BATCH_WIDE
from headrace.train.columns import PROXIMAL
from headrace.train.diagnostics import Diagnostics, drawn_by
from headrace.train.losses import TokenTensors, missing_column, needed_columns
from headrace.train.objective import batch_correction, objective, ratio_base

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from headrace.config import TrainSettings
    from headrace.train.protocol import Metrics
    from headrace.types import Array, Batch, Rollout

OPTIMIZER_FILE = "trainer/optimizer.safetensors"
"""In a folder of its own: other readers take every .safetensors file beside the configuration for weights."""


class DeviceTrainer:
    """A `Trainer` of one model on one device."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase,
        settings: TrainSettings,
        exact: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model.eval()  # no dropout: the engine has none, and a gradient flows all the same
        self.num_passes = 0
        self._dtype = dtype
        self._tokenizer = tokenizer
        self._settings = settings
        self._exact = exact
        self._head = Head(model, exact=exact)
        self._device = next(model.parameters()).device
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        decayed = [p for p in self._parameters.values() if p.ndim >= 2]
        spared = [p for p in self._parameters.values() if p.ndim < 2]
        self._optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": spared, "weight_decay": 0.0}],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            fused=True,
        )

    def forward(self, batch: Batch, *, column: str = PROXIMAL) -> list[Array]:
        if column != PROXIMAL:
            raise ValueError(f"the column {column!r} is asked for, and this trainer computes only {PROXIMAL!r}")
        results = [np.zeros(len(rollout), dtype=np.float32) for rollout in batch.rollouts]
        for members in self._passes(batch.rollouts):
            packed = self._pack([batch.rollouts[member] for member in members])
            self.num_passes += 1
            with torch.no_grad(), self._precision():
                logprobs, _ = packed_logprobs(self.model, self._head, packed, exact=self._exact)
            values, sequence = logprobs.cpu().numpy(), packed.sequence.cpu().numpy()
            for place, member in enumerate(members):
                results[member][batch.rollouts[member].loss_mask] = values[sequence == place]
        return results

    def forward_backward(self, batch: Batch) -> Metrics:
        self._check_columns(batch)
        sums = Diagnostics()
        corrections = self._batch_correction(batch)
        for members in self._passes(batch.rollouts):
            packed = self._pack([batch.rollouts[member] for member in members])
            self.num_passes += 1
            loss = self._loss(batch, members, packed, sums, corrections)
            loss.backward()
        return sums.metrics()

    def optim_step(self, learning_rate: float) -> Metrics:
        limit = self._settings.max_grad_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), limit))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        is_finite = bool(np.isfinite(norm))
        if is_finite:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm if is_finite else -1.0, "skipped": float(not is_finite), "learning_rate": learning_rate}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Weights are float32 here, so that small steps are not lost, and leave in the dtypes the engine holds them in."""
        for name, tensor in named_tensors(self.model):
            yield name, tensor.to(served_dtype(self.model, tensor, self._dtype))

    def save(self, folder: Path) -> None:
        transformers_logging.disable_progress_bar()
        self.model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        (folder / OPTIMIZER_FILE).parent.mkdir(exist_ok=True)
        save_file(self._optimizer_tensors(), folder / OPTIMIZER_FILE)

    def load(self, folder: Path) -> None:
        transformers_logging.disable_progress_bar()
        theirs = dict(named_tensors(type(self.model).from_pretrained(folder, dtype=torch.float32)))
        with torch.no_grad():
            for name, tensor in named_tensors(self.model):
                tensor.copy_(theirs[name])
        state = load_file(folder / OPTIMIZER_FILE)
        for name, parameter in self._parameters.items():
            if f"{name}.step" in state:
                entries = {key: state[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
                self._optimizer.state[parameter] = {key: value.to(self._device) for key, value in entries.items()}

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._dtype == torch.bfloat16)

    def _passes(self, rollouts: Sequence[Rollout]) -> list[list[int]]:
        return micro_batches([len(rollout) for rollout in rollouts], budget=self._settings.micro_batch_tokens)

    def _pack(self, rollouts: Sequence[Rollout]) -> Packed:
        return pack(rollouts, [rollout.loss_mask for rollout in rollouts], device=self._device, exact=self._exact)

    def _check_columns(self, batch: Batch) -> None:
        """Every column that is needed and not the one this trainer computes came with the rollouts."""
        for column in needed_columns(batch.loss, batch.correction, batch.kl):
            if column != PROXIMAL and not all(column in rollout.columns for rollout in batch.rollouts):
                raise missing_column(f"the batch of version {batch.version}", column)

    def _batch_correction(self, batch: Batch) -> list[Array] | None:
        """Where the correction judges a token by all others of the batch, its weights, computed before the first pass."""
        if batch.correction not in BATCH_WIDE:
            return None
        has_column = all(PROXIMAL in rollout.columns for rollout in batch.rollouts)
        proximal = [rollout.columns[PROXIMAL] for rollout in batch.rollouts] if has_column else self.forward(batch)
        return batch_correction(batch, proximal)

    def _loss(
        self, batch: Batch, members: list[int], packed: Packed, sums: Diagnostics, corrections: list[Array] | None
    ) -> Tensor:
        rollouts = [batch.rollouts[member] for member in members]
        with self._precision():
            logprobs, entropy = packed_logprobs(self.model, self._head, packed, exact=self._exact)
        recorded = packed.gather([rollout.logprobs for rollout in rollouts])
        shared = set.intersection(*(set(rollout.columns) for rollout in batch.rollouts))
        columns = {name: packed.gather([rollout.columns[name] for rollout in rollouts]) for name in sorted(shared)}
        proximal = columns.get(PROXIMAL, logprobs.detach())
        tokens = TokenTensors(
            logprobs=logprobs,
            recorded=recorded,
            proximal=proximal,
            old=ratio_base(batch.correction, recorded=recorded, proximal=proximal),
            advantages=packed.gather([batch.advantages[member] for member in members]),
            sequence=packed.sequence,
            num_sequences=len(members),
            versions=packed.gather([rollout.versions for rollout in rollouts]),
            version=batch.version,
            columns=columns,
            entropy=entropy,
        )
        weights = packed.gather([batch.weights[member] for member in members])
        correction = None if corrections is None else packed.gather([corrections[member] for member in members])
        asked = objective(tokens, weights, batch, correction=correction)
        is_current = packed.gather([drawn_by(rollout, batch.version) for rollout in rollouts])
        sums.add(asked, tokens, is_current=is_current)
        return asked.loss

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        state = self._optimizer.state
        return {
            f"{name}.{key}": value.contiguous()
            for name, parameter in self._parameters.items()
            if parameter in state
            for key, value in state[parameter].items()
        }
