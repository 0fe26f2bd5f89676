"""The chief's interface to our own servers: requests over the connections of a `Group`."""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from strategies.pieces import first_element, parts_of
from strategies.run_settings import Plain
from strategies.servers.carrier import Paused, Progress, Start
from strategies.servers.own.connections.group import Group
from strategies.servers.own.coordination import REFUSED
from strategies.servers.own.handlers import KEY
from strategies.servers.report_section import ServerFigures
from strategies.servers.tables import ParameterLayout
from towers.errors import UserError


class OwnCarrier:
    """Implements `strategies.servers.carrier.Carrier`."""

    def __init__(self, group: Group, layout: ParameterLayout, settings: Mapping[str, Plain] | None = None):
        """Args:
        group: connections to the servers.
        layout: where each parameter is on the servers.
        settings: settings with which the workers must have been started; None for no check.
        """
        self._group, self._layout, self._settings = group, layout, dict(settings or {})
        self._held_bytes: Sequence[int] = ()
        self._server_figures: Sequence[dict] = ()
        self._is_made, self._dtype = False, np.float32

    def free_bytes(self) -> Mapping[str, int]:
        replies = self._group.ask_all("memory")
        return {
            server.name: reply["free_bytes"]
            for server, (reply, _) in zip(self._group.servers, replies, strict=True)
        }

    def start(self, begin: Start) -> None:
        if not self._is_made:
            self._make(begin)
        for name, variable in begin.parameters.items():
            (part,) = parts_of({name: variable})
            for piece in part.divided():
                self.write(None, name, first_element(piece), np.ravel(piece.value()))
        self._group.ask_all("restart", key=KEY, version=begin.updates)
        arrays = [begin.state, begin.averaged, *begin.frozen]
        more = {"settings": self._settings, "positions": begin.positions, "state_dtypes": begin.state_dtypes}
        self._group.ask(0, "start", arrays, step=begin.step, **more)

    def _make(self, begin: Start) -> None:
        """Creates zeros on the servers, for all parameters and slots."""
        dtype = next(iter(begin.parameters.values())).dtype
        held = []
        for server in range(len(self._group.servers)):
            piece = self._layout.vector.piece(server)
            heights = [len(range(table.height)[table.part(server)]) for table in self._layout.tables]
            tables = [
                {"name": table.name, "shape": [height, table.width], "decays": table.decays}
                for table, height in zip(self._layout.tables, heights, strict=True)
            ]
            self._group.ask(server, "make", [begin.decays[piece]], key=KEY, dtype=dtype.name, tables=tables)
            elements = piece.stop - piece.start + sum(math.prod(table["shape"]) for table in tables)
            held.append(elements * dtype.size * (1 + len(begin.slot_names)))
        self._held_bytes, self._dtype, self._is_made = held, dtype.as_numpy_dtype, True

    def advance(self, wanted: int, until: int) -> Progress:
        try:
            reply, _ = self._group.ask(0, "run_to", wanted=wanted, until=until)
        except UserError as error:
            # A worker was started with other settings: all processes end with the message that names the worker.
            self._end_all(how=REFUSED, why=str(error))
            raise
        if not reply["reached"] and reply["bad_step"] is None:
            # Workers end when another server is lost. This request detects that, so that the chief does not wait
            # in vain.
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

    def read(self, slot: str | None, name: str, begin: int, end: int) -> np.ndarray:
        found = np.empty(end - begin, self._dtype)
        for server, fields, here in self._spans(name, begin, end):
            _, (values,) = self._group.ask(server, "read_part", key=KEY, slot=slot, **fields)
            _like(found, values)[here] = values
        return found

    def write(self, slot: str | None, name: str, begin: int, values: np.ndarray) -> None:
        for server, fields, here in self._spans(name, begin, begin + len(values)):
            width = self._width(name)
            given = values if width is None else values.reshape(-1, width)
            self._group.ask(server, "write_part", [given[here]], key=KEY, slot=slot, **fields)

    def state(self) -> np.ndarray:
        _, (state,) = self._group.ask(0, "get_state")
        return state

    def _width(self, name: str) -> int | None:
        """Elements of a row of a table; None for a parameter in the vector."""
        table = self._layout.table_of(name)
        return None if table is None else self._layout.tables[table[0]].width

    def _spans(self, name: str, begin: int, end: int) -> Iterator[tuple[int, dict, slice]]:
        """Where a part of a parameter lies: (server, fields of the request, slice of the part)."""
        in_table = self._layout.table_of(name)
        for server in range(len(self._group.servers)):
            if in_table is None:
                first = self._layout.begin_of(name)
                piece = self._layout.vector.piece(server)
                low, high = max(first + begin, piece.start), min(first + end, piece.stop)
                here, table = slice(low - first - begin, high - first - begin), None
                low, high = low - piece.start, high - piece.start
            else:
                index, row = in_table
                table = self._layout.tables[index]
                low, high, here = table.dealt_range(server, row + begin // table.width, row + end // table.width)
                table = table.name
            if low < high:
                yield server, {"table": table, "begin": low, "end": high}, here

    def report(self) -> Mapping:
        reply, _ = self._group.ask(0, "report")
        self._settle(reply.pop("decided"))
        self._server_figures = [figures for figures, _ in self._group.ask_all("figures")]
        of_servers = [figures.pop("stop_asked") for figures in self._server_figures]
        return {**reply, "stop_asked": reply["stop_asked"] or any(of_servers)}

    def server_figures(self) -> Sequence[ServerFigures]:
        by_server = zip(self._group.servers, self._held_bytes, self._server_figures, strict=True)
        return [ServerFigures(name=server.name, kept_bytes=held, **figures) for server, held, figures in by_server]

    def end(self, how: str) -> None:
        self._end_all(how=how)

    def _end_all(self, **how: str) -> None:
        # Server 0 is last: workers learn of the end from it, when the other servers already know.
        for server in reversed(range(len(self._group.servers))):
            self._group.ask(server, "end", **how)
        self._group.close()


def _like(found: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A view of a vector in which `values` are elements, or rows of their width."""
    return found if values.ndim == 1 else found.reshape(-1, values.shape[1])
