"""How weights reach the engines: a payload over a transport, held only once the receipt matches.

The trainer's side takes its weights (`offer`), moves them where receivers do not come for them (`send`) and frees what they
travelled in (`release`); the engine's side writes them into its second set of weights (`receive`), where it computes the
checksums of what it now holds. A version counts as held only if they are the manifest's.
"""

from headrace.errors import SyncError
from headrace.sync.choose import Ends, check_place
from headrace.sync.lineage import Lineage
from headrace.sync.memory import MemoryTransport
from headrace.sync.shared import SharedMemoryTransport
from headrace.sync.transport import Transport
from headrace.sync.weight_sync import WeightSync

__all__ = [
    "Ends",
    "Lineage",
    "MemoryTransport",
    "SharedMemoryTransport",
    "SyncError",
    "Transport",
    "WeightSync",
    "check_place",
]
