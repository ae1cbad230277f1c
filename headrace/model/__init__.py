"""The one model definition both sides run.

Engine and trainer load the same transformers model and swap in attention through transformers' `AttentionInterface`;
nothing in a model is forked, so names need no mapping between them and a mismatch is down to kernels alone. Here live
what both share: loading and refusing models (`load`), the attention hook and its reference arithmetic (`attention`),
the head that turns hidden states into logprobs (`head`), the memory a model's tensors lie in (`arena`), how new weights
come into it (`weights`), and the model built from scratch (`tiny`).
"""
