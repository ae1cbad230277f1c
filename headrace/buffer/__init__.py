"""Where scored groups wait for the trainer.

A kind of buffer is a file with a `BufferPolicy`: how many batches may wait before submission stops (one, `buffer.depth`, or as
many as come), whether generation and training take turns, and which staleness settings it works with. `kinds.POLICIES` is the
table of them, `buffer_policy(recipe)` the one a recipe chooses, and `make_buffer(recipe)` makes it.

Putting a group never blocks, so a full buffer cannot deadlock a run: it only stops submission, and what is in flight when it
fills up is bounded and still comes in. Groups leave in the order they were completed or, where batches must not depend on
timing, submitted.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.buffer.groups import Group, GroupBuffer
    from headrace.buffer.kinds import buffer_policy, check_buffer, describe_buffer, is_in_submission_order, make_buffer
    from headrace.buffer.settings import BufferSettings
else:
    __getattr__ = front_door(__name__)
