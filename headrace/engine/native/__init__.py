"""The embedded engine: continuous batching over a paged KV cache, running the trainer's own model code.

The path of a token: `engine` (the async protocol and the decode loop) → `core` (requests in, rollouts out, step by step) →
`scheduler` (what a `step` computes, over slots and `blocks`) → a runner (`plain_runner` on a CPU, `cuda/` on a GPU: attention
over `kv_cache`, then `sampling`).
"""
