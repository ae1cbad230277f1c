"""The trainer's peer: a padded loop over transformers' model, as in most RL libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from headrace.bench.loads import LEARNING_RATE
from headrace.trainer import TrainSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headrace.records import Array, Batch

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""Our grpo's defaults."""


class PaddedLoop:
    """Mini-batches of a fixed number of rollouts, padded to the longest of each, with full logits.

    Weights are float32, and products bfloat16 (by autocast) where ours are; attention is torch's; nothing is compiled.
    """

    def __init__(self, folder: str, *, dtype: str, device: str, mini_batch: int) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True, trust_remote_code=False
        )
        self._model = model.to(device).train()
        self._device, self._mini_batch = device, mini_batch
        self._is_narrow = dtype == "bfloat16"
        settings = TrainSettings()
        self._limit = settings.max_grad_norm
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=LEARNING_RATE,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def forward_backward(self, batch: Batch, *, by_length: bool = False) -> float:
        """Accumulate the batch's gradient; returns the loss."""
        order = list(range(len(batch.rollouts)))
        if by_length:
            order.sort(key=lambda member: len(batch.rollouts[member]))
        total = torch.zeros((), device=self._device)
        for start in range(0, len(order), self._mini_batch):
            loss = self._loss(batch, order[start : start + self._mini_batch])
            cast("Any", loss).backward()
            total += loss.detach()
        return float(total)

    def optim_step(self) -> None:
        """One optimizer step with the accumulated gradient, which is then dropped."""
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._limit)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def step(self, batch: Batch) -> None:
        self.forward_backward(batch)
        self.optim_step()

    def gradient(self) -> dict[str, Tensor]:
        """The accumulated gradient, by name."""
        return {name: p.grad.detach().clone() for name, p in self._model.named_parameters() if p.grad is not None}

    def _loss(self, batch: Batch, members: Sequence[int]) -> Tensor:
        rollouts = [batch.rollouts[member] for member in members]
        first = min(int(np.argmax(rollout.loss_mask)) for rollout in rollouts)
        token_ids = self._padded([rollout.token_ids for rollout in rollouts]).long()
        mask = self._padded([np.ones(len(rollout), dtype=np.int64) for rollout in rollouts])
        with torch.autocast(self._device, torch.bfloat16, enabled=self._is_narrow):
            keep = token_ids.shape[1] - first
            given = {"input_ids": token_ids[:, :-1], "attention_mask": mask[:, :-1], "logits_to_keep": keep}
            wide = self._model(**given, use_cache=False).logits.flatten(0, 1).float()
            logprobs = -F.cross_entropy(wide, token_ids[:, first:].flatten(), reduction="none")
            del wide  # autograd keeps what it needs

        def kept(arrays: Sequence[Array]) -> Tensor:
            return self._padded(arrays)[:, first:].flatten()

        advantages = kept([batch.advantages[member] for member in members])
        ratio = (logprobs - kept([rollout.logprobs for rollout in rollouts])).exp()
        gains = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages)
        weights = kept([batch.weights[member] for member in members])
        return -(gains * weights).sum()

    def _padded(self, arrays: Sequence[Array]) -> Tensor:
        """[rollouts, longest], zero-padded at the end; padding has no weight in the loss."""
        width = max(len(array) for array in arrays)
        rows = np.stack([np.pad(array, (0, width - len(array))) for array in arrays])
        return torch.from_numpy(rows).to(self._device)
