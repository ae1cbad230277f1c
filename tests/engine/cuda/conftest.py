"""Triton runs on Linux; elsewhere there are no kernels to test."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("triton") is None else []
