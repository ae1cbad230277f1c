"""Parcels by broadcast: NCCL between GPUs, gloo between CPUs."""

from headrace.sync.collective.transport import CollectiveTransport

__all__ = ["CollectiveTransport"]
