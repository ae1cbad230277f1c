"""Headrace's names for TRL's settings, for the error message when a user writes TRL's."""

from __future__ import annotations

_LORA = "LoRA is not supported yet: all weights are trained"
_QUANTISED = "quantized weights are not supported yet: model.dtype is float32 or bfloat16"
_SHARDED = "a trainer over several GPUs is not supported yet: it has one"

TRL: dict[str, str] = {
    **dict.fromkeys(("lora", "lora_alpha", "lora_r", "lora_rank", "lora_target_modules", "peft_config", "use_peft"), _LORA),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), _QUANTISED),
    **dict.fromkeys(("deepspeed", "fsdp"), _SHARDED),
    "adam_beta1": "train.beta1",
    "adam_beta2": "train.beta2",
    "args": "give the values of a GRPOConfig as sections, such as train = {group_size = 8}",
    "beta": "train.kl",
    "bf16": "model.dtype",
    "epsilon": "it is train.constants.clip_low and train.constants.clip_high here",
    "epsilon_high": "train.constants.clip_high",
    "eval_dataset": "it is [[evaluate.tasks]] here, held_out= in Python",
    "eval_steps": "evaluate.every",
    "fp16": "model.dtype",
    "generation_batch_size": "train.batch",
    "gradient_accumulation_steps": "a step is cut into passes of train.micro_batch_tokens here, as many as it takes",
    "gradient_checkpointing": "train.recompute",
    "importance_sampling_level": "train.loss = 'gspo' has sequence-level ratios here",
    "loss_type": "it is train.loss, with train.loss_mean and train.advantage, here",
    "lr_scheduler_type": "train.schedule",
    "max_completion_length": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "max_prompt_length": "prompts are never cut here, and model.context bounds prompt and completion together",
    "max_steps": "steps",
    "model_name_or_path": "model.path",
    "num_generations": "train.group_size",
    "num_iterations": "a batch is trained once here, in train.mini_batches optimizer steps",
    "num_train_epochs": "the length of a run is steps here, each of train.batch ÷ train.group_size tasks",
    "output_dir": "the run's folder is --run-dir on the command line, run_dir= in Python",
    "per_device_train_batch_size": "it is train.batch here, of a whole step, and train.micro_batch_tokens bounds memory",
    "ref_model": "train.reference",
    "report_to": "observe.sinks",
    "reward_funcs": "it is reward.functions here, reward= in Python",
    "reward_weights": "reward.weights",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": "train.advantage",
    "steps_per_generation": "train.mini_batches",
    "train_dataset": "it is [[tasks]] here, tasks= in Python",
    "use_vllm": "engine.kind",
    "vllm_gpu_memory_utilization": "engine.vllm.arguments.gpu_memory_utilization",
    "vllm_importance_sampling_correction": "staleness.correct",
    "vllm_server_base_url": "engine.vllm.urls",
    "vllm_tensor_parallel_size": "engine.vllm.arguments.tensor_parallel_size",
    "warmup_ratio": "train.warmup_steps",
}
"""TRL's name → the recipe key, or a sentence where no single key does the same."""
