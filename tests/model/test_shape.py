"""A model's sizes by its configuration, against the model itself."""

from __future__ import annotations

import families
import pytest
import torch

from headrace.engine.native.kv_cache import CacheShape
from headrace.model.load import prepare
from headrace.model.shape import ModelShape


@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_numbers_in_a_model_follow_from_its_configuration(family: str) -> None:
    model = families.make(family)
    shape = ModelShape.of(model.config)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    assert shape.matrices == pytest.approx(sum(map(torch.numel, matrices)), rel=0.02)  # gpt_oss has biases of experts
    layer = max(
        sum(p.numel() for n, p in model.named_parameters() if p.ndim >= 2 and f"layers.{i}." in n) for i in range(shape.layers)
    )
    assert shape.layer_matrices == pytest.approx(layer, rel=0.02)
    cached = CacheShape.of(prepare(model, name=family))
    assert 4 * shape.cached_numbers == cached.bytes_per_token
