"""The embedded engine: continuous batching over a paged KV cache, running the trainer's own model code.

`core` is the engine proper, a plain object that is stepped; `engine` puts it behind the async protocol; `cache` holds
keys and values in blocks; `context` is the attention of a step; `sampler` draws.
"""
