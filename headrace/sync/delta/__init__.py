"""The payload `delta`: the lossless difference between two versions of the same weights."""

from headrace.sync.delta.codec import CHUNK, DTYPES, Stats, apply, encode, stats

__all__ = ["CHUNK", "DTYPES", "Stats", "apply", "encode", "stats"]
