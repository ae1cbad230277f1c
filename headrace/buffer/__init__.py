"""Where scored groups wait for the trainer.

The kinds differ in one number, how many batches may wait before feeding stops: 1 (synchronous, one ahead), k (bounded)
or no bound (stream); whether generation may run on while the trainer trains is the gate's to say. Putting never blocks,
so a full buffer cannot lock up: what is in flight when it fills is bounded (`Run.may_submit`) and comes in too.

Groups leave in the order they were completed or, where batches must not depend on timing, submitted.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.buffer.groups import Group as Group, GroupBuffer as GroupBuffer
    from headrace.buffer.settings import BufferSettings as BufferSettings
else:
    __getattr__ = front_door(__name__)
