"""The choices of this room: every transport and payload by name. Importing this does not import torch."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace.errors import SyncError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.records import WeightUpdate
    from headrace.sync.full import FullPayload
    from headrace.sync.transport import Transport, TransportConfig

TRANSPORTS = {
    "memory": "headrace.sync.memory:MemoryTransport",
    "shared_memory": "headrace.sync.shared_memory:SharedMemoryTransport",
    "cuda_ipc": "headrace.sync.cuda_ipc:CudaIpcTransport",
    "collective": "headrace.sync.collective.transport:CollectiveTransport",
    "files": "headrace.sync.files:FilesTransport",
    "http": "headrace.sync.http.transport:HttpTransport",
    "shared_memory+http": "headrace.sync.two_routes:SharedMemoryAndHttp",
    "cuda_ipc+http": "headrace.sync.two_routes:CudaIpcAndHttp",
}
"""`module:class` of each. The class says what the transport can do and what it needs."""
PAYLOADS = {
    "full": "headrace.sync.full:FullPayload",
    "delta": "headrace.sync.delta.payload:DeltaPayload",
}


def transport_class(name: str) -> type[Transport]:
    """Return a transport's class, which says what it can do and what it needs."""
    found: type[Transport] = _find(TRANSPORTS, name, "transport")
    return found


def payload_class(name: str) -> type[FullPayload]:
    found: type[FullPayload] = _find(PAYLOADS, name, "payload")
    return found


def _find(table: dict[str, str], name: str, what: str) -> Any:  # noqa: ANN401  (a class of the table's kind)
    if name not in table:
        raise SyncError(f"{name!r} is no {what}; known are {', '.join(table)}")
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def make_transport(config: TransportConfig, *, is_sender: bool, device: str) -> Transport:
    return transport_class(config.transport).make(config, is_sender=is_sender, device=device)


def resolve_transport(
    wanted: str, *, is_one_process: bool, shares_gpu: bool, between_hosts: bool = False, on_this_host: bool = True
) -> str:
    """Resolve `sync.transport = "auto"`. `shares_gpu`: all engines receive on the trainer's GPU. `between_hosts`: some may
    receive on other hosts; all of them, unless trainer and engines are `on_this_host`."""
    if wanted != "auto":
        return wanted
    if is_one_process:
        return "memory"
    if not on_this_host:
        return "http"
    near = "cuda_ipc" if shares_gpu else "shared_memory"
    return f"{near}+http" if between_hosts else near


def is_pushed(update: WeightUpdate) -> bool:
    """Whether receivers wait for `WeightSync.send`."""
    return any(transport_class(part.transport).is_pushed for part in update.parts)


def routed(update: WeightUpdate, relays: Sequence[str]) -> list[WeightUpdate]:
    """Return the update addressed to each receiver, given their relay URLs."""
    routes = [transport_class(part.transport).routes(part, relays) for part in update.parts]
    return [replace(update, parts=tuple(parts[row] for parts in routes)) for row in range(len(relays))]
