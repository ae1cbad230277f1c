"""The difference between two versions of the same weights, without loss."""

from headrace.sync.delta.codec import CHUNK, Stats, apply, encode, stats

__all__ = ["CHUNK", "Stats", "apply", "encode", "stats"]
