"""The payload `delta`: the difference between two versions of the same weights, without loss."""

from headrace.sync.delta.codec import CHUNK, DTYPES, Stats, apply, encode, stats

__all__ = ["CHUNK", "DTYPES", "Stats", "apply", "encode", "stats"]
