"""How weights reach the engines: a payload over a transport, held only once the receipt matches.

The trainer's side makes an update (`offer`), moves the tensors (`send`) and frees what they travelled in (`release`);
the engine's side reads them (`receive`) and copies them into its own parameters (`headrace.model.weights`), where
it computes the checksums of what it now holds. A version counts as held only if they are the manifest's.
"""

from headrace.sync.memory import MemorySync
from headrace.sync.protocol import Lineage, SyncError, WeightSync
from headrace.sync.shared import SharedMemorySync

__all__ = ["Lineage", "MemorySync", "SharedMemorySync", "SyncError", "WeightSync"]
