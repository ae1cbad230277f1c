"""Engines: they generate rollouts, behind one small protocol (`protocol`).

Generation makes a rollout longer. Tokens go in and tokens come out, each with its logprob under the distribution it was sampled
from and the version of the weights that sampled it; only the engine writes either.

`engine.kind` is a choice of the table in `kinds`; `kind` is what each choice says of itself. `native/` is the embedded engine,
`vllm/` a stock vLLM server. In a run of several processes, `pool` is one engine over many (`remote_engine`), brings new weights
to them (`weight_delivery`), and talks to the `worker` in each process. `server/` is the OpenAI-compatible server of `headrace
serve`.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.engine.kind import EnginePlace as EnginePlace, OpenedEngine as OpenedEngine
    from headrace.engine.kinds import check_engine_kind as check_engine_kind, engine_kind as engine_kind
    from headrace.engine.native.core import EngineCore as EngineCore
    from headrace.engine.native.engine import NativeEngine as NativeEngine
    from headrace.engine.native.engine_memory import EngineMemory as EngineMemory, blocks_for as blocks_for
    from headrace.engine.native.kind import build_core as build_core
    from headrace.engine.native.kv_cache import free_memory as free_memory
    from headrace.engine.native.step import Runner as Runner, Step as Step, StepPlan as StepPlan
    from headrace.engine.pool import EnginePool as EnginePool
    from headrace.engine.protocol import (
        Engine as Engine,
        EngineState as EngineState,
        Increment as Increment,
        InFlight as InFlight,
        PromptTooLong as PromptTooLong,
        SleepingEngine as SleepingEngine,
        UnusablePrompt as UnusablePrompt,
    )
    from headrace.engine.remote_engine import RemoteEngine as RemoteEngine
    from headrace.engine.request import Request as Request
    from headrace.engine.server.address import bind as bind, url_of as url_of
    from headrace.engine.server.app import SERVER as SERVER, listening as listening, make_app as make_app
    from headrace.engine.settings import EngineSettings as EngineSettings, SamplingSettings as SamplingSettings
    from headrace.engine.tokenizers import decoder_of as decoder_of, stop_tokens as stop_tokens
    from headrace.engine.vllm.engine import VllmEngine as VllmEngine
    from headrace.engine.vllm.server import choose_python as choose_python, find_vllm as find_vllm
    from headrace.engine.vllm.settings import VllmSettings as VllmSettings
    from headrace.engine.worker import EngineWorker as EngineWorker
else:
    __getattr__ = front_door(__name__)
