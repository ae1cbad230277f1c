"""Weights that are read by ranges are those that transformers loads."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from families import FAMILIES, make
from safetensors.torch import load_file, save_file

from headrace.lora import LoraSettings
from headrace.model import ModelError, load_model, named_tensors, take_files

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("family", FAMILIES)
def test_files_hold_what_transformers_loads(family: str, tmp_path: Path) -> None:
    make(family).save_pretrained(tmp_path)
    waiting, whole = load_model(str(tmp_path), in_parts=True), load_model(str(tmp_path))
    files = take_files(waiting)
    assert files is not None and take_files(waiting) is None
    expected = dict(named_tensors(whole))
    assert {name: (each.shape, each.dtype) for name, each in named_tensors(waiting)} == {
        name: (each.shape, each.dtype) for name, each in expected.items()
    }
    for name, tensor in expected.items():
        flat, first, stop = tensor.reshape(-1), tensor.numel() // 3, -(-tensor.numel() * 2 // 3)
        torch.testing.assert_close(files.read(name, first, stop), flat[first:stop], atol=0, rtol=0)
    theirs = dict(whole.named_buffers())
    for name, buffer in waiting.named_buffers():  # of those that are not in files
        assert name in expected or torch.equal(buffer, theirs[name])
    assert waiting.generation_config.to_dict() == whole.generation_config.to_dict()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])  # the second keeps some tensors in float32
def test_numbers_are_rounded_as_transformers_rounds_them(family: str, tmp_path: Path) -> None:
    model = make(family)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.ndim < 2:
            torch.nn.init.normal_(tensor)
    model.save_pretrained(tmp_path)
    waiting, whole = (load_model(str(tmp_path), dtype="bfloat16", in_parts=in_parts) for in_parts in (True, False))
    files = take_files(waiting)
    assert files is not None
    for name, tensor in named_tensors(whole):
        assert torch.equal(files.read(name, 0, tensor.numel()).to(tensor.dtype), tensor.reshape(-1)), name


@pytest.mark.parametrize("is_equal", [True, False])
def test_tied_weights_that_differ_in_their_files_are_not_tied(is_equal: bool, tmp_path: Path) -> None:
    model = make("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (not is_equal)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_model(str(tmp_path), in_parts=True)
    assert (take_files(model) is not None) == is_equal == ("lm_head.weight" not in dict(model.named_parameters()))


def test_what_cannot_be_read_by_ranges_is_loaded_whole(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    for lora in (LoraSettings(rank=4, whole=("lm_head",)), None):
        model = load_model(str(tmp_path), lora=lora, in_parts=True)
        assert (take_files(model) is None) == any(not each.is_meta for each in model.parameters()) == (lora is not None)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "other.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))
    assert take_files(load_model(str(tmp_path), in_parts=True)) is None, "its config names another file"


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "model.layers.1.mlp.up_proj.weight"), ("qwen3_moe", "model.layers.1.mlp.experts.2.up_proj.weight")],
)
def test_weights_of_another_config_are_refused_as_ever(family: str, name: str, tmp_path: Path) -> None:
    make(family).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    cut = {**tensors, name: tensors[name][:-1].clone()}
    for changed in (cut, {each: tensor for each, tensor in tensors.items() if each != name}):
        save_file(changed, file, {"format": "pt"})
        errors = []
        for in_parts in (False, True):
            with pytest.raises((ModelError, RuntimeError)) as error:  # transformers' own, where it makes one tensor of several
                load_model(str(tmp_path), in_parts=in_parts)
            errors.append(str(error.value))
        assert errors[0] == errors[1]
