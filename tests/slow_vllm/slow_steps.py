"""Loaded by a vLLM server under test: every step takes some milliseconds more, so that a tiny model's rollouts are in flight
for as long as it takes to interrupt them."""

import time

from vllm.v1.sample.logits_processor import LogitsProcessor


class SlowSteps(LogitsProcessor):
    """Changes nothing."""

    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        time.sleep(0.015)
        return logits
