"""Where scored groups wait for the trainer.

Each kind of buffer is a `BufferPolicy` in the table `kinds.POLICIES`: how many batches may wait before submission stops (one,
`buffer.depth`, as many as the gate lets run ahead, or any number), what happens beyond, whether generation and training take
turns, and which staleness settings it works with. `buffer.max_gb` bounds the bytes of every kind.
`buffer_policy(recipe)` is the recipe's choice, and `make_buffer(recipe)` builds the buffer.

`put` never blocks, so a full buffer cannot deadlock a run: it only stops submission, and still accepts the groups in flight,
which are bounded. Groups leave in completion order or, if batches must not depend on timing, in submission order; a window
lies between the two.

With `buffer.journal_gb`, scored groups are also written to a journal on disk (`journal`, `segments`): a killed run finds them
there when it is resumed, and what does not fit into `buffer.max_gb` waits there alone.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.buffer.groups import Facts, Group, GroupBuffer, JournalError, Versions, num_sampled
    from headrace.buffer.journal import Entry, Journal, task_fingerprint
    from headrace.buffer.kinds import (
        buffer_capacity,
        buffer_policy,
        check_buffer,
        describe_buffer,
        is_in_submission_order,
        is_ordered,
        make_buffer,
        needs_gate,
        open_journal,
        units_per_group,
    )
    from headrace.buffer.segments import Block, Head, Place
    from headrace.buffer.settings import BufferSettings
else:
    __getattr__ = front_door(__name__)
