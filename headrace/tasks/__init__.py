"""Where tasks come from: rows with a `prompt` column and any others, which are passed to the reward.

`TaskStream` mixes sources by weight and is a pure function of (seed, position), so a resumed run goes on with the very
next task. `builtin:sort_digits` needs no download; `reasoning_gym:NAME` makes the tasks of that package.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.tasks.errors import TaskError as TaskError
    from headrace.tasks.settings import TaskSettings as TaskSettings
    from headrace.tasks.sources import (
        RowSource as RowSource,
        TaskSource as TaskSource,
        builtin_reward as builtin_reward,
        open_source as open_source,
    )
    from headrace.tasks.stream import TaskStream as TaskStream
else:
    __getattr__ = front_door(__name__)
