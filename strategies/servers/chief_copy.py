"""The chief's copy of the model: the servers' initial values, and values fetched to evaluate and to save."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from strategies.pieces import Piece
from strategies.servers.carrier import Carrier, Start
from strategies.servers.slot_on_servers import SlotOnServers, read_whole
from towers.batch_stats import is_averaged
from towers.engine import Engine
from towers.options import StepOptions
from towers.parameters.placement import CentralPlacement, constraints_of, variables_like
from towers.tower import ModelVariables
from towers.updates.rules import UpdateRule


def chief_placement(
    device: str, variables: ModelVariables, rule: UpdateRule, carrier: Callable[[], Carrier]
) -> CentralPlacement:
    """Parameters and state on the chief's device, for evaluation. Only servers have slots.

    Args:
      device: the device.
      variables, rule: as for every placement.
      carrier: returns the connection to the servers.
    """
    with tf.device(device):
        parameters, state = variables_like(variables.parameters), variables_like(variables.state)
    slots = {
        slot: {name: SlotOnServers(slot, name, variable, carrier) for name, variable in parameters.items()}
        for slot in rule.slot_names
    }
    return CentralPlacement(device, parameters, state, slots, constraints_of(variables))


class ChiefCopy:
    """The chief's parameters and state; the servers' are newer while workers train."""

    def __init__(self, engine: Engine, options: StepOptions, device: str):
        """Args:
        engine: holds the copy, placed by `chief_placement`.
        options: how a step computes.
        device: device of the copy.
        """
        self._engine, self._options, self._device = engine, options, device
        variables = engine.tower.variables
        self._templates = dict(zip(engine.parameters(), variables.parameters, strict=True))
        state = list(engine.state().values())
        self._frozen = [state[index] for index in variables.frozen]
        # The state that passes change: it is exchanged in each step.
        self._state = [state[index] for index in variables.moving]

    def start(self, shapes: Mapping[str, Sequence[int]], positions: Sequence[int] | None) -> Start:
        """The values with which the servers begin: this copy, at the engine's step.

        Args:
          shapes: by name, the shapes of the parameters in the servers' vector.
          positions: each worker's next batch, as in `Start`.
        """
        rule, counters = self._options.rule, self._engine.counters
        decays = [
            np.full(math.prod(shape), bool(rule.decays(name, tf.TensorShape(shape))))
            for name, shape in shapes.items()
        ]
        averaged = [
            np.full(value.shape.num_elements(), is_averaged(value, self._options.batch_stats))
            for value in self._state
        ]
        return Start(
            parameters=self._engine.parameters(),
            slot_names=rule.slot_names,
            state=self._state_vector(),
            decays=np.concatenate(decays) if decays else np.zeros(0, bool),
            averaged=np.concatenate(averaged) if averaged else np.zeros(0, bool),
            step=int(counters.step),
            updates=int(counters.updates),
            positions=positions,
            state_dtypes=[(value.dtype.name, value.shape.num_elements()) for value in self._state],
            frozen=[variable.numpy() for variable in self._frozen],
        )

    def _state_vector(self) -> np.ndarray:
        values = [variable.numpy() for variable in self._state]
        dtypes = {value.dtype for value in values}
        is_common = len(dtypes) == 1 and np.issubdtype(values[0].dtype, np.floating)
        dtype = values[0].dtype if is_common else np.float64
        return np.concatenate([np.ravel(value).astype(dtype) for value in values]) if values else np.zeros(0)

    def bring(self, carrier: Carrier) -> None:
        """Copies the servers' parameters and state into this process; the workers must be paused."""
        for name, variable in self._engine.parameters().items():
            self._assign(name, read_whole(carrier, None, name, variable))
        values, begin = carrier.state(), 0
        for variable in self._state:
            end = begin + variable.shape.num_elements()
            variable.assign(tf.cast(values[begin:end].reshape(variable.shape), variable.dtype))
            begin = end

    def value(self, piece: Piece) -> tf.Tensor | np.ndarray:
        """The values of a piece; for a slot the workers must be paused."""
        variable = piece.variable
        return variable.read(piece) if isinstance(variable, SlotOnServers) else piece.value()

    def restore(self, part: Piece, read: Callable[[Piece], tf.Tensor]) -> None:
        """As `Strategy.restore`: parameters and state are set in this copy, slots on the servers."""
        kind, *names = part.path
        if isinstance(part.variable, SlotOnServers):
            for piece in part.divided():
                part.variable.write(piece, read(piece))
        elif kind == "parameters" and isinstance(part.variable, tf.Variable):
            self._assign(names[0], read(part))
        else:
            part.variable.assign(read(part))

    def _assign(self, name: str, value) -> None:
        """Sets a parameter and its template to one value, so that the host's memory has a single copy."""
        variable = self._engine.parameters()[name]
        variable.assign(value)
        if "CPU" in self._device:
            self._templates[name].assign(variable.read_value())
