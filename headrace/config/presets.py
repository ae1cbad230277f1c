"""The published libraries as settings: how each runs its seven axes, as of 2026, so that they can be compared on the same work.

A preset sets the mechanism, not the placement or the sizes: processes, devices, batch, group and lengths are the recipe's own.
`orchestration` and `backend` are therefore words, not settings: a preset of a library that needs Ray runs in local processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Preset:
    orchestration: str
    """What the library's processes are."""
    backend: str
    """What the library trains with."""
    settings: dict[str, tuple[Any, str]]
    """Dotted key → (value, why)."""
    advice: dict[str, str] = field(default_factory=dict)
    """What to set besides, and when; a preset cannot, because it depends on the model or the task."""
    differs: str
    """What the library does otherwise."""

    def __post_init__(self) -> None:
        self.settings.setdefault("train.stream_parts", (1, "training begins once a whole batch is there"))


_DRAIN = ("drain", "rollouts in flight finish before the weights change")
_KEEP = ("keep", "weights are swapped between two decode steps; rollouts and their KV cache stay")
_ABORT = ("abort", "rollouts in flight are stopped, and resumed from their prefix under the new weights")
_COLLECTIVE = ("collective", "weights are broadcast from the trainer to the engines")
_FILES = ("files", "weights are written to a shared folder, and engines are told to read them")
_NO_DROPS = ("never", "what was generated is trained, also a group that others overtook and that lags more than max_lag")
_GATE = ("depth", "submission stops when it is max_lag versions ahead of training")
_TOKEN_AGE = ("oldest", "groups with a token older than max_lag are dropped")
_FIRST_AGE = ("first", "a group is as old as the weights it began with")
_REFILL = ("refill", "each dropped group is replaced by one other task")
_ROUTING = {"engine.record_routing = true": "models with experts: the trainer replays the engine's routing"}

PRESETS: dict[str, Preset] = {
    "trl": Preset(
        orchestration="one process",
        backend="accelerate, DeepSpeed",
        settings={
            "buffer.kind": ("synchronous", "no buffer: a batch is generated, then trained"),
            "staleness.max_lag": (0, "on-policy"),
            "partial.interrupt": _DRAIN,
            "sync.transport": _COLLECTIVE,
        },
        differs="TRL's GRPOTrainer as of March 2026. It sends tensor by tensor, Headrace in buckets. TRL merges a LoRA adapter "
        "into the weights that it sends; Headrace sends the adapter alone.",
    ),
    "trl-async": Preset(
        orchestration="child process, queue",
        backend="accelerate",
        settings={
            "buffer.kind": ("stream", "a queue of samples that is never the bound in practice (1,024)"),
            "staleness.max_lag": (4, "its max_staleness"),
            "staleness.gate": ("slots", "counts samples in flight, not groups"),
            "staleness.slots": (4.0, "max_staleness × batch samples are in flight at most"),
            "staleness.reject": _FIRST_AGE,
            "staleness.rejected": _REFILL,
            "partial.interrupt": _KEEP,
            "sync.transport": _COLLECTIVE,
        },
        advice={"partial.interrupt = 'lease'": "with lora.rank: a rollout ends with the adapter version that it began with"},
        differs="TRL's AsyncGRPOTrainer queues samples; here a group waits until its siblings are scored, because advantages "
        "compare them. Its queue also bounds what waits, at 1,024 samples; here only buffer.max_gb does.",
    ),
    "verl": Preset(
        orchestration="Ray",
        backend="FSDP, Megatron",
        settings={
            "buffer.kind": ("stream", "samples flow one by one through a message queue"),
            "train.mini_batches": (4, "several mini-batches are trained for each parameter sync (trigger_parameter_sync_step)"),
            "train.stream_parts": (4, "each is trained as soon as its samples are there"),
            "staleness.max_lag": (8, "its staleness threshold"),
            "staleness.gate": _GATE,
            "staleness.reject": _TOKEN_AGE,
            "staleness.rejected": _REFILL,
            "partial.interrupt": _ABORT,
            "sync.transport": _COLLECTIVE,
            "engine.lend": (True, "an idle trainer's device generates"),
        },
        advice={"staleness.rejected = 'wait'": "verl's other choice: training waits for a group before it is too old"},
        differs="As in its recipes (use_rollout_log_probs), the ratio is against the log-probs of the rollout. verl can also "
        "correct by the weights that a version began with, which it puts back for each mini-batch; staleness.correct takes the "
        "policy that a step finds. On GPUs engine.lend needs sync.transport = 'auto': NCCL does not broadcast within one GPU.",
    ),
    "art": Preset(
        orchestration="asyncio",
        backend="Unsloth, torchtune, Megatron",
        settings={
            "lora.rank": (8, "ART trains an adapter"),
            "lora.alpha": (16.0, "twice the rank"),
            "buffer.kind": ("resizable", "the queue is resized as workers are tuned"),
            "staleness.max_lag": ("auto", "workers and queue tune themselves"),
            "staleness.max_lag_limit": (4, "its max_steps_off_policy"),
            "staleness.gate": _GATE,
            "staleness.reject": _FIRST_AGE,
            "sync.transport": ("files", "the adapter alone is saved, and the engine loads it under a new name"),
            "partial.interrupt": ("lease", "a rollout keeps the adapter version it began with until it ends"),
            "train.loss": ("cispo", "its default loss"),
            "train.constants.clip_low": (1.0, "no lower clip"),
            "train.constants.clip_high": (4.0, "upper clip at a ratio of 5"),
        },
        differs="ART tunes the number of rollout workers and the queue apart; here one controller moves the gate's depth, and "
        "the buffer follows it.",
    ),
    "slime": Preset(
        orchestration="Ray",
        backend="Megatron",
        settings={
            "buffer.kind": ("synchronous", "a rollout stage ends as soon as a batch is whole"),
            "partial.oversample": (2.0, "twice the groups that a batch needs are started"),
            "partial.interrupt": ("abort", "the unfinished are aborted, kept, and continued in the next stage"),
            "staleness.max_lag": (1, "a partial is meant for the next batch"),
            "staleness.reject": ("never", "partials are trained however old they have become"),
            "staleness.correct": (["tis", "opsm"], "truncated importance weights, and the off-policy sequence mask"),
            "sync.payload": ("delta", "only changed bits are sent, without loss"),
            "sync.transport": ("files", "the delta lies on disk, and engines read it"),
        },
        advice={
            **_ROUTING,
            'staleness.correct = ["tis", "opsm", "prefix"]': "masks the prefix that older weights sampled, as slime can",
        },
        differs="slime sends whole weights by a bucketed broadcast where engines share a cluster with the trainer; set "
        "sync.payload = 'full' and sync.transport = 'collective' for that. Its top-p mask is an option; here the "
        "trainer always normalises over the tokens that top-p left. It does not train adapters.",
    ),
    "miles": Preset(
        orchestration="Ray",
        backend="Megatron",
        settings={
            "buffer.kind": ("bounded", "finished groups wait in a FIFO"),
            "buffer.depth": (2, "its capacity factor: two batches"),
            "staleness.max_lag": (2, "its max_weight_staleness, which has no default"),
            "staleness.gate": ("slots", "samples, not groups, take slots"),
            "staleness.slots": (2.0, "two batches of samples are unfinished at most"),
            "staleness.reject": ("oldest", "staleness is checked when a batch is taken"),
            "staleness.rejected": ("retry", "a stale group's task is generated again"),
            "staleness.correct": (["tis", "opsm"], "truncated importance weights, and the off-policy sequence mask"),
            "partial.interrupt": ("retract", "the KV cache is dropped and prefixes are computed again under the new weights"),
            "sync.payload": ("delta", "only what changed is sent, without loss"),
            "sync.transport": ("auto", "CUDA IPC where trainer and engine share a GPU"),
        },
        advice={**_ROUTING, 'lora.targets = ["all", "experts"]': "with lora.rank: an adapter for each expert"},
        differs="With a full FIFO, miles has its producer wait with what is finished; here submission waits. It can also send "
        "weights by RDMA.",
    ),
    "areal": Preset(
        orchestration="asyncio, HTTP",
        backend="FSDP, Megatron",
        settings={
            "buffer.kind": ("stream", "the capacity alone bounds what waits"),
            "staleness.max_lag": (4, "η, its max_head_offpolicyness, which a run sets"),
            "staleness.gate": ("depth", "the capacity (η + version + 1)·B − accepted − running is the same count"),
            "staleness.reject": _NO_DROPS,
            "train.loss": ("decoupled_ppo", "the importance weight is apart from the clipped ratio"),
            "train.constants.cap": (5.0, "tokens with a larger importance weight are masked (behave_imp_weight_cap)"),
            "partial.interrupt": _ABORT,
            "sync.transport": _FILES,
        },
        differs="AReaL counts samples; here groups are counted, whose siblings are trained together. It can broadcast weights "
        "instead of writing files.",
    ),
    "verifiers-rl": Preset(
        orchestration="threads",
        backend="accelerate, DeepSpeed",
        settings={
            "buffer.kind": ("one_ahead", "the next batch is generated while this one is trained"),
            "staleness.max_lag": (1, "one batch ahead"),
            "staleness.gate": _GATE,
            "buffer.order": ("submission", "batches are trained in the order they were started"),
            "staleness.reject": ("never", "in order and one ahead, nothing grows too old"),
            "partial.interrupt": _DRAIN,
            "sync.transport": _COLLECTIVE,
        },
        advice={"environment.name": "its environments run here: docs/adapters.md"},
        differs="verifiers' own trainer waits for a whole batch of rollouts at a time; here groups are scored as they end.",
    ),
    "open-instruct": Preset(
        orchestration="Ray",
        backend="DeepSpeed",
        settings={
            "buffer.kind": ("bounded", "prompts of a few steps are queued ahead"),
            "buffer.depth": (8, "its async_steps"),
            "staleness.max_lag": (8, "its async_steps"),
            "staleness.gate": _GATE,
            "staleness.reject": _TOKEN_AGE,
            "staleness.rejected": ("refill", "what is dropped is replenished with new prompts"),
            "staleness.correct": ("tis", "truncated importance weights"),
            "staleness.cap": (2.0, "its cap"),
            "filter.max_tied": (0.0, "groups without a signal are dropped, and the batch topped up"),
            "partial.interrupt": _KEEP,
            "sync.transport": _COLLECTIVE,
        },
        differs="Open Instruct queues prompts at the engines ahead of training; here groups wait behind the gate and start "
        "when it opens. It does not train adapters.",
    ),
    "roll": Preset(
        orchestration="Ray",
        backend="Megatron, DeepSpeed, FSDP",
        settings={
            "buffer.kind": ("stream", "the async ratio alone bounds what waits"),
            "staleness.max_lag": (1.5, "α, its async ratio: one and a half batches ahead; it expires samples at ⌈α⌉ = 2"),
            "staleness.gate": ("depth", "α batches may be generated ahead"),
            "staleness.reject": _FIRST_AGE,
            "staleness.rejected": _REFILL,
            "staleness.correct": ("tis", "its off-policy default of six losses"),
            "partial.interrupt": _ABORT,
            "partial.cancel": ("over_age", "expired samples are aborted while they run"),
            "sync.transport": _COLLECTIVE,
        },
        advice={"train.loss": "topr, cispo, kimi, ppo or grpo: its other off-policy losses"},
        differs="ROLL's guide takes whole ratios, and its examples 1; 1.5 shows the fraction. It schedules environments "
        "one by one and expires samples; here a group expires as a whole, because its siblings are compared.",
    ),
    "tunix": Preset(
        orchestration="threads",
        backend="JAX",
        settings={
            "buffer.kind": ("one_ahead", "a bounded queue whose items are acknowledged, and rewound if a step fails"),
            "staleness.max_lag": (1, "weights are synchronised after each step"),
            "staleness.gate": _GATE,
            "staleness.reject": _NO_DROPS,
            "train.stream_parts": (0, "gradients accumulate group by group"),
            "partial.interrupt": ("keep", "generation holds a lock for the moment of the swap"),
            "sync.transport": ("auto", "weights are resharded from mesh to mesh: in memory"),
        },
        differs="Tunix runs on JAX meshes, and reshards on the devices.",
    ),
    "skyrl": Preset(
        orchestration="Ray",
        backend="FSDP, Megatron",
        settings={
            "buffer.kind": ("stream", "K workers generate; the capacity gate bounds what waits"),
            "staleness.max_lag": (4, "its max_staleness_steps"),
            "staleness.gate": ("depth", "(max_staleness + 1) mini-batches are submitted and untrained at most"),
            "staleness.reject": ("never", "what was submitted is trained"),
            "partial.interrupt": _KEEP,
            "sync.transport": _COLLECTIVE,
        },
        differs="SkyRL salts the prefix cache with the version; Headrace keys cached prefixes by version. Its K "
        "workers each run a group; here every group that the gate admits runs at once.",
    ),
    "nemo-rl": Preset(
        orchestration="Ray, two pumps",
        backend="DTensor, Megatron",
        settings={
            "buffer.kind": ("reserved", "a group reserves its place when it is submitted and commits when it is complete"),
            "buffer.depth": (2, "places for the next batch and for max_trajectory_age_steps more"),
            "buffer.order": ("submission", "its sampler takes trajectories in order"),
            "staleness.max_lag": (1, "its max_trajectory_age_steps"),
            "staleness.gate": _GATE,
            "staleness.reject": _TOKEN_AGE,
            "staleness.correct": ("tis", "importance weights, which it requires of asynchronous runs"),
            "partial.interrupt": ("keep", "in-flight weight updates, which its default has off"),
            "sync.transport": _COLLECTIVE,
        },
        advice={
            "partial.interrupt = 'retract'": "its option to compute the KV cache again",
            "buffer.order = 'window', buffer.window = 0.5": "its windowed sampler",
        },
        differs="NeMo-RL merges a LoRA adapter before it sends weights; Headrace sends the adapter alone. Colocated, it sends "
        "them by CUDA IPC, as sync.transport = 'auto' does. Its weight-FIFO sampler, which takes all groups that one version "
        "began before those of the next, has no setting here.",
    ),
    "prime-rl": Preset(
        orchestration="processes, files, HTTP",
        backend="FSDP2",
        settings={
            "buffer.kind": ("stream", "the orchestrator packs what is ready; the gate bounds it"),
            "staleness.max_lag": (8, "its max_off_policy_steps"),
            "staleness.gate": _GATE,
            "staleness.reject": ("oldest", "older than max_lag, time in the queue included"),
            "staleness.rejected": _REFILL,
            "train.loss": ("dppo", "its default loss: importance weights, and a penalty on the squared log ratio"),
            "train.constants.mask": (0.2, "tokens whose probability has moved further the way they are pushed are masked"),
            "train.constants.tau": (1e-3, "of the penalty"),
            "partial.interrupt": _KEEP,
            "partial.cancel": ("over_age", "groups that are too old are cancelled while they run"),
            "sync.transport": _FILES,
        },
        differs="prime-rl gates by max_async_level, apart from max_off_policy_steps, and bounds its buffer; here "
        "staleness.max_lag is both, and the gate alone bounds what waits.",
    ),
    "atropos": Preset(
        orchestration="HTTP services",
        backend="the trainer's own",
        settings={
            "buffer.kind": ("bounded", "a ceiling on buffered batches, above which the server takes no more groups"),
            "buffer.depth": (2, "the ceiling"),
            "staleness.max_lag": (2, "how far submission may run ahead of training"),
            "staleness.gate": _GATE,
            "staleness.reject": _NO_DROPS,
            "partial.interrupt": _DRAIN,
            "sync.transport": ("files", "weights are saved, and the inference server is restarted with them"),
        },
        advice={
            'environment.name = "headrace.envs:PushedEnvironment"': "environments push scored groups (docs/adapters.md)",
            '[[tasks]] source = "pushed:groups"': "a place for each group that is pushed",
        },
        differs="Atropos' trainer polls an API server; here environments push to the launcher, and without the settings above "
        "the run's own environment fills the places. Engines load new weights without a restart.",
    ),
    "oat": Preset(
        orchestration="actors, learner, oracle",
        backend="DeepSpeed",
        settings={
            "buffer.kind": ("one_ahead", "actors generate the next batch while the learner trains"),
            "staleness.max_lag": (1, "one batch ahead"),
            "staleness.gate": _GATE,
            "staleness.reject": _NO_DROPS,
            "staleness.correct": ("tis", "clipped importance weights"),
            "partial.interrupt": _DRAIN,
            "sync.transport": _COLLECTIVE,
        },
        advice={
            'reward.functions = "headrace.score:judge"': "the reward oracle as a service, at reward.options.judge.url",
            "reward.processes = 1": "an oracle in a process of its own instead; needs a reward that can be imported",
        },
        differs="Oat's oracle is a Mosec server that learners of several machines share; a reward over HTTP does the same here "
        "(docs/rewards.md). It sends tensor by tensor, Headrace in buckets.",
    ),
    "torchforge": Preset(
        orchestration="Monarch actors",
        backend="torchtitan",
        settings={
            "buffer.kind": ("stream", "the gate's (S + 1)·P slots bound what waits"),
            "buffer.order": ("window", "groups leave in a windowed FIFO"),
            "buffer.window": (0.3, "of the (S + 1)·P slots"),
            "staleness.max_lag": (1, "S, its max_policy_age"),
            "staleness.gate": _GATE,
            "staleness.reject": ("first", "episodes are dropped by the age of the policy that began them"),
            "partial.interrupt": ("keep", "weights are swapped while generation goes on"),
            "sync.transport": ("shared_memory", "trainers put weights into a store in shared memory, engines pull them"),
        },
        differs="torchforge's generators pull weights while the next step is trained, and may hold different versions for a "
        "while; here engines get each version together. It uses one model definition on both sides, as Headrace does.",
    ),
    "pipelinerl": Preset(
        orchestration="processes, streams",
        backend="accelerate, DeepSpeed",
        settings={
            "buffer.kind": ("ring", "generation never waits: where the trainer is slower, the oldest group is dropped"),
            "buffer.depth": (2, "batches that wait at most"),
            "staleness.gate": ("none", "generation never stops"),
            "staleness.max_lag": (8, "nothing rejects by it; set staleness.reject = 'oldest' to"),
            "staleness.reject": ("never", "its max_lag is optional, and not set"),
            "train.stream_parts": (0, "micro-batches are trained as they come, and their gradients add up to a step"),
            "partial.interrupt": ("keep", "in-flight updates: weights change between two decode steps, the KV cache stays"),
            "sync.transport": ("collective", "weights are broadcast, after a notice to the engines"),
        },
        differs="PipelineRL's streams are unbounded unless old data are popped; here buffer.kind = 'stream' is that, up to "
        "buffer.max_gb. It pauses requests for the broadcast; here weights arrive beside decoding.",
    ),
    "openrlhf": Preset(
        orchestration="Ray",
        backend="DeepSpeed",
        settings={
            "buffer.kind": ("one_ahead", "a queue of one batch"),
            "staleness.max_lag": (1, "its async_queue_size"),
            "staleness.gate": _GATE,
            "staleness.reject": _NO_DROPS,
            "staleness.correct": ("tis", "its vLLM correction; icepop and sequence_mis are the others"),
            "staleness.cap": (5.0, "its upper threshold"),
            "partial.interrupt": ("keep", "generation is paused for the update, and resumed"),
            "sync.transport": _COLLECTIVE,
        },
        differs="OpenRLHF merges a LoRA adapter before it sends weights; Headrace sends the adapter alone. Colocated, it sends "
        "weights by CUDA IPC, as sync.transport = 'auto' does.",
    ),
}


def preset_settings(name: object, *, leaves_transport: bool) -> dict[str, Any]:
    """The settings of a preset by dotted key; none for an unknown name. Without its transport where the placement leaves no
    choice: in one process, and between hosts."""
    preset = PRESETS.get(name) if isinstance(name, str) else None
    settings = {} if preset is None else {key: value for key, (value, _) in preset.settings.items()}
    return {key: value for key, value in settings.items() if not (leaves_transport and key == "sync.transport")}
