"""How weights reach the engines: a payload (what travels) over a transport (how it travels).

The trainer's side reads its weights (`WeightSync.offer`), pushes them where receivers cannot fetch by themselves (`send`) and
frees their memory (`release`, `abort`). An engine writes them into its second set of weights (`receive`) and computes the
checksums of what it now holds: a version counts as held only if they are the manifest's.

`table.py` lists the choices. To add a transport: a file with a subclass of `Transport`, a line in the table, a line in
`docs/sync.md`. To add a payload: the same with `FullPayload`.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.sync.collective.transport import CollectiveTransport
    from headrace.sync.folder import shared_folder
    from headrace.sync.http.transport import PIECE_BYTES, HttpTransport
    from headrace.sync.lineage import Lineage
    from headrace.sync.memory import MemoryTransport
    from headrace.sync.settings import SyncSettings
    from headrace.sync.shared_memory import SharedMemoryTransport
    from headrace.sync.table import is_pushed, make_transport, resolve_transport, routed, transport_class
    from headrace.sync.transport import TransportConfig, check_host
    from headrace.sync.weight_sync import WeightSync
else:
    __getattr__ = front_door(__name__)
