"""`headrace bench NAME`: one file per benchmark, with its peers and child processes beside it, and one harness for all.

A benchmark is `run(*, quick, json_file, …)`: it makes a plan for the machine and hands `harness.run_parts` parts that yield
rows. `take_turns` interleaves contestants; `child` runs peers and receivers in processes of their own; `loads` and `rollouts`
make models, requests and batches; `gauge` and `gpu_watch` measure time and memory; `loop_run` and `stubs` run the four loops
around engines and trainers that do nothing. All print a table and write the same JSON; figures in the docs name their command.
"""
