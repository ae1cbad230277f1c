"""How weights reach the engines: a payload over a transport, held only once the receipt matches.

The trainer's side takes its weights (`offer`), moves them where receivers do not come for them (`send`) and frees what they
travelled in (`release`); the engine's side writes them into its second set of weights (`receive`), where it computes the
checksums of what it now holds. A version counts as held only if they are the manifest's.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.sync.choose import Ends as Ends, check_place as check_place
    from headrace.sync.collective.transport import CollectiveTransport as CollectiveTransport
    from headrace.sync.http.transport import (
        PIECE_BYTES as PIECE_BYTES,
        HttpTransport as HttpTransport,
        relay_places as relay_places,
    )
    from headrace.sync.lineage import Lineage as Lineage
    from headrace.sync.memory import MemoryTransport as MemoryTransport
    from headrace.sync.settings import SyncSettings as SyncSettings
    from headrace.sync.shared import SharedMemoryTransport as SharedMemoryTransport, shared_folder as shared_folder
    from headrace.sync.weight_sync import WeightSync as WeightSync
else:
    __getattr__ = front_door(__name__)
