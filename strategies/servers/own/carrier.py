"""Our own servers, as the chief uses them: requests over the connections of a `Group`."""

from collections.abc import Mapping, Sequence

import numpy as np

from strategies.run_settings import Plain
from strategies.servers.carrier import Paused, Progress, Start, Values
from strategies.servers.own.coordination import KEY, REFUSED
from strategies.servers.own.group import Group
from strategies.servers.report_section import ServerFigures
from strategies.servers.tables import ParameterLayout, Stored, TableLayout
from towers.errors import UserError


class OwnCarrier:
    """Implements `strategies.servers.carrier.Carrier`."""

    def __init__(self, group: Group, layout: ParameterLayout, settings: Mapping[str, Plain] | None = None):
        """Args:
        group: connections to the servers.
        layout: where each parameter is on the servers.
        settings: what the workers must have been started with; None for anything.
        """
        self._group, self._layout, self._settings = group, layout, dict(settings or {})
        self._held_bytes: Sequence[int] = ()

    def free_bytes(self) -> Mapping[str, int]:
        replies = self._group.ask_all("memory")
        return {
            server.name: reply["free_bytes"]
            for server, (reply, _) in zip(self._group.servers, replies, strict=True)
        }

    def start(self, begin: Start) -> None:
        values, slots = begin.values.parameters, list(begin.values.slots.values())
        names, held = list(begin.values.slots), []
        for server in range(len(self._group.servers)):
            piece = self._layout.vector.piece(server)
            self._group.ask(server, "init", [values.vector[piece], begin.decays[piece]], key=KEY)
            arrays = [values.vector[piece], *(slot.vector[piece] for slot in slots)]
            self._group.ask(server, "set", arrays, key=KEY, names=names, version=begin.updates)
            held.append(sum(array.nbytes for array in arrays))
            for index, table in enumerate(self._layout.tables):
                part = table.part(server)
                about = {"key": KEY, "table": table.name}
                arrays = [values.tables[index][part], *(slot.tables[index][part] for slot in slots)]
                self._group.ask(server, "init_table", arrays[:1], **about, decays=table.decays)
                self._group.ask(server, "set_table", arrays, **about, names=names)
                held[-1] += sum(array.nbytes for array in arrays)
        self._held_bytes = held
        arrays = [begin.values.state, begin.averaged]
        more = {"settings": self._settings, "positions": begin.positions, "state_dtypes": begin.state_dtypes}
        self._group.ask(0, "start", arrays, step=begin.step, **more)

    def advance(self, wanted: int, until: int) -> Progress:
        try:
            reply, _ = self._group.ask(0, "run_to", wanted=wanted, until=until)
        except UserError as error:
            # A worker was started with other settings: all processes end with the message that names it.
            self._end_all(how=REFUSED, why=str(error))
            raise
        if not reply["reached"] and reply["bad_step"] is None:
            # Workers end when another server is lost. This request finds that out, so the chief does not wait for
            # the workers in vain.
            self._group.ask_all("keys")
        return Progress(**{name: reply[name] for name in ("done", "bad_step", "absent", "missing")})

    def pause(self) -> Paused:
        reply, _ = self._group.ask(0, "pause")
        self._settle(reply["decided"])
        return Paused(**{name: reply[name] for name in ("idle", "missing", "done", "totals", "positions")})

    def _settle(self, decided: Mapping | None) -> None:
        """Lets the other servers apply the updates that server 0 has counted."""
        if decided is not None:
            others = {server: ({}, ()) for server in range(1, len(self._group.servers))}
            self._group.ask_each("settle", others, key=KEY, decided=decided)

    def values(self) -> Values:
        pulled = self._group.ask_all("pull", key=KEY)
        slots = self._group.ask_all("get_slots", key=KEY)
        tables = [self._table(table) for table in self._layout.tables]
        _, (state,) = self._group.ask(0, "get_state")
        return Values(
            parameters=Stored(np.concatenate([piece for _, (piece,) in pulled]), [found[0] for found in tables]),
            slots={
                slot: Stored(
                    np.concatenate([arrays[index] for _, arrays in slots]), [found[index + 1] for found in tables]
                )
                for index, slot in enumerate(slots[0][0]["names"])
            },
            state=state,
        )

    def _table(self, table: TableLayout) -> list[np.ndarray]:
        """A matrix of tables, and its slots in order."""
        replies = self._group.ask_all("get_table", key=KEY, table=table.name)
        return [table.gathered(parts) for parts in zip(*(arrays for _, arrays in replies), strict=True)]

    def report(self) -> Mapping:
        reply, _ = self._group.ask(0, "report")
        self._settle(reply.pop("decided"))
        return reply

    def server_figures(self) -> Sequence[ServerFigures]:
        replies = self._group.ask_all("figures")
        return [
            ServerFigures(name=server.name, kept_bytes=held, **figures)
            for server, held, (figures, _) in zip(self._group.servers, self._held_bytes, replies, strict=True)
        ]

    def end(self, how: str) -> None:
        self._end_all(how=how)

    def _end_all(self, **how: str) -> None:
        # Server 0 is last: workers learn of the end from it, and then the other servers know already.
        for server in reversed(range(len(self._group.servers))):
            self._group.ask(server, "end", **how)
        self._group.close()
