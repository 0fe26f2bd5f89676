"""The membership of this process in a parameter-server cluster."""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence

from strategies.cluster import CHIEF, SERVER, WORKER, Cluster, Member
from strategies.data_checks.batch_checksums import KEEPS_ORDER_ADVICE, batch_checksums
from strategies.engines import OWN, TENSORFLOW
from strategies.run_settings import Plain, common_settings, plain_settings, step_settings
from strategies.servers.options import ServersOptions
from towers.errors import UserError
from towers.options import StepOptions
from towers.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServersMembership:
    """Attributes:
    cluster: chief, workers and servers, and this process's role among them.
    options: how the group works.
    secret: the secret that a process must know to connect; '' lets in processes that have none.
    admit_anyone: whether the secret may be '' although other machines can reach the servers.
    startup_timeout_seconds: seconds to wait for the other processes.
    joined: this process's part in TensorFlow's engine; None for our own engine.
    """

    cluster: Cluster
    options: ServersOptions = dataclasses.field(default_factory=ServersOptions)
    secret: str = ""
    admit_anyone: bool = False
    startup_timeout_seconds: float = 600.0
    joined: object = None

    def __post_init__(self):
        for role in (CHIEF, WORKER, SERVER):
            if not self.cluster.members(role):
                raise UserError(
                    f"strategy=ps without a process of role {role!r}: it needs a {CHIEF!r} that leads, a "
                    f"{WORKER!r} that computes and a {SERVER!r} that holds the parameters; add a {role!r} to the "
                    "cluster"
                )
        if self.admit_anyone and self.options.engine_choice().name == TENSORFLOW:
            raise UserError(
                "admit_anyone with TensorFlow's engine: it asks for no secret and lets in everyone; omit "
                "admit_anyone, or use engine=own"
            )

    @property
    def role(self) -> str:
        return self.cluster.role

    @property
    def num_workers(self) -> int:
        return len(self.cluster.members(WORKER))

    def own_examples(self, batch_size: int) -> int:
        """About how many examples of a batch a worker computes at once."""
        return batch_size // self.num_workers if self.options.is_sync else batch_size

    @property
    def servers(self) -> tuple[Member, ...]:
        return self.cluster.members(SERVER)

    @property
    def cluster_checksum(self) -> int:
        """Checksum of the addresses of chief and servers; a worker may restart on another machine."""
        addresses = self.cluster.addresses
        return zlib.crc32(repr([tuple(addresses[role]) for role in (CHIEF, SERVER)]).encode())

    def settings(self, options: StepOptions) -> dict[str, Plain]:
        """The settings that must be the same in all processes, servers too."""
        found = step_settings(options)
        # The schedule's length may depend on the data, which a server need not have.
        del found["learning_rate"]
        return plain_settings({**found, **self._of_the_group})

    def settings_with(
        self, task: Task, options: StepOptions, shapes: Mapping[str, Sequence[int]] | None = None
    ) -> dict[str, Plain]:
        """The settings that must be the same in the chief and the workers; arguments as for `common_settings`.

        Raises:
          UserError: the order of the task's data differs between readings, but must not.
        """
        more = {**self._of_the_group, **self._first_batches(task, options)}
        return common_settings(task, options, evaluates=False, shapes=shapes, **more)

    @property
    def _of_the_group(self) -> dict[str, object]:
        # With another number of workers a process would divide batches differently from server 0.
        return {"num_workers": self.num_workers, "servers": self.options}

    def _first_batches(self, task: Task, options: StepOptions) -> dict[str, str]:
        """Checksums of the first training batches, which are read twice; empty if they may differ."""
        # On TensorFlow's engine a worker reads each batch whole, and no other worker reads it.
        is_own = self.options.engine_choice().name == OWN
        why = self._why_order_matters(options) if is_own else None
        # Arrays are part of the settings, which are compared anyway.
        if why is None and task.num_examples("train") is not None:
            return {}
        found = batch_checksums(task, "train")
        if why is not None and not found.keeps_order:
            raise UserError(
                f"{self.cluster.this.name} reads the 'train' data in another order each time, but with {why}: "
                f"examples would be repeated or skipped; {KEEPS_ORDER_ADVICE}"
            )
        # Asynchronous workers may shuffle independently: data that differ between readings can't be compared.
        is_compared = self._is_in_step or (found.keeps_order and found.features)
        examples = {"first_batches": " ".join(map(str, found.examples))} if found.examples and is_compared else {}
        return examples | ({"first_features": " ".join(map(str, found.features))} if found.features else {})

    @property
    def _is_in_step(self) -> bool:
        """Whether the processes must agree on each batch."""
        return self.options.is_sync or self.options.is_serial

    def _why_order_matters(self, options: StepOptions) -> str | None:
        """The reason why several readings must give the same batches; None if they need not."""
        if self._is_in_step:
            return f"staleness={self.options.staleness} all processes must agree on each batch"
        if options.accumulation > 1:
            return f"accumulation={options.accumulation} a worker reads them once for each microbatch"
        return None
