"""What a vLLM release can do, read from its interface's own description (OpenAPI)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.engine.vllm.api import ServerInfo


@dataclass(frozen=True)
class Ability:
    """Something a server must do, and how its interface shows that it can."""

    what: str
    since: str
    """The first release that can."""
    path: str = ""
    field: tuple[str, str] = ("", "")
    """(start of a message's name in the interface, a field of that message)."""

    def is_in(self, about: ServerInfo) -> bool:
        return (not self.path or self.path in about.paths) and (not self.field[0] or about.has(*self.field))


GENERATE = Ability("tokens in and tokens out", "0.14", path="/inference/v1/generate")
PAUSE = Ability("pausing with rollouts in flight (VLLM_SERVER_DEV_MODE=1 opens it)", "0.15", path="/pause")
RELOAD = Ability("new weights from a folder (VLLM_SERVER_DEV_MODE=1 opens it)", "0.14", path="/collective_rpc")
DROP_CACHE = Ability("dropping the KV cache (VLLM_SERVER_DEV_MODE=1 opens it)", "0.14", path="/reset_prefix_cache")
SALT = Ability("a prefix cache kept apart by version", "0.14", field=("GenerateRequest", "cache_salt"))
NAME_VERSION = Ability(
    "the weight version of every token",
    "0.32",
    path="/update_weight_version",
    field=("GenerateTokensStreamChoice", "weight_versions"),
)
TRANSFER = Ability("new weights from GPU memory (VLLM_SERVER_DEV_MODE=1 opens it)", "0.21", path="/start_weight_update")

NEEDED = (GENERATE, PAUSE, RELOAD, DROP_CACHE, SALT)  # by every run


def check_abilities(about: ServerInfo, *, server: str, more: tuple[Ability, ...] = ()) -> None:
    """Refuse a server that lacks what every run needs, or `more`."""
    lacking = [ability for ability in (*NEEDED, *more) if not ability.is_in(about)]
    if lacking:
        told = "; ".join(f"{ability.what} (vLLM {ability.since} can)" for ability in lacking)
        raise ConfigError(f"vLLM {about.version} at {server} cannot do what this run needs: {told}")
