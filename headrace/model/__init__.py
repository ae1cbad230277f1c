"""The one model definition both sides run.

Engine and trainer load the same transformers model and replace its attention through transformers' `AttentionInterface`. No
model code is forked, so names need no mapping and any mismatch comes from kernels. This room holds what both sides share:
loading and rejecting models (`load`), the attention hook and its reference arithmetic (`attention`), logprobs from hidden
states (`head`), the memory of a model's tensors (`arena`), receiving new weights (`weights`), and the built-in model (`tiny`).
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.lora import Adapter, Target, adapter_of, held_bytes, target_of
    from headrace.model.arena import (
        ALIGNMENT,
        Arena,
        Layout,
        ShardedWeights,
        Slot,
        allocate_bytes,
        held_tensors,
        lay_out,
        side_stream,
    )
    from headrace.model.attention import EXACT_ROWS, AttentionSpec, PackedContext, attend, causal, layer_of, make_context
    from headrace.model.fused_head import AllowedTokens, Scaling
    from headrace.model.head import Head
    from headrace.model.kernels.softcap import capped
    from headrace.model.load import (
        ModelError,
        adapter_shapes,
        can_group_experts,
        config_limit,
        context_limit,
        hidden_states,
        lacks_safetensors,
        load_config,
        load_generation,
        load_model,
        load_plain,
        load_tokenizer,
        narrow,
        parameter_shapes,
        prepare,
        probe,
        put_before,
        quantized_sizes,
        read_pieces,
        served_dtype,
        set_template,
    )
    from headrace.model.packing import Packed, empty_pass, pack, packed_hidden, replaying, score
    from headrace.model.pass_planning import Unit, members_of, num_rows, plan_passes
    from headrace.model.rank_passes import PassCost, plan_rank_passes
    from headrace.model.routers import Routers, Watched, check_recorded, find_readable_routers
    from headrace.model.settings import ModelSettings, bytes_per_number
    from headrace.model.shape import ModelShape
    from headrace.model.sharded_arena import Group, ShardedArena
    from headrace.model.tiny import build_config, build_folder, build_tokenizer
    from headrace.model.weight_files import WeightFiles, flat_range, leave_meta, take_files
    from headrace.model.weights import (
        ByteTarget,
        StagedWeights,
        StagingBuffer,
        WeightError,
        check_order,
        describe,
        make_inspector,
        named_tensors,
    )
else:
    __getattr__ = front_door(__name__)
