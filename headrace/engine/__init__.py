"""What generates: engines behind one small protocol (`protocol`), the embedded one in `native/`.

Generation lengthens a rollout. Tokens go in and tokens come out, each with its logprob under the distribution it was
really drawn from and the policy version that drew it; nobody but the engine writes either.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.engine.member import Member as Member
    from headrace.engine.native.core import EngineCore as EngineCore
    from headrace.engine.native.engine import NativeEngine as NativeEngine
    from headrace.engine.native.engine_memory import (
        EngineMemory as EngineMemory,
        blocks_for as blocks_for,
        predict_engine_memory as predict_engine_memory,
    )
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
    from headrace.engine.request import Request as Request
    from headrace.engine.server.address import bind as bind, url_of as url_of
    from headrace.engine.server.app import SERVER as SERVER, listening as listening, make_app as make_app
    from headrace.engine.settings import EngineSettings as EngineSettings, SamplingSettings as SamplingSettings
    from headrace.engine.vllm.abilities import TRANSFER as TRANSFER, check_abilities as check_abilities
    from headrace.engine.vllm.api import Piece as Piece, VllmApi as VllmApi, VllmError as VllmError, VllmRefused as VllmRefused
    from headrace.engine.vllm.call import TOGETHER as TOGETHER
    from headrace.engine.vllm.engine import VllmEngine as VllmEngine
    from headrace.engine.vllm.handover import (
        FolderHandover as FolderHandover,
        Handover as Handover,
        IpcHandover as IpcHandover,
        NcclHandover as NcclHandover,
    )
    from headrace.engine.vllm.server import (
        VllmServer as VllmServer,
        choose_python as choose_python,
        end as end,
        find_vllm as find_vllm,
        start as start,
    )
    from headrace.engine.vllm.settings import PARALLEL as PARALLEL, VllmSettings as VllmSettings
    from headrace.engine.vllm.traffic import Limits as Limits
    from headrace.engine.vllm.weights import Staging as Staging, saved_form as saved_form
    from headrace.engine.worker import EngineWorker as EngineWorker
else:
    __getattr__ = front_door(__name__)
