"""A model is what its folder says, to the last weight, or it is not loaded."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from families import FAMILIES, make
from safetensors.torch import load_file, save_file

from headrace.cli import main
from headrace.model.arena import held_tensors
from headrace.model.attention import PackedContext
from headrace.model.load import ModelError, hidden_states, load_model, narrow, prepare, served_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

NAME = "model.layers.0.mlp.up_proj.weight"
OTHER = "lm_head.weight"


def remove(tensors: dict[str, Tensor]) -> None:
    del tensors[NAME]


def remove_two(tensors: dict[str, Tensor]) -> None:
    del tensors[NAME], tensors[OTHER]


def cut(tensors: dict[str, Tensor]) -> None:
    tensors[NAME] = tensors[NAME][:5].contiguous()


def spoil(value: float, name: str = NAME) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][-1, -1] = value

    return change


@pytest.fixture
def folder(tiny_model: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove, f"{NAME} is missing"),
        (remove_two, f"{OTHER} is missing; and 1 more"),
        (cut, f"{NAME} has shape (5, 96) instead of (288, 96)"),
        (spoil(float("nan")), f"{NAME} holds NaN"),
        (spoil(float("inf")), f"{NAME} holds NaN or infinity"),
        (spoil(float("nan"), OTHER), f"{OTHER} holds NaN"),
        (spoil(float("-inf"), "model.embed_tokens.weight"), "model.embed_tokens.weight holds NaN"),
    ],
)
def test_weights_that_are_not_the_configs_are_refused(folder: Path, change, message: str, capsys) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError) as refused:
        load_model(str(folder))
    assert message in str(refused.value) and str(folder) in str(refused.value)
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(folder), "--port", "0"])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_file_that_ends_early_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="could not be loaded"):
        load_model(str(folder))
    file.unlink()
    with pytest.raises(ModelError, match="could not be loaded"):
        load_model(str(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_we_serve_is_loaded_whole(family: str, tmp_path: Path) -> None:
    """Tied heads and buffers are not in the file, and are not missing either."""
    model = make(family)
    model.save_pretrained(tmp_path)
    loaded = dict(load_model(str(tmp_path)).named_parameters())
    assert loaded.keys() == dict(model.named_parameters()).keys()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(loaded[name], weight, rtol=0, atol=0)


def test_a_pass_takes_nothing_from_the_pass_of_another_thread() -> None:
    """A thread that captures graphs runs the same parameters under autocast, whose cast biases torch keeps for all threads:
    what is read must be the bias itself, and not what another thread has made of it and will free."""
    model = make("llama", attention_bias=True).to(torch.bfloat16)
    prepare(model, name="llama")
    tokens = torch.arange(5, 11)

    def forward() -> Tensor:
        with torch.no_grad():
            return hidden_states(model, tokens, torch.arange(6), PackedContext([6]))

    is_inside, may_go_on = threading.Event(), threading.Event()

    def wait_inside(*_: object) -> None:
        if threading.current_thread() is other:
            is_inside.set()
            may_go_on.wait(timeout=30)

    bias = model.model.layers[0].self_attn.v_proj.bias
    model.model.layers[1].register_forward_hook(wait_inside)
    other = threading.Thread(target=forward)
    before = forward()
    other.start()
    assert is_inside.wait(timeout=30)
    with torch.no_grad():
        bias.add_(1.0)
    during = forward()
    may_go_on.set()
    other.join()
    assert not torch.equal(during, before)
    torch.testing.assert_close(during, forward(), rtol=0, atol=0)


def test_what_transformers_keeps_in_float32_stays_so() -> None:
    """The routers' correction of DeepSeek: an engine loads it in float32, and a trainer must publish it so."""
    model = make("deepseek_v3")
    dtypes = {name: served_dtype(model, name, tensor, torch.bfloat16) for name, tensor in held_tensors(model)}
    kept = [name for name, dtype in dtypes.items() if dtype == torch.float32]
    assert kept and all(name.endswith("e_score_correction_bias") for name in kept)
    narrow(model, torch.bfloat16)
    assert {name: tensor.dtype for name, tensor in held_tensors(model)} == dtypes
