"""Triton kernels, launched by the files above.
Triton compiles these functions from source: their arguments are its own pointers and numbers, so they are not type-checked.
Names in capitals are compile-time constants."""
