"""A disk small enough to fill."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of five megabytes; only root may make one."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a file system needs root")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(mount)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no tmpfs here: {done.stderr.decode()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)
