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
from headrace.observe.memory import peak_memory
from headrace.staleness import importance_weights
from headrace.train.losses import TokenTensors, call_loss

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from headrace.config import TrainSettings
    from headrace.train.protocol import Metrics
    from headrace.types import Array, Batch, Rollout

PROXIMAL = "proximal"
"""The column that holds logprobs under the policy at the start of the version."""
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

    def forward(self, batch: Batch) -> list[Array]:
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
        sums = _Sums()
        for members in self._passes(batch.rollouts):
            packed = self._pack([batch.rollouts[member] for member in members])
            self.num_passes += 1
            loss = self._loss(batch, members, packed, sums)
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
        return {
            "grad_norm": norm if is_finite else -1.0,
            "skipped": float(not is_finite),
            "learning_rate": learning_rate,
            "memory_peak": float(peak_memory(self._device)),
        }

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

    def _loss(self, batch: Batch, members: list[int], packed: Packed, sums: _Sums) -> Tensor:
        rollouts = [batch.rollouts[member] for member in members]
        with self._precision():
            logprobs, entropy = packed_logprobs(self.model, self._head, packed, exact=self._exact)
        recorded = packed.gather([rollout.logprobs for rollout in rollouts])
        shared = set.intersection(*(set(rollout.columns) for rollout in batch.rollouts))
        columns = {name: packed.gather([rollout.columns[name] for rollout in rollouts]) for name in sorted(shared)}
        proximal = columns.get(PROXIMAL, logprobs.detach())
        is_corrected = batch.correction != "none"
        tokens = TokenTensors(
            logprobs=logprobs,
            recorded=recorded,
            old=proximal if is_corrected else recorded,
            advantages=packed.gather([batch.advantages[member] for member in members]),
            sequence=packed.sequence,
            columns=columns,
        )
        losses, seen = call_loss(batch.loss, tokens, batch.constants)
        correction = importance_weights(batch.correction, proximal - recorded, **batch.correction_constants)
        weights = packed.gather([batch.weights[member] for member in members]) * correction
        loss = (losses * weights).sum()
        is_current = packed.gather([_all_drawn_by(rollout, batch.version) for rollout in rollouts])
        sums.add(loss, tokens, entropy, correction, is_current=is_current, seen=seen)
        return loss

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        state = self._optimizer.state
        return {
            f"{name}.{key}": value.contiguous()
            for name, parameter in self._parameters.items()
            if parameter in state
            for key, value in state[parameter].items()
        }


def _all_drawn_by(rollout: Rollout, version: int) -> Array:
    """[T] bool: whether the whole rollout was. A later token drawn over keys and values of older weights was not."""
    is_pure = rollout.oldest_version == version and int(rollout.versions.max()) == version
    return np.full(len(rollout), is_pure)


class _Sums:
    """Diagnostics of a batch, summed over its passes so that they do not depend on packing either."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._loss = 0.0
        self._count = 0
        self._current = 0
        self._largest = 0.0

    @torch.no_grad()
    def add(
        self,
        loss: Tensor,
        tokens: TokenTensors,
        entropy: Tensor,
        correction: Tensor,
        *,
        is_current: Tensor,
        seen: dict[str, Tensor],
    ) -> None:
        log_ratio = tokens.logprobs - tokens.recorded
        ratio = log_ratio.clamp(-20.0, 20.0).exp()
        mismatch = log_ratio.abs() * is_current
        terms = {
            "entropy": entropy,
            "ratio": ratio,
            "ratio_squared": ratio.square(),
            "kl": ratio - 1 - log_ratio,
            "correction": correction,
            **seen,
        }
        for name, values in terms.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(values.double().sum())
        self._loss += float(loss)
        self._count += int(log_ratio.numel())
        self._current += int(is_current.sum())
        self._sums["mismatch"] = self._sums.get("mismatch", 0.0) + float(mismatch.double().sum())
        self._largest = max(self._largest, float(mismatch.max()) if mismatch.numel() else 0.0)

    def metrics(self) -> Metrics:
        """`mismatch` is |Δ logprob| over rollouts drawn wholly by the version being trained: numerics alone, no staleness."""
        count = max(self._count, 1)
        means = {name: total / count for name, total in self._sums.items()}
        squares = means.pop("ratio_squared", 0.0)
        means["mismatch"] = self._sums.get("mismatch", 0.0) / max(self._current, 1)
        means["mismatch_max"] = self._largest
        means["ess"] = means.get("ratio", 0.0) ** 2 / squares if squares else 0.0
        return {"loss": self._loss, "tokens": float(self._count), **means}
