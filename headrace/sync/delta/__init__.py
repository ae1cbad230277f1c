"""The payload `delta`: the lossless difference between two versions of the same weights."""

from headrace.sync.delta.codec import DTYPES, apply, encode

__all__ = ["DTYPES", "apply", "encode"]
