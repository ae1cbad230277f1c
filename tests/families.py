"""Small random models of every family we serve."""

from __future__ import annotations

import torch
import transformers

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", MOE),
    "mixtral": ("MixtralConfig", MOE),
    "gpt_oss": ("GptOssConfig", {**MOE, "sliding_window": 8}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **MOE,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "head_dim": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
    ),
}


def make(family: str, **changes: object) -> transformers.PreTrainedModel:
    """The same weights every time, with eager attention until it is prepared; `changes` are made to its configuration."""
    name, extra = FAMILIES[family]
    config = getattr(transformers, name)(**{**SMALL, **extra, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval().float()
