"""`[engine.vllm]`: where the servers run, what they are started with, how long to wait for them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from headrace.settings import OPERATIONAL, ConfigError, check

_DECIDED = {
    "model": "model.path decides it; set that instead",
    "dtype": "model.dtype decides it; set that instead",
    "max_model_len": "model.context decides it; set that instead",
    "max_num_seqs": "engine.slots decides it; set that instead",
    "block_size": "engine.block_size decides it; set that instead",
    "num_gpu_blocks_override": "engine.kv_blocks decides it; set that instead",
    "enforce_eager": "engine.graphs decides it; set that instead",
    "host": "Headrace chooses where its servers listen; leave it out",
    "port": "Headrace chooses where its servers listen; leave it out",
    "api_key": "a recipe is saved and must hold no token; leave it out",
    "hf_token": "a recipe is saved and must hold no token; put it in the variable HF_TOKEN",
    "max_logprobs": "Headrace asks for as many as it needs; leave it out",
    "generation_config": "the recipe's sampling decides; leave it out",
    "seed": "the recipe's seed decides it; set that instead",
    "return_sampling_mask": "Headrace reads it off the logprobs; leave it out",
    "enable_return_routed_experts": "engine.record_routing decides it; set that instead",
    "config": "a file could set what Headrace decides; give its lines here",
    "weight_transfer_config": "engine.vllm.handover decides it; set that instead",
    "stream_interval": "Headrace decides when tokens may come several at a time; leave it out",
    "enable_lora": "lora.rank decides it; set that instead",
    "max_lora_rank": "lora.rank decides it; set that instead",
    "lora_target_modules": "lora.targets decides it; set that instead",
    "uds": "Headrace chooses where its servers listen; leave it out",
    "api_server_count": "Headrace needs a single API server; leave it out",
    "trust_remote_code": "a model's own code is never run; leave it out",
    "load_format": "weights are read from safetensors, never from pickles; leave it out",
    "logprobs_mode": "training needs the logprobs of the distribution sampled from; leave it out",
}
"""vLLM's arguments that a recipe must not set, and why."""
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Arguments that multiply the GPUs of a server."""
_PLACEMENT = (*PARALLEL, "gpu_memory_utilization", "kv_cache_memory_bytes")
"""Arguments that say where a server runs, not what it computes."""
_JSON_LISTS = ("allowed_origins", "allowed_methods", "allowed_headers")
_COMMA_LISTS = ("device_ids", "disable_access_log_for_endpoints")
_REPEATED = ("middleware",)
"""Options of vLLM 0.26 to 0.32 that do not take lists as separate words."""


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """For `engine.kind = "vllm"`: servers that already run, or are started beside each engine's process."""

    python: str = field(default="", metadata=OPERATIONAL)
    """Python interpreter of an environment with vLLM; empty takes the variable HEADRACE_VLLM_PYTHON, then this one."""
    urls: tuple[str, ...] = field(default=(), metadata=OPERATIONAL)
    """Servers that already run, one engine each, such as `http://host:8000`; empty starts engine.count of them here."""
    token_variable: str = field(default="VLLM_API_KEY", metadata=OPERATIONAL)
    """The environment variable with the token of the servers in `urls`; never the token itself, since recipes are saved."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments for vLLM's own command line: `tensor_parallel_size = 2` is `--tensor-parallel-size=2`, true a bare flag, false
    the flag with `--no-` before it, a list its words one after another; tables are given as JSON."""
    handover: Literal["auto", "folder", "ipc", "nccl"] = field(default="auto", metadata=OPERATIONAL)
    """How new weights get into a server. `folder`: it reads files in sync.folder. `ipc`: it opens GPU memory of the engine's
    process, on the same GPU. `nccl`: they are broadcast from the trainer's GPU to its own. auto is folder for `urls` and on the
    CPU, ipc for servers of one GPU, nccl for one server of more beside one trainer rank, otherwise folder. Servers on hosts
    that join read files."""
    start_seconds: float = field(default=300.0, metadata=OPERATIONAL)
    """How long a server may take to come up."""
    answer_seconds: float = field(default=120.0, metadata=OPERATIONAL)
    """How long a server may be silent while rollouts are in flight before it counts as dead."""

    def __post_init__(self) -> None:
        for url in self.urls:
            _check_url(url)
        servers = [url.rstrip("/") for url in self.urls]
        check(len(set(servers)) == len(servers), "urls", list(self.urls), "a list that names each server once")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.token_variable):
            raise ConfigError("token_variable is not the name of an environment variable; put the token in one and name that")
        for key, value in self.arguments.items():
            _check_argument(key, value)
        for name in ("python", "arguments"):
            if self.urls and getattr(self, name):
                raise ConfigError(f"{name} = {getattr(self, name)!r}: no server is started where urls names some; leave it out")
        check(0 < self.start_seconds < math.inf, "start_seconds", self.start_seconds, "a number above 0")
        check(0 < self.answer_seconds < math.inf, "answer_seconds", self.answer_seconds, "a number above 0")

    @property
    def gpus_per_server(self) -> int:
        return math.prod(int(self.arguments.get(name, 1)) for name in PARALLEL)

    @property
    def shards(self) -> int:
        """Among which a server's weights are divided."""
        return self.gpus_per_server // int(self.arguments.get("data_parallel_size", 1))

    def identity(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Without the arguments that may change when a run is resumed."""
        return {"arguments": {key: value for key, value in settings["arguments"].items() if key not in _PLACEMENT}}

    def command_line(self) -> list[str]:
        """`arguments` as vLLM's command line takes them."""
        words = []
        for key, value in self.arguments.items():
            option = key.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{option}" if value else f"--no-{option}")
            elif not isinstance(value, list) or key in _JSON_LISTS:
                words.append(f"--{option}={_word(value)}")
            elif key in _COMMA_LISTS:
                words.append(f"--{option}={','.join(map(_word, value))}")
            elif key in _REPEATED:
                words += [f"--{option}={_word(item)}" for item in value]
            else:
                words += [f"--{option}", *map(_word, value)]
        return words


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_server = bool(parts.hostname) and parts.port != 0 and parts.path in ("", "/") and not re.search(r"[\s?#]", url)
    except ValueError:  # a port that is none, an address whose bracket is not closed
        is_server = False
    if "@" in url:
        shown = f"…@{url.rpartition('@')[2]}"
        raise ConfigError(
            f"urls = {shown!r}: a recipe is saved and must hold no password; put the token in the variable token_variable names"
        )
    wanted = "http:// or https://, a host and at most a port, such as 'http://localhost:8000'"
    check(is_server and url.startswith(("http://", "https://")), "urls", url, wanted)


def _check_argument(key: str, value: object) -> None:
    name = f"arguments.{key}"
    if not (key.isascii() and key.isidentifier()):
        raise ConfigError(f"{name} is not a name; write vLLM's option without dashes, such as tensor_parallel_size")
    decided = next((other for other in _DECIDED if other.startswith(key)), None)  # argparse accepts any unique beginning
    if decided is not None:
        shown = "…" if decided in ("api_key", "hf_token") else repr(value)
        taken = "" if key == decided else f"vLLM takes it for {decided}, and "
        raise ConfigError(f"{name} = {shown}: {taken}{_DECIDED[decided]}")
    parallel = next((other for other in PARALLEL if other.startswith(key)), None)
    if parallel not in (None, key):
        raise ConfigError(f"{name} = {value!r}: vLLM takes it for {parallel}; write that")
    if parallel is not None:
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        check(is_count, name, value, "a whole number of at least 1")
    check(_is_plain(value), name, value, "text, a finite number, true or false, or a list or table of these")
    if isinstance(value, list) and key not in _JSON_LISTS:
        is_said = bool(value) and not any(_word(item).startswith("-") for item in value)
        check(is_said, name, value, "a list of one or more that do not begin with '-': vLLM's command line takes no others")


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
