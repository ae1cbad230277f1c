"""`headrace merge`: an adapter and the model it belongs to, as one model."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from transformers.utils import logging as transformers_logging

from headrace.launch.evaluation import find_model
from headrace.lora import base_of, merge_adapter
from headrace.model import load_model, load_tokenizer
from headrace.settings import ConfigError


def merge(model: str, out: Path) -> Path:
    """Write the model that an adapter makes of its base, in float32, to a new folder. `model`: a run, one of its checkpoints,
    or a folder with an adapter. Nothing is left in `out` if it fails."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out}: it exists already; name a folder that is new or empty")
    path, *_ = find_model(model)
    if not Path(path).is_dir():
        raise ConfigError(f"{model!r}: there is no such folder; name a run, one of its checkpoints, or an adapter's folder")
    if not base_of(path):
        raise ConfigError(f"{path}: there is no adapter to merge, for it is a whole model already; use it as it is")
    transformers_logging.disable_progress_bar()
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".merging-", dir=out.absolute().parent, ignore_cleanup_errors=True) as temporary:
        try:
            merged = load_model(path)
            merge_adapter(merged)
            load_tokenizer(path).save_pretrained(temporary)
        except ValueError as error:  # the base is missing or another
            raise ConfigError(str(error)) from error
        merged.save_pretrained(temporary)
        out.mkdir(exist_ok=True)
        for file in Path(temporary).iterdir():
            shutil.move(file, out)
    return out
