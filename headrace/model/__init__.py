"""The one model definition both sides run.

Engine and trainer load the same transformers model and swap in attention through transformers' `AttentionInterface`;
nothing in a model is forked, so names need no mapping between them and a mismatch is down to kernels alone. Here live
what both share: loading and refusing models (`load`), the attention hook and its reference arithmetic (`attention`),
the head that turns hidden states into logprobs (`head`), the memory a model's tensors lie in (`arena`), how new weights
come into it (`weights`), and the model built from scratch (`tiny`).
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.model.arena import (
        Arena as Arena,
        Slot as Slot,
        allocate_bytes as allocate_bytes,
        arena_bytes as arena_bytes,
        held_tensors as held_tensors,
        lay_out as lay_out,
    )
    from headrace.model.attention import (
        EXACT_ROWS as EXACT_ROWS,
        AttentionSpec as AttentionSpec,
        PackedContext as PackedContext,
        attend as attend,
        causal as causal,
        layer_of as layer_of,
    )
    from headrace.model.contexts import make_context as make_context
    from headrace.model.fused_head import Scaling as Scaling
    from headrace.model.head import AllowedTokens as AllowedTokens, Head as Head
    from headrace.model.kernels.softcap import capped as capped
    from headrace.model.layout import Unit as Unit
    from headrace.model.load import (
        ModelError as ModelError,
        config_limit as config_limit,
        context_limit as context_limit,
        has_experts as has_experts,
        hidden_states as hidden_states,
        load_config as load_config,
        load_generation as load_generation,
        load_model as load_model,
        load_tokenizer as load_tokenizer,
        narrow as narrow,
        prepare as prepare,
        served_dtype as served_dtype,
    )
    from headrace.model.packing import Packed as Packed, pack as pack, score as score
    from headrace.model.pass_planning import members_of as members_of, num_rows as num_rows, plan_passes as plan_passes
    from headrace.model.routers import Routers as Routers, find_readable_routers as find_readable_routers
    from headrace.model.settings import ModelSettings as ModelSettings
    from headrace.model.shape import ModelShape as ModelShape
    from headrace.model.tiny import (
        build_config as build_config,
        build_folder as build_folder,
        build_tokenizer as build_tokenizer,
    )
    from headrace.model.weights import (
        Incoming as Incoming,
        Inspector as Inspector,
        SpareWeights as SpareWeights,
        WeightError as WeightError,
        check_order as check_order,
        describe as describe,
        named_tensors as named_tensors,
    )
else:
    __getattr__ = front_door(__name__)
