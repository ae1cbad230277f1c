"""Where tasks come from: rows with a `prompt` column; all other columns are passed to the reward.

`TaskStream` mixes sources by weight and is a pure function of (seed, position), so a resumed run continues with the
next task. `builtin:sort_digits` needs no download; `reasoning_gym:NAME` generates that package's tasks. To add generated
tasks, write one file and add one line to the table in `sources.py`.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.tasks.settings import TaskError, TaskSettings
    from headrace.tasks.sources import RowSource, TaskSource, TaskStream, builtin_reward, open_source
else:
    __getattr__ = front_door(__name__)
