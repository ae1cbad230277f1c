"""Parcels to engines on other hosts, over HTTP."""

from headrace.sync.http.transport import PIECE_BYTES, HttpTransport, relay_places

__all__ = ["PIECE_BYTES", "HttpTransport", "relay_places"]
