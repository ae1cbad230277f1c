"""Engines: they generate rollouts, behind one small protocol (`protocol`).

Generation makes a rollout longer: tokens go in and tokens come out, each with its logprob under the distribution it was sampled
from and the version of the weights that sampled it. Only the engine writes these two.

`settings` has the table of the choices of `engine.kind`, `kind` what each says about itself. `native/` is the embedded engine,
`vllm/` a stock vLLM server. When engines run in other processes, `pool` makes them one engine: it has a `remote_engine` for
each, which talks to the `worker` there, and delivers new weights (`weight_delivery`). `server/` is `headrace serve`.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.engine.kind import EnginePlace
    from headrace.engine.native.core import EngineCore
    from headrace.engine.native.engine import NativeEngine
    from headrace.engine.native.engine_memory import EngineMemory, adapter_places, blocks_for
    from headrace.engine.native.kind import build_core
    from headrace.engine.native.kv_cache import free_memory
    from headrace.engine.native.step import Runner, StepPlan
    from headrace.engine.pool import EnginePool
    from headrace.engine.protocol import (
        Engine,
        EngineState,
        Increment,
        InFlight,
        OnTokens,
        PromptTooLong,
        SleepingEngine,
        UnusablePrompt,
    )
    from headrace.engine.remote_engine import RemoteEngine
    from headrace.engine.request import LEAST_GROWTH, TELL_ALL, HeldAdapter, Request, SampledSince, pack_sampled
    from headrace.engine.server.address import bind, url_of
    from headrace.engine.server.app import CompletionServer
    from headrace.engine.server.body import ApiError, Body, bad, check, check_token_ids, shown, unsupported
    from headrace.engine.server.chat import Chat
    from headrace.engine.server.http import LoopServer, bearer, read_body, stream_events, tell_failures
    from headrace.engine.server.requests import NEUTRAL, read_stops, read_stream_options
    from headrace.engine.server.text import ServedModel, TextReader, could_begin, first_stop
    from headrace.engine.server.tool_calls import CALL_FORMS, MARKED, ToolCallReader, call_form, has_special_markers, read_calls
    from headrace.engine.settings import DistributionSettings, EngineSettings, SamplingSettings, check_engine_kind, engine_kind
    from headrace.engine.stop_strings import decoder_of, stop_tokens
    from headrace.engine.vllm.engine import VllmEngine
    from headrace.engine.vllm.server import choose_python, find_vllm
    from headrace.engine.vllm.settings import VllmSettings
    from headrace.engine.worker import EngineWorker
else:
    __getattr__ = front_door(__name__)
