"""The recipe's `[cluster]`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from headrace.settings import ConfigError

_SHORTEST_TOKEN = 32
"""Whoever gets a host to join in the launcher's place can try tokens against the proof that it sends."""


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Engines and trainer on other hosts, which join a run with `headrace join`."""

    listen: str = ""
    """HOST:PORT at which they join, over TLS; empty: none may. HOST is an address of this host, or 0.0.0.0 for all of them."""
    address: str = ""
    """The address of this host that the others reach; empty: that of `listen`."""
    trainer_joins: bool = False
    """Whether the trainer's ranks are on hosts that join with `--role trainer`; otherwise they are on this host. With
    orchestrate = "ray" Ray places them."""
    token_file: str = ""
    """A file with the token that they must know. HEADRACE_TOKEN goes before it. With neither, one is made for the run, in its
    folder: join.token."""

    def __post_init__(self) -> None:
        if not self.listen:
            return
        host, colon, port = self.listen.rpartition(":")
        if not (colon and host and port.isdecimal() and int(port) < 65536):
            raise ConfigError(f"listen = {self.listen!r}: must be HOST:PORT, such as 10.0.0.5:7070")
        if self.host in ("0.0.0.0", "::") and not self.address:
            raise ConfigError(f"listen = {self.listen!r}: other hosts must be told one address of this host; set address")

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    @property
    def reached_at(self) -> str:
        """The address of this host that the others are told."""
        return self.address or self.host


def read_token(file: str | Path, *, setting: str) -> str:
    """HEADRACE_TOKEN, else what the file holds; "" if there is neither."""
    token, where = os.environ.get("HEADRACE_TOKEN", "").strip(), "HEADRACE_TOKEN"
    if not token and str(file):
        token, where = read_token_file(file, setting=setting), f"{setting} {file}"
    if token and len(token) < _SHORTEST_TOKEN:
        how = f"it has {len(token)} characters, and needs {_SHORTEST_TOKEN}"
        raise ConfigError(f"{where}: the token could be guessed: {how}; make one with `openssl rand -hex 32`")
    return token


def read_token_file(file: str | Path, *, setting: str) -> str:
    try:
        token = Path(file).read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting} {file}: it cannot be read: {error}") from error
    if not token:
        raise ConfigError(f"{setting} {file}: it is empty; put the token in it")
    return token
