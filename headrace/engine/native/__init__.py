"""The embedded engine: continuous batching over a paged KV cache, running the trainer's own model code.

One token's way: `engine` (the async protocol, and where the decode loop runs) → `core` (requests in, rollouts out, one step at
a time) → `scheduler` (what a step computes, over `slots` and `blocks`) → a runner (`plain_runner` on a CPU, `cuda/` on a GPU:
attention over `kv_cache`, then `sampling`).
"""
