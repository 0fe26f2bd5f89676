"""Our own servers, as the chief uses them: requests over the connections of a `Group`."""

from collections.abc import Mapping, Sequence

import numpy as np

from strategies.servers.carrier import Paused, Progress, Start, Values
from strategies.servers.coordination import KEY
from strategies.servers.group import Group
from strategies.servers.layout import Layout
from strategies.servers.report_section import ServerFigures


class OwnCarrier:
    """Implements `strategies.servers.carrier.Carrier`."""

    def __init__(self, group: Group, layout: Layout):
        """Args:
        group: connections to the servers.
        layout: which piece of the parameters each server holds.
        """
        self._group, self._layout = group, layout
        self._held_bytes: Sequence[int] = ()

    def start(self, begin: Start) -> None:
        values, held = begin.values, []
        for server in range(len(self._group.servers)):
            piece = self._layout.piece(server)
            self._group.ask(server, "init", [values.parameters[piece], begin.decays[piece]], key=KEY)
            arrays = [values.parameters[piece], *(slot[piece] for slot in values.slots.values())]
            self._group.ask(server, "set", arrays, key=KEY, names=list(values.slots), version=begin.updates)
            held.append(sum(array.nbytes for array in arrays))
        self._held_bytes = held
        self._group.ask(0, "start", [values.state, begin.averaged], step=begin.step)

    def advance(self, wanted: int, until: int) -> Progress:
        reply, _ = self._group.ask(0, "run_to", wanted=wanted, until=until)
        if not reply["reached"] and reply["bad_step"] is None:
            # Workers end when another server is lost. This request finds that out, so the chief does not wait for
            # the workers in vain.
            self._group.ask_all("keys")
        return Progress(**{name: reply[name] for name in ("done", "bad_step", "absent", "missing")})

    def pause(self) -> Paused:
        reply, _ = self._group.ask(0, "pause")
        return Paused(**{name: reply[name] for name in ("idle", "missing", "done", "totals")})

    def values(self) -> Values:
        pulled = self._group.ask_all("pull", key=KEY)
        slots = self._group.ask_all("get_slots", key=KEY)
        names = slots[0][0]["names"]
        _, (state,) = self._group.ask(0, "get_state")
        return Values(
            parameters=np.concatenate([piece for _, (piece,) in pulled]),
            slots={
                slot: np.concatenate([arrays[index] for _, arrays in slots]) for index, slot in enumerate(names)
            },
            state=state,
        )

    def report(self) -> Mapping:
        return self._group.ask(0, "report")[0]

    def server_figures(self) -> Sequence[ServerFigures]:
        replies = self._group.ask_all("figures")
        return [
            ServerFigures(name=server.name, kept_bytes=held, **figures)
            for server, held, (figures, _) in zip(self._group.servers, self._held_bytes, replies, strict=True)
        ]

    def end(self, how: str) -> None:
        # Server 0 is last: workers learn of the end from it, and then the other servers know already.
        for server in reversed(range(len(self._group.servers))):
            self._group.ask(server, "end", how=how)
        self._group.close()
