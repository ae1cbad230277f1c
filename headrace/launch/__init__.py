"""From one command to a run: check, folder, processes, model, session, train, close.

`launcher.py` takes these steps in order. Each choice of `orchestrate` is a file: `inline.py` (everything in the launcher's
process) and `local.py` (engines and trainer in their own processes; lost ones are restarted). `process.py` is the
launcher's side of a process and `child.py` the process itself; `heartbeat.py` tells it that the launcher is gone.
`placement.py` decides where each runs, `build.py` makes engines and trainers from a recipe, and `forecast.py` predicts memory.
`cluster.py` lets engines and trainer on other hosts join a `local` run; `hosts.py` is the launcher's side of a host,
`joining.py` its own, and `joined_trainer.py` carries checkpoints between them. `on_ray.py` has Ray place them, and
`scaling.py` says when the run wants an engine more or less.
`handle.py` runs it all in a thread, for `headrace.start`.
`start_model.py` has the model that RL starts from, which `sft.py` may have fine-tuned on the rows that `examples.py` encodes;
`model_cache.py` keeps it, and the models that hosts fetch.
`evaluation.py`, `serving.py` and `merging.py` are the commands that do not train.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.launch.build import build_trainer, check_columns, check_settings, make_roles, special_stops
    from headrace.launch.evaluation import EvaluationResult, evaluate
    from headrace.launch.examples import encode_examples
    from headrace.launch.folder import is_in_use, read_summary
    from headrace.launch.forecast import (
        Forecast,
        check_division,
        count_parameters,
        describe_adapter,
        describe_memory,
        forecast_memory,
        longest_prompt,
    )
    from headrace.launch.handle import RunHandle, RunKilled
    from headrace.launch.inputs import (
        UserInputs,
        check_examples,
        check_inputs,
        check_task_columns,
        held_out_sources,
        held_out_tasks,
        open_tasks,
        reward_functions,
        shared_prompts,
    )
    from headrace.launch.joining import JoinOptions, join
    from headrace.launch.launcher import Launch, RunResult, launch
    from headrace.launch.local import LocalProcesses
    from headrace.launch.merging import merge
    from headrace.launch.placement import lends, pick_device, receiving_device, set_threads, versions_for_servers
    from headrace.launch.process import RoleProcess
    from headrace.launch.serving import serve
    from headrace.launch.settings import ClusterSettings, read_token, read_token_file
    from headrace.launch.start_model import model_folder
    from headrace.launch.stop import sigterm_as_interrupt
else:
    __getattr__ = front_door(__name__)
