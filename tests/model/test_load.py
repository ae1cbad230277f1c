"""A model is what its folder says, to the last weight, or it is not loaded."""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from families import FAMILIES, make
from safetensors.torch import load_file, save_file

import headrace
from headrace.cli import main
from headrace.model.arena import held_tensors
from headrace.model.attention import PackedContext
from headrace.model.load import (
    ModelError,
    hidden_states,
    load_config,
    load_model,
    load_tokenizer,
    narrow,
    prepare,
    served_dtype,
)

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


class Planted:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_pickled_weights_are_refused_unread_and_the_message_converts_them(folder: Path, tmp_path: Path, capsys) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    torch.save({**tensors, "planted": Planted(tmp_path / "run")}, folder / "pytorch_model.bin")
    with pytest.raises(
        ModelError, match=r"no weights in safetensors files.*if you trust them, convert them: python -c"
    ) as refused:
        load_model(str(folder))
    assert not (tmp_path / "run").exists()
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(folder), "--port", "0"])
    assert ended.value.code == 2 and "convert them: python -c" in capsys.readouterr().err
    torch.save(tensors, folder / "pytorch_model.bin")
    python, option, script = shlex.split(str(refused.value).partition("convert them: ")[2])
    assert (python, option) == ("python", "-c")
    exec(script)
    weights = dict(load_model(str(folder)).named_parameters())
    assert all(torch.equal(weights[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("load", [load_model, load_tokenizer, load_config])
def test_code_that_comes_with_a_model_is_never_run(folder: Path, tmp_path: Path, load) -> None:
    """Nor is the user asked whether it may, as transformers does."""
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'run')!r})")
    for name, auto in (("config", {"AutoConfig": "own.Config"}), ("tokenizer_config", {"AutoTokenizer": ["own.Own", None]})):
        file = folder / f"{name}.json"
        kind = {"model_type": "own"} if name == "config" else {"tokenizer_class": "Own"}
        file.write_text(json.dumps({**json.loads(file.read_text()), **kind, "auto_map": auto}))
    with pytest.raises(ModelError, match=r"needs Python code of its own \(auto_map\), which is never run"):
        load(str(folder))
    assert not (tmp_path / "run").exists()


def test_every_load_in_the_package_is_explicitly_safe() -> None:
    """A generation config is plain JSON; `trust_remote_code` is an argument of Auto classes."""
    loads = []
    for file in Path(headrace.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called, where = ast.unparse(node.func), f"{file.name}:{node.lineno}"
            told = {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert called not in ("pickle.load", "pickle.loads"), where
            assert called != "torch.load" or told.get("weights_only") == "True", where
            if not called.endswith(".from_pretrained") or called.startswith("GenerationConfig"):
                continue
            loads.append(called)
            assert told.get("trust_remote_code") == "False" or not called.startswith("Auto"), where
            assert told.get("use_safetensors") == "True" or called.startswith(("AutoTokenizer", "AutoConfig")), where
    assert len(loads) >= 5


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


def test_routers_and_vectors_stay_in_float32() -> None:
    """DeepSeek's routers have a correction too: an engine loads it in float32, and a trainer must publish it so."""
    model = make("deepseek_v3")
    dtypes = {name: served_dtype(model, name, tensor, torch.bfloat16) for name, tensor in held_tensors(model)}
    kept = {name.split(".")[-2] for name, dtype in dtypes.items() if dtype == torch.float32}
    assert kept == {"norm", "input_layernorm", "post_attention_layernorm", "q_a_layernorm", "kv_a_layernorm", "gate"}
    narrow(model, torch.bfloat16)
    assert {name: tensor.dtype for name, tensor in held_tensors(model)} == dtypes
