"""The contract: the few records that cross process boundaries, each frozen and checked when it is made.

Engines return `Rollout`s, the trainer takes `Batch`es, and `WeightUpdate`s go back to the engines. A rollout is one flat record
aligned per token, whether single-turn, multi-turn, with tools, partial or resumed.

For example, a two-token prompt answered by two sampled tokens:

    index      0       1       2        3
    token_ids  7       9       4        2
    source     PROMPT  PROMPT  SAMPLED  SAMPLED
    loss_mask  False   False   True     True
    logprobs   0       0       -0.31    -0.02
    versions   -1      -1      12       13        the weights changed between the two
    calls      Call(start=2, stop=4, ...)
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.records.batch import Batch
    from headrace.records.check import check_tokens
    from headrace.records.columns import (
        pack_batch,
        pack_episodes,
        pack_rollouts,
        pack_samplings,
        portions,
        unpack_batch,
        unpack_episodes,
        unpack_rollouts,
        unpack_samplings,
    )
    from headrace.records.episode import UNSHAPED, Episode
    from headrace.records.expert_routing import unknown_expert, unknown_routing
    from headrace.records.first_calls import answered, is_prompt
    from headrace.records.frames import WireError, decode, encode, read_frames, wire_errors
    from headrace.records.rollout import SAMPLED_ENTROPY, Rollout
    from headrace.records.sampling import (
        Call,
        FinishReason,
        InfraAbort,
        Invalid,
        Outcome,
        Sampling,
        SamplingMask,
        Scored,
        Source,
        join_masks,
    )
    from headrace.records.validate import NOT_VARIABLES, Array, Plain, check_messages, check_plain, grown, is_template_variable
    from headrace.records.weight_update import Manifest, Part, TensorInfo, WeightUpdate
else:
    __getattr__ = front_door(__name__)
