"""`headrace bench NAME`: one file per benchmark, with its peers and child processes beside it, and one harness for all.

A benchmark is `run(*, quick, json_file, …)`: it makes a plan for the machine and passes `harness.run_parts` parts that yield
rows. `take_turns` interleaves contestants; `child` runs peers and receivers in child processes; `loads` makes models, requests,
batches and trainers; `measure` measures time and memory; `stubs` runs the four loops around stubs. All print a table and write
the same JSON; figures in the docs name their command.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.bench.command import add_bench_command
else:
    __getattr__ = front_door(__name__)
