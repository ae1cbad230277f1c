"""Triton kernels of training."""
