"""`[[train.parameters]]`: which table applies, what is refused, and what freezing saves."""

from __future__ import annotations

import pytest
import torch
from test_trainer import make_batch, make_trainer, rollouts

from headrace.config import make_recipe
from headrace.launch.build import check_optimizer
from headrace.launch.forecast import frozen_sizes
from headrace.launch.inputs import UserInputs
from headrace.model.arena import Arena
from headrace.settings import ConfigError
from headrace.trainer import ParameterSettings, match_parameters

NAMES = [
    "model.embed_tokens.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "lm_head.weight",
]


def groups(*tables: dict) -> tuple[ParameterSettings, ...]:
    return tuple(ParameterSettings(**table) for table in tables)


def test_the_last_table_that_matches_applies() -> None:
    everything, layer, head = groups(
        {"match": "*", "freeze": True}, {"match": "*.[1-9].*", "learning_rate": 0.5}, {"match": "lm_head.*"}
    )
    found = match_parameters((everything, layer, head), NAMES)
    assert [found[name] for name in NAMES] == [everything, everything, layer, head]
    assert match_parameters((layer,), NAMES) == {NAMES[2]: layer}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            [{"match": "*"}, {"match": "model.layer.*.mlp.up_proj.weight"}],
            "train.parameters.1.match = 'model.layer.*.mlp.up_proj.weight': the model has no such parameter; * stands for "
            "anything, and the nearest names are model.layers.1.mlp.up_proj.weight, model.layers.0.mlp.up_proj.weight",
        ),
        ([{"match": "embed_tokens"}], "train.parameters.0.match = 'embed_tokens'"),
        ([{"match": "*", "freeze": True}], "train.parameters: they freeze the whole model"),
    ],
)
def test_a_pattern_without_a_parameter_is_refused_before_the_model_is_loaded(tables: list[dict], message: str) -> None:
    recipe = make_recipe({"train": {"parameters": tables}})
    with pytest.raises(ConfigError) as refused:
        check_optimizer(recipe, UserInputs())
    assert str(refused.value).startswith(message)


def test_what_is_frozen_has_no_gradient_and_no_state_and_stays_bitwise(tiny_model: str) -> None:
    """Everything outside layers here, the head too; the layers' gradient is what it is without freezing."""
    items = rollouts(tiny_model, 4)
    frozen = groups({"match": "*", "freeze": True}, {"match": "*.layers.*", "learning_rate": 0.5})
    whole, part = make_trainer(tiny_model), make_trainer(tiny_model, parameters=frozen)
    assert whole.optimizer.names - part.optimizer.names == {
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
    }  # fmt: skip
    before = Arena(part.arena.slots, device=part.arena.device)
    before.copy_from(part.arena)
    for trainer in (whole, part):
        trainer.forward_backward(make_batch(items))
    assert all(parameter.grad is None for name, parameter in part.model.named_parameters() if ".layers." not in name)
    for name in part.optimizer.names:
        torch.testing.assert_close(part.optimizer.gradient(name), whole.optimizer.gradient(name))
    part.optim_step(1e-3)
    changed = {name for name, view in part.arena.views.items() if not torch.equal(view, before.views[name])}
    assert changed == part.optimizer.names
    held = sum(s.gradient.numel() for segments in part.optimizer._arenas for s in segments)
    assert held < sum(s.gradient.numel() for segments in whole.optimizer._arenas for s in segments)


def test_the_forecast_knows_what_is_frozen() -> None:
    free = make_recipe({"model": {"hidden_size": 96}})
    frozen = make_recipe({"train": {"parameters": [{"match": "*.embed_tokens.*", "freeze": True}]}})
    assert frozen_sizes(free) == [] and frozen_sizes(frozen) == [102 * 96]
