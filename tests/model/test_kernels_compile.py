"""Kernels through the whole compiler, which needs no GPU: the interpreter is Python, and lets things pass that it does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headrace.model.kernels import attention, head

KINDS = {
    **dict.fromkeys(("query", "key", "value", "gradient", "out", "to_query", "to_key", "to_value"), "*bf16"),
    **dict.fromkeys(("sinks", "sums", "deltas", "logits", "logprobs", "entropies", "totals", "gradients"), "*fp32"),
    **dict.fromkeys(("temperatures", "entropy_gradients"), "*fp32"), **dict.fromkeys(("tiles", "positions"), "*i32"),
    **dict.fromkeys(("scale", "softcap", "divisor", "factor"), "fp32"), "targets": "*i64", "allowed": "*i1",
}

def compile(kernel, **constants):
    kinds = {name: "constexpr" if name in constants else KINDS.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 1}).asm["ptx"]

sizes = {"GROUP": 2, "DIM": 32, "DIM_PAD": 32, "VALUE_DIM": 24, "VALUE_PAD": 32, "PRECISION": "tf32", "ROWS": 32, "KEYS": 32}
for is_set in [IS_SET]:
    flags = {"HAS_SOFTCAP": is_set, "HAS_WINDOW": is_set}
    compile(attention.forward_kernel, HEADS=4, HAS_SINKS=is_set, **sizes, **flags)
    compile(attention.query_kernel, HEADS=4, **sizes, **flags)
    compile(attention.key_kernel, KV_HEADS=2, **sizes, **flags)
    flags = {"HAS_DIVISOR": is_set, "HAS_FACTOR": is_set, "HAS_SOFTCAP": is_set, "HAS_MASK": is_set}
    compile(head.forward_kernel, BLOCK=128, **flags)
    compile(head.backward_kernel, BLOCK=128, HAS_ENTROPY=is_set, **flags)
compile(attention.delta_kernel, HEADS=4, VALUE_DIM=24, VALUE_PAD=32, ROWS=32)
"""

SAMPLING = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headrace.engine.native.cuda.kernels import sampling

KINDS = {
    **dict.fromkeys(("logits", "sampling", "tops", "sums", "moments", "out_logprobs", "out_entropies"), "*fp32"),
    **dict.fromkeys(("slots", "lengths", "limits", "alive", "tokens", "stops", "bests", "out_tokens"), "*i32"),
    **dict.fromkeys(("divisor", "factor", "softcap"), "fp32"), "seeds": "*i64",
}
for has_entropy in (True, False):
    flags = {"HAS_DIVISOR": False, "HAS_FACTOR": False, "HAS_SOFTCAP": False, "HAS_ENTROPY": has_entropy}
    flags |= {"CHUNKS": 5, "CHUNK": 4096}
    padding = {"CHUNKS_PAD": 8, "STOPS_PAD": 16}
    for kernel, constants in ((sampling.chunk_kernel, flags), (sampling.sample_kernel, {**flags, **padding})):
        kinds = {name: "constexpr" if name in constants else KINDS.get(name, "i32") for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=kinds, constexprs=constants)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
"""


LOW_RANK = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headrace.engine.native.cuda.adapters import _sizes
from headrace.engine.native.cuda.kernels import low_rank

KINDS = {"places": "*i32", "between": "*fp32", "scale": "fp32"}

def shared_memory(kernel, kinds, **constants):
    names = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=names, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).metadata.shared

for rank in (64, 128, 512):  # the largest of each size of tiles; fewer rows and smaller ranks take less
    for rows in (256, 4096):
        sizes = _sizes(rows, 4096, rank)
        same = {"RANK": rank, "RANK_PAD": rank, "ROWS": sizes.rows, "PRECISION": "tf32"}
        matrices = dict.fromkeys(("hidden", "down_0", "down_1", "down_2", "output", "up_0", "up_1", "up_2"), "*bf16")
        down = shared_memory(low_rank.down_kernel, {**KINDS, **matrices, "out": "*fp32"}, TILE=sizes.tile, **same)
        splits = 4096 // min(sizes.split, 4096)
        kinds = {**KINDS, **matrices, "out": "*bf16"}
        for is_one, is_gated in ((False, False), (True, True)) if rows == 256 else ((False, False),):
            ways = {"IS_ONE": is_one, "IS_GATED": is_gated, "IS_EARLY": is_one}
            up = shared_memory(low_rank.up_kernel, kinds, SPLITS=splits, COLUMNS=sizes.columns, **ways, **same)
            assert max(down, up) <= 99 * 1024, (rank, rows, ways, down, up)
"""


@pytest.mark.long
@pytest.mark.parametrize("is_set", [True, False])
def test_every_kernel_of_the_trainer_compiles(tmp_path, is_set: bool) -> None:
    compile_all(tmp_path, COMPILED.replace("IS_SET", str(is_set)))


@pytest.mark.long
def test_the_kernels_that_sample_compile_with_and_without_entropies(tmp_path) -> None:
    compile_all(tmp_path, SAMPLING)


@pytest.mark.long
def test_an_adapters_kernels_fit_a_gpu_at_every_rank(tmp_path) -> None:
    compile_all(tmp_path, LOW_RANK)


def compile_all(tmp_path, script: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    (tmp_path / "compiled.py").write_text(script)  # Triton reads the source of what it compiles
    command = [sys.executable, str(tmp_path / "compiled.py")]
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
