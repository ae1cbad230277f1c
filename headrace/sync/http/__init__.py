"""Parcels to engines on other hosts, over HTTP."""
