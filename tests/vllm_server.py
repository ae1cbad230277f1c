"""A real vLLM server on this machine, on its GPU if it has one, started once for all tests that need one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace.config import make_recipe
from headrace.engine.stop_strings import stop_tokens
from headrace.engine.vllm.api import VllmApi
from headrace.engine.vllm.engine import VllmEngine
from headrace.engine.vllm.open import make_handover, server_arguments
from headrace.engine.vllm.server import end, start
from headrace.model.head import Head
from headrace.model.load import load_model, load_tokenizer
from headrace.model.weights import StagedWeights
from headrace.observe import Timeline

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator, Callable, Iterator

    from headrace.sync import WeightSync

HAS_GPU = torch.cuda.is_available()
HANDOVER = os.environ.get("HEADRACE_TEST_HANDOVER", "ipc" if HAS_GPU else "folder")
"""How it gets new weights."""
_ON_CPU = {
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",  # for processors that announce what their host does not let them use
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
_ON_GPU = {
    "TRITON_F32_DEFAULT": "ieee",  # what is compared here is compared to more digits than the faster kind has
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "NCCL_HOSTID": "server",  # NCCL broadcasts between two processes of one GPU if it takes them for two hosts'
    "NCCL_SOCKET_IFNAME": "lo",
}
VARIABLES = _ON_GPU if HAS_GPU else _ON_CPU
MISSING = "vLLM is not set up: `make vllm`"
CONTEXT = 256
SLOTS = 256


@dataclass
class Running:
    """Where it is, and how to end it."""

    url: str
    token: str
    log: Path
    process: subprocess.Popen[bytes]


_running: Running | None = None


def vllm_python() -> str | None:
    """The interpreter that has vLLM, where one was set up; that which HEADRACE_TEST_VLLM names, as in `make test`, must be."""
    needed = os.environ.get("HEADRACE_TEST_VLLM")
    if needed:
        if shutil.which(needed) is None:
            raise RuntimeError(f"HEADRACE_TEST_VLLM = {needed!r} is no interpreter, and no test is skipped for that; {MISSING}")
        return needed
    own = Path(__file__).parents[1] / ".venv-vllm"
    made_here = str(own / "bin" / "python") if (own / ".ready").exists() else ""
    return shutil.which(os.environ.get("HEADRACE_VLLM_PYTHON") or made_here)


async def start_server(model: str, log: Path, *arguments: str) -> Running:
    python = vllm_python()
    assert python is not None
    settings = {"engine.slots": SLOTS, "staleness.max_lag": 1, "partial.interrupt": "keep"}
    recipe = make_recipe({"tasks": [{"source": "builtin:sort_digits"}], **settings})
    words = server_arguments(recipe, context=CONTEXT, candidates=256, is_on_cpu=not HAS_GPU, handover=HANDOVER)
    words += ["--logits-processors", "slow_steps:SlowSteps"]
    if HAS_GPU:
        words += ["--enforce-eager", "--gpu-memory-utilization", "0.1"]
    found = [str(Path(__file__).with_name("slow_vllm")), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**VARIABLES, "PYTHONPATH": os.pathsep.join(found)}
    server = await start(model, [*words, *arguments], python=python, log=log, seconds=300, environment=environment)
    await server.api.close()
    return Running(server.api.url, server.token, log, server.process)


@contextlib.contextmanager
def running(model: str, log: Path) -> Iterator[Running]:
    """One that serves a model, for `served`."""
    global _running
    _running = asyncio.run(start_server(model, log))
    try:
        yield _running
    finally:
        end(_running.process)
        _running = None


@contextlib.asynccontextmanager
async def served(
    model_path: str,
    *,
    sync: WeightSync,
    slots: int,
    context: int,
    decode: Callable[[list[int]], str] | None,
    records_entropy: bool = False,
) -> AsyncIterator[tuple[VllmEngine, VllmApi]]:
    """An engine over the server, which knows nothing of those before it."""
    assert _running is not None
    api = VllmApi(_running.url, token=_running.token, log=str(_running.log))
    await api.resume()
    await api.drop_cache()
    model = load_model(model_path, device="cpu" if HANDOVER == "folder" else "cuda")
    folder = Path(tempfile.mkdtemp(prefix="headrace-test-"))
    recipe, about = make_recipe({"tasks": [{"source": "builtin:sort_digits"}]}), await api.about()
    handover = make_handover(HANDOVER, recipe, folder=folder, device=str(model.device))
    await handover.open(api, about.version)
    engine = VllmEngine(
        api,
        about,
        name="engine-0",
        slots=slots,
        context=context,
        vocabulary=Head(model).vocabulary,
        model=model,
        staged=StagedWeights(model, in_place=False),
        sync=sync,
        handover=handover,
        timeline=Timeline("engine"),
        decode=decode,
        end_ids=stop_tokens(model.generation_config, load_tokenizer(model_path)),
        records_entropy=records_entropy,
    )
    engine.start()
    try:
        yield engine, api
    finally:
        await engine.close()
        await api.close()
        shutil.rmtree(folder, ignore_errors=True)
