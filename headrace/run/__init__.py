"""The run: when each part of training happens. The other rooms do the work; this one calls them.

- `loops`: feed, generate, score and train. Start here.
- `state`, `policy`: what the loops share, and the state of each policy: its trainer and the batches in training.
- `policy_groups`, `in_flight`: a policy's groups until they are trained, and the record of each episode in flight.
- `batches`, `publishing`: turn groups into batches for the trainer, and deliver new weights to the engines.
- `callbacks`, `changes`: users' objects that are called between versions, and settings changed while the run goes on.
- `session`, `evaluate`, `checkpoint`, `metrics`, `ledger`: what happens between versions, and what a run leaves on disk.

`launch` builds the `Roles` (engine, trainers, scorer …, in whichever process) and the `Session`.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.run.batches import StartedBatch, make_batches
    from headrace.run.callbacks import Callback, CallbackError, Callbacks, CallbackState
    from headrace.run.changes import Change, changed, changes_in, replay
    from headrace.run.checkpoint import FORMAT, MANIFEST, Checkpoint, CheckpointStore, checkpoints_in
    from headrace.run.estimates import Estimate, TaskScore, differences
    from headrace.run.evaluate import Evaluation, Evaluator, task_id
    from headrace.run.in_flight import EpisodeInFlight
    from headrace.run.loops import leg, run_loops, serving
    from headrace.run.policy import PolicyState
    from headrace.run.policy_groups import POLICY
    from headrace.run.publishing import make_canary
    from headrace.run.session import Session, fewer_gc_pauses
    from headrace.run.settings import CheckpointSettings, EvaluateSettings, SftSettings
    from headrace.run.state import Roles, Run
    from headrace.run.summary import summarize
else:
    __getattr__ = front_door(__name__)
