"""How weights reach the engines: a payload (what travels) over a transport (how it travels).

The trainer's end reads its weights (`WeightSync.offer`), pushes them to receivers that cannot fetch (`send`), and frees their
memory (`release`, `abort`). An engine writes them into its second set of weights (`receive`) and checks its checksums against
the manifest: only then does it hold the version.

`table.py` lists the choices. To add a transport, add a file with a subclass of `Transport`, a line in the table, and a line in
`docs/sync.md`. To add a payload, do the same with a subclass of `FullPayload`.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.sync.collective.group import Mailbox
    from headrace.sync.lineage import Lineage
    from headrace.sync.memory import MemoryTransport
    from headrace.sync.settings import SyncSettings
    from headrace.sync.shared_memory import SharedMemoryTransport
    from headrace.sync.table import is_pushed, make_transport, resolve_transport, routed, transport_class
    from headrace.sync.transport import TransportConfig, TransportMemory, check_host, shared_folder
    from headrace.sync.weight_sync import WeightSync
else:
    __getattr__ = front_door(__name__)
