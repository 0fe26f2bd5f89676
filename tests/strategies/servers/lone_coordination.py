"""Server 0's coordination of two workers, without connections."""

import numpy as np

from strategies.servers.options import ServersOptions
from strategies.servers.own.connections.group import Group
from strategies.servers.own.coordination import Coordination
from strategies.servers.own.handlers import KEY, StoreHandlers
from towers.updates.clipping import Clipping
from towers.updates.rules import SGD


def lone_coordination(**options) -> Coordination:
    """With two parameters; it stops at a step that is not finite. `options` are those of `ServersOptions`."""
    store, nobody = StoreHandlers(SGD(), Clipping()), Group((), ())
    found = Coordination(
        ServersOptions(engine="own", **options),
        Clipping(),
        store,
        num_workers=2,
        stops_if_bad=True,
        connect_others=lambda: nobody,
    )
    store.requests["init"]({"key": KEY}, [np.zeros(2, np.float32), np.zeros(2, bool)])
    return found
