"""An update rule that records its gradients' kinds."""

import dataclasses

from towers.updates.rules import SGD


@dataclasses.dataclass(frozen=True)
class WatchedSGD:
    """SGD that records, while it is traced, the kind of each parameter's gradient."""

    slot_names = ()
    num_steps = None
    seen: dict = dataclasses.field(default_factory=dict)

    def apply(self, path, variable, slots, gradient, rate, update):
        self.seen[path] = type(gradient)
        SGD().apply(path, variable, slots, gradient, rate, update)
