"""The engine on a GPU: paged attention and sampling as Triton kernels, steps as CUDA graphs.
Imported only if the model is on a GPU, or a test runs the kernels in Triton's interpreter."""
