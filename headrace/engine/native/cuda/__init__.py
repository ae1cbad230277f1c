"""The engine on a GPU: paged attention and sampling as Triton kernels, decode steps as CUDA graphs.

Nothing here is imported unless the model is on a GPU (or a test runs the kernels in Triton's interpreter).
"""
