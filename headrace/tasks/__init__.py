"""Where tasks come from: rows with a `prompt` column; all other columns are passed to the reward. `files.py` reads them from
files, folders, the hub, pandas and `datasets`.

`TaskStream` mixes sources by weight and is a pure function of (seed, position), so a resumed run continues with the
next task. With a sampler (`samplers.py`), earlier results decide what is next. `builtin:sort_digits` needs no download;
`reasoning_gym:NAME` generates that package's tasks. To add generated tasks, write one file and add one line to the table in
`sources.py`.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.tasks.files import read_rows
    from headrace.tasks.samplers import SampledTasks, with_sampler
    from headrace.tasks.settings import SamplerSettings, TaskError, TaskSettings
    from headrace.tasks.sources import RowSource, Task, TaskSource, TaskStream, builtin_reward, is_generated, open_source
else:
    __getattr__ = front_door(__name__)
