"""Where tasks come from: rows with a `prompt` column and any others, which are passed to the reward.

`TaskStream` mixes sources by weight and is a pure function of (seed, position), so a resumed run goes on with the very
next task. `builtin:sort_digits` needs no download; `reasoning_gym:NAME` makes the tasks of that package.
"""

from headrace.tasks.errors import TaskError
from headrace.tasks.sources import TaskSource, builtin_reward, open_source
from headrace.tasks.stream import TaskStream

__all__ = ["TaskError", "TaskSource", "TaskStream", "builtin_reward", "open_source"]
