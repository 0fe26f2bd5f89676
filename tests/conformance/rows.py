"""The table of strategies. Every row must give the numbers of one device. A new mode adds its row."""

import dataclasses
from collections.abc import Callable

from strategies.branches import branches_strategy
from strategies.contract import Strategy
from strategies.distribute.mirrored import mirrored_strategy
from strategies.parameter_servers import servers_strategy
from strategies.pipeline import pipeline_strategy
from strategies.ring.exchange.collectives import WireOptions
from strategies.ring.exchange.joining import Ring, RingOptions
from strategies.ring.strategy import ring_strategy
from strategies.servers.options import ServersOptions
from strategies.slices import SliceOptions, slices_strategy
from strategies.towers import towers_strategy
from tests.towers.logical_cpus import cpus, cpus_in_groups
from towers.branches.options import BranchOptions
from towers.devices import Devices
from towers.grid import Grid
from towers.split import even_shares
from towers.stages.options import PipelineOptions
from towers.updates.clipping import Clipping
from towers.updates.rules import Adam


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """Numbers of microbatches on the one device that a row is compared with.

    Attributes:
      microbatches: number for a network without batch norm.
      microbatches_with_batch_norm: number for a network with batch norm, whose results depend on the microbatches.
    """

    microbatches: int = 1
    microbatches_with_batch_norm: int = 1

    def microbatches_for(self, batch_norm: bool) -> int:
        return self.microbatches_with_batch_norm if batch_norm else self.microbatches


UNDIVIDED = Reference()
FOUR_MICROBATCHES = Reference(microbatches_with_batch_norm=4)
# Most rows of several processes have only two microbatches, because each process traces every microbatch.
TWO_MICROBATCHES = Reference(microbatches_with_batch_norm=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A configuration of a strategy.

    Attributes:
      name: name of the row in the names of tests.
      make_strategy: function of (task, options of the step); for a ring it also takes `ring=`.
      accumulation: number of microbatches of a step.
      shares: relative sizes of all towers' parts of a batch.
      reference: the microbatches of the one device that this row must agree with.
      ring: options of a ring; None for other strategies.
      servers: options of parameter servers; None for other strategies.
      num_workers, num_servers: number of processes.
      options: further options of the step, as (name, value); the one device gets them too.
      batch_stats: 'average' if the mode cannot sync statistics over the batch; the reference then computes the
        same parts.
      devices, tower_shares: devices and shares of each worker of parameter servers.
      late_seconds: seconds that worker 1 stands still before it computes step 8; others then compute its part.
      in_quick: whether the quick tests run this row, on the task that has everything at once. The full tests run
        every row on that task.
      transformer: whether the full tests also try the transformer, which has tied weights.
      branches: whether the full tests also try the network with branches.
      every_task: whether the full tests try every task.
      every_trial: whether the full tests also try the transformer, a batch that is not finite and statistics of
        the first part.
      float32: whether the full tests also try float32.
      not_finite_in_quick: whether the quick tests also try a batch that is not finite.
    """

    name: str
    make_strategy: Callable[..., Strategy]
    accumulation: int = 1
    shares: tuple[float, ...] = (1.0,)
    reference: Reference = UNDIVIDED
    ring: RingOptions | None = None
    servers: ServersOptions | None = None
    num_workers: int = 1
    num_servers: int = 0
    options: tuple[tuple[str, object], ...] = ()
    batch_stats: str = "synced"
    devices: Devices | None = None
    tower_shares: tuple[float, ...] | None = None
    late_seconds: float = 0.0
    in_quick: bool = False
    every_task: bool = False
    every_trial: bool = False
    float32: bool = False
    transformer: bool = False
    branches: bool = False
    not_finite_in_quick: bool = False


def _towers(devices: Devices, shares: tuple[float, ...] | None = None, **others):
    return lambda task, options: towers_strategy(task, devices, options, shares=shares, **others)


def _pipeline(num_devices: int, microbatches: int, num_towers: int = 1, zero: int = 0, **options):
    """Towers of `num_devices` devices each; `options` are other fields of `PipelineOptions`."""
    devices = cpus_in_groups(str(Grid(data=num_towers, stage=num_devices)), zero=zero)
    pipeline = PipelineOptions(microbatches=microbatches, **options)
    return lambda task, step: pipeline_strategy(task, devices, step, pipeline=pipeline)


def _slices(grid: str, shares: tuple[float, ...] | None = None, **spread):
    devices = cpus_in_groups(grid, **spread)
    return lambda task, options: slices_strategy(task, devices, options, shares=shares)


def _branches(grid: str, shares: tuple[float, ...] | None = None, **spread):
    devices = cpus_in_groups(grid, **spread)
    return lambda task, options: branches_strategy(task, devices, options, shares=shares)


def _mirrored(devices: Devices, shares: tuple[float, ...] | None = None):
    return lambda task, options: mirrored_strategy(task, devices, options, shares=shares)


def _ring(devices: Devices, shares: tuple[float, ...] | None = None, **of_towers):
    return lambda task, options, ring: ring_strategy(task, devices, options, shares=shares, ring=ring, **of_towers)


def _lone_ring(engine: str, devices: Devices):
    """A ring of this process alone."""
    ring = Ring.alone(RingOptions(engine=engine))
    return lambda task, options: ring_strategy(task, devices, options, ring=ring)


def _recomputing(make_strategy, recompute: str):
    def make(task, options, **others):
        return make_strategy(task, dataclasses.replace(options, recompute=recompute), **others)

    return make


def _tensorflow_ring(**options) -> RingOptions:
    return RingOptions(engine="tensorflow", check_divergence_every_steps=5, **options)


def _own_ring(**options) -> RingOptions:
    return RingOptions(engine="own", check_divergence_every_steps=5, **options)


def _servers(staleness: str, devices: Devices, tower_shares: tuple[float, ...] | None = None, **options) -> dict:
    """The attributes that rows of parameter servers share."""

    def make_strategy(task, options, servers):
        return servers_strategy(task, devices, options, shares=tower_shares, servers=servers)

    return {
        "make_strategy": make_strategy,
        "servers": ServersOptions(staleness=staleness, **options),
        "devices": devices,
        "tower_shares": tower_shares,
    }


one_device = _towers(cpus(1))


def one_device_in_parts(shares: tuple[float, ...]):
    """A strategy on one device that computes the towers' parts one after another."""
    devices = Devices(towers=cpus(1).towers * len(shares), parameters=cpus(1).parameters)
    return _towers(devices, shares)


_SHARES = (5.0, 3.0, 2.0)

ROWS = (
    Row(name="towers_1", make_strategy=one_device),
    Row(
        name="towers_4",
        make_strategy=_towers(cpus(4)),
        shares=even_shares(4),
    ),
    Row(
        name="towers_3_shares_5_3_2",
        make_strategy=_towers(cpus(3), _SHARES),
        shares=_SHARES,
    ),
    Row(
        name="towers_3_shares_parameters_on_cpu_3",
        in_quick=True,
        every_trial=True,
        every_task=True,
        not_finite_in_quick=True,
        make_strategy=_towers(cpus(3, parameters=3), _SHARES),
        shares=_SHARES,
    ),
    Row(
        name="towers_3_shares_several_steps_an_execution",
        make_strategy=_towers(cpus(3), _SHARES, steps_per_execution=8),
        shares=_SHARES,
        batch_stats="average",
    ),
    Row(
        name="towers_1_accumulation_4",
        make_strategy=one_device,
        accumulation=4,
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="towers_3_shares_accumulation_4",
        make_strategy=_towers(cpus(3, parameters=1), _SHARES),
        shares=_SHARES,
        accumulation=4,
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="towers_3_sharded_shares_accumulation_4",
        make_strategy=_towers(cpus(3, sharded=True), _SHARES),
        shares=_SHARES,
        accumulation=4,
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="pipeline_2_1f1b_4_microbatches",
        in_quick=True,
        transformer=True,
        make_strategy=_pipeline(2, 4),
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="pipeline_3_gpipe_4_microbatches",
        make_strategy=_pipeline(3, 4, schedule="gpipe"),
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="pipeline_4_zb_h1_4_microbatches",
        make_strategy=_pipeline(4, 4, schedule="zb_h1"),
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="pipeline_2_interleaved_4_stages_accumulation_2",
        make_strategy=_pipeline(2, 2, stages=4, schedule="interleaved"),
        accumulation=2,
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        # The microbatches of a batch differ in size, in weight and in how the towers divide them.
        name="pipeline_2_by_2_towers_4_microbatches",
        make_strategy=_pipeline(2, 4, num_towers=2),
        shares=even_shares(2),
        batch_stats="average",
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="pipeline_2_by_2_towers_zero_1_accumulation_2",
        make_strategy=_pipeline(2, 2, num_towers=2, zero=1),
        shares=even_shares(2),
        accumulation=2,
        batch_stats="average",
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="pipeline_2_by_2_towers_zero_3_accumulation_4",
        make_strategy=_recomputing(_pipeline(2, 1, num_towers=2, zero=3), "sqrt"),
        shares=even_shares(2),
        accumulation=4,
        batch_stats="average",
        reference=FOUR_MICROBATCHES,
        transformer=True,
    ),
    Row(
        name="pipeline_2_by_2_towers_zero_3_zb_h1_adamw",
        make_strategy=_pipeline(2, 4, num_towers=2, zero=3, schedule="zb_h1"),
        shares=even_shares(2),
        batch_stats="average",
        reference=FOUR_MICROBATCHES,
        options=(("rule", Adam(weight_decay=0.1)), ("clipping", Clipping(norm=0.05))),
    ),
    Row(
        name="towers_2_of_slices_2_zero_2_accumulation_4",
        make_strategy=_slices("data:2,slice:2", (2.0, 1.0), zero=2),
        shares=(2.0, 1.0),
        accumulation=4,
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="towers_2_of_slices_2_zero_3_shares_2_1",
        make_strategy=_slices("data:2,slice:2", (2.0, 1.0), zero=3),
        shares=(2.0, 1.0),
        transformer=True,
    ),
    Row(
        name="towers_3_replicated_shares",
        make_strategy=_towers(cpus(3, replicated=True), _SHARES),
        shares=_SHARES,
    ),
    Row(
        name="towers_2_zero_1_accumulation_4",
        make_strategy=_towers(cpus(2, zero=1)),
        shares=even_shares(2),
        accumulation=4,
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="slices_2",
        make_strategy=_slices("slice:2"),
    ),
    Row(
        name="slices_3_accumulation_4",
        make_strategy=_slices("slice:3"),
        accumulation=4,
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="towers_2_zero_2_accumulation_4",
        make_strategy=_towers(cpus(2, zero=2)),
        shares=even_shares(2),
        accumulation=4,
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="towers_3_zero_3_shares_accumulation_4",
        in_quick=True,
        transformer=True,
        make_strategy=_towers(cpus(3, zero=3), _SHARES),
        shares=_SHARES,
        accumulation=4,
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="towers_2_recompute_accumulation_4",
        make_strategy=_recomputing(_towers(cpus(2)), "full"),
        shares=even_shares(2),
        accumulation=4,
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="towers_2_of_slices_2_shares_2_1",
        in_quick=True,
        make_strategy=_slices("data:2,slice:2", (2.0, 1.0)),
        shares=(2.0, 1.0),
    ),
    Row(
        name="branches_2",
        branches=True,
        make_strategy=_branches("branch:2"),
    ),
    Row(
        # The blocks of the quick task are its inputs with their layers: images and two tables.
        name="branches_3_accumulation_4",
        in_quick=True,
        make_strategy=_branches("branch:3"),
        accumulation=4,
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="towers_2_of_branches_2_shares_2_1",
        make_strategy=_branches("data:2,branch:2", (2.0, 1.0)),
        shares=(2.0, 1.0),
    ),
    Row(
        name="towers_2_of_branches_2_zero_2",
        make_strategy=_branches("data:2,branch:2", zero=2),
        shares=even_shares(2),
    ),
    Row(
        name="towers_2_of_branches_2_zero_3_accumulation_4",
        branches=True,
        make_strategy=_recomputing(_branches("data:2,branch:2", zero=3), "sqrt"),
        shares=even_shares(2),
        accumulation=4,
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="mirrored_3_shares_5_3_2",
        make_strategy=_mirrored(cpus(3), _SHARES),
        shares=_SHARES,
    ),
    Row(
        name="mirrored_2_accumulation_4",
        in_quick=True,
        make_strategy=_mirrored(cpus(2)),
        shares=even_shares(2),
        accumulation=4,
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="own_ring_1_of_2_towers_accumulation_4",
        make_strategy=_lone_ring("own", cpus(2)),
        shares=even_shares(2),
        accumulation=4,
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="ring_1_accumulation_4",
        make_strategy=_lone_ring("tensorflow", cpus(1)),
        accumulation=4,
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="ring_3",
        make_strategy=_ring(cpus(1)),
        shares=even_shares(3),
        # Several packs, one of them with a single large gradient.
        ring=_tensorflow_ring(wire=WireOptions(bytes_per_pack=4000)),
        num_workers=3,
    ),
    Row(
        name="ring_2_accumulation_2_shares_2_1",
        make_strategy=_ring(cpus(1)),
        shares=(2.0, 1.0),
        accumulation=2,
        reference=TWO_MICROBATCHES,
        ring=_tensorflow_ring(worker_shares=(2.0, 1.0)),
        num_workers=2,
    ),
    Row(
        name="ring_2_of_2_towers_shares_2_1",
        in_quick=True,
        every_trial=True,
        make_strategy=_ring(cpus(2), (2.0, 1.0)),
        shares=(2.0, 1.0, 2.0, 1.0),
        ring=_tensorflow_ring(),
        num_workers=2,
    ),
    Row(
        name="own_ring_2_of_2_towers_shares_2_1",
        in_quick=True,
        every_trial=True,
        float32=True,
        make_strategy=_ring(cpus(2, parameters=1), (2.0, 1.0)),
        shares=(2.0, 1.0, 2.0, 1.0),
        ring=_own_ring(),
        num_workers=2,
    ),
    Row(
        name="own_ring_3_recompute_accumulation_2",
        make_strategy=_recomputing(_ring(cpus(1)), "sqrt"),
        shares=even_shares(3),
        accumulation=2,
        reference=TWO_MICROBATCHES,
        # Tests our packs over TensorFlow's collectives, as on GPUs.
        ring=_own_ring(wire=WireOptions(bytes_per_pack=4000, algorithm="ring")),
        num_workers=3,
    ),
    Row(
        name="own_ring_2_zero_1_shares_2_1",
        make_strategy=_ring(cpus(1, zero=1)),
        shares=(2.0, 1.0),
        ring=_own_ring(worker_shares=(2.0, 1.0)),
        num_workers=2,
    ),
    Row(
        name="own_ring_2_zero_2_accumulation_2_clipping",
        make_strategy=_ring(cpus(1, zero=2)),
        shares=even_shares(2),
        accumulation=2,
        reference=TWO_MICROBATCHES,
        # Several packs.
        ring=_own_ring(wire=WireOptions(bytes_per_pack=4000)),
        options=(("clipping", Clipping(global_norm=0.5)),),
        num_workers=2,
    ),
    Row(
        name="own_ring_3_of_2_towers_zero_2_adamw",
        make_strategy=_ring(cpus(2, zero=2)),
        shares=even_shares(6),
        ring=_own_ring(),
        options=(("rule", Adam(weight_decay=0.1)),),
        num_workers=3,
    ),
    Row(
        name="own_ring_3_zero_3_adamw_accumulation_2_clipping_shares_2_1_1",
        make_strategy=_ring(cpus(1, zero=3)),
        shares=(2.0, 1.0, 1.0),
        accumulation=2,
        reference=TWO_MICROBATCHES,
        ring=_own_ring(worker_shares=(2.0, 1.0, 1.0)),
        options=(("rule", Adam(weight_decay=0.1)), ("clipping", Clipping(global_norm=0.5))),
        num_workers=3,
    ),
    Row(
        name="own_ring_2_of_2_towers_zero_3_adamw_accumulation_2_clipping_shares_3_1",
        every_trial=True,
        # Workers and towers together divide microbatches of 15 examples as the one device does.
        make_strategy=_ring(cpus(2, zero=3), (3.0, 1.0)),
        shares=(3.0, 1.0, 3.0, 1.0),
        accumulation=2,
        reference=TWO_MICROBATCHES,
        # Several calls between the workers in a pass.
        ring=_own_ring(wire=WireOptions(bytes_per_pack=4000)),
        options=(("rule", Adam(weight_decay=0.1)), ("clipping", Clipping(global_norm=0.5))),
        num_workers=2,
        transformer=True,
    ),
    Row(
        name="own_ring_2_of_stages_2_shares_2_1",
        make_strategy=_ring(cpus_in_groups("stage:2"), pipeline=PipelineOptions(microbatches=4)),
        shares=(2.0, 1.0),
        ring=RingOptions(worker_shares=(2.0, 1.0), check_divergence_every_steps=5),
        num_workers=2,
        batch_stats="average",
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="own_ring_2_of_2_towers_of_slices_2",
        make_strategy=_ring(cpus_in_groups("data:2,slice:2"), slices=SliceOptions()),
        shares=even_shares(4),
        ring=RingOptions(check_divergence_every_steps=5),
        num_workers=2,
    ),
    Row(
        name="own_ring_2_of_branches_2_shares_2_1",
        make_strategy=_ring(cpus_in_groups("branch:2"), branches=BranchOptions()),
        shares=(2.0, 1.0),
        ring=RingOptions(worker_shares=(2.0, 1.0), check_divergence_every_steps=5),
        num_workers=2,
    ),
    Row(
        name="own_ring_2_of_stages_2_zero_2_accumulation_2_clipping",
        make_strategy=_ring(cpus_in_groups("stage:2", zero=2), pipeline=PipelineOptions(microbatches=2)),
        accumulation=2,
        shares=even_shares(2),
        # Several packs.
        ring=RingOptions(wire=WireOptions(bytes_per_pack=1000), check_divergence_every_steps=5),
        options=(("clipping", Clipping(norm=0.05)),),
        num_workers=2,
        batch_stats="average",
        reference=FOUR_MICROBATCHES,
    ),
    Row(
        name="own_ring_2_of_2_towers_of_stages_2_zero_3_accumulation_2_clipping_shares_2_1",
        make_strategy=_ring(
            cpus_in_groups("data:2,stage:2", zero=3), (2.0, 1.0), pipeline=PipelineOptions(microbatches=2)
        ),
        accumulation=2,
        shares=(2.0, 1.0, 2.0, 1.0),
        # Several calls between the workers in a pass.
        ring=RingOptions(wire=WireOptions(bytes_per_pack=1000), check_divergence_every_steps=5),
        options=(("clipping", Clipping(norm=0.05)),),
        num_workers=2,
        batch_stats="average",
        reference=FOUR_MICROBATCHES,
        transformer=True,
    ),
    Row(
        name="own_ring_2_of_2_towers_of_slices_2_zero_3_accumulation_2_adamw_clipping_shares_2_1",
        make_strategy=_recomputing(
            _ring(cpus_in_groups("data:2,slice:2", zero=3), (2.0, 1.0), slices=SliceOptions()), "sqrt"
        ),
        accumulation=2,
        shares=(2.0, 1.0, 2.0, 1.0),
        reference=TWO_MICROBATCHES,
        ring=RingOptions(wire=WireOptions(bytes_per_pack=1000), check_divergence_every_steps=5),
        options=(("rule", Adam(weight_decay=0.1)), ("clipping", Clipping(norm=0.05))),
        num_workers=2,
        transformer=True,
    ),
    Row(
        name="own_ring_2_of_2_towers_of_branches_2_zero_3_accumulation_2_adamw_shares_2_1",
        make_strategy=_ring(cpus_in_groups("data:2,branch:2", zero=3), branches=BranchOptions()),
        accumulation=2,
        shares=(2.0, 2.0, 1.0, 1.0),
        reference=TWO_MICROBATCHES,
        ring=RingOptions(worker_shares=(2.0, 1.0), check_divergence_every_steps=5),
        options=(("rule", Adam(weight_decay=0.1)),),
        num_workers=2,
        branches=True,
    ),
    Row(
        name="own_ring_2_of_slices_3_zero_3_adamw_shares_2_1",
        make_strategy=_ring(cpus_in_groups("slice:3", zero=3), slices=SliceOptions()),
        shares=(2.0, 1.0),
        ring=RingOptions(worker_shares=(2.0, 1.0), check_divergence_every_steps=5),
        options=(("rule", Adam(weight_decay=0.1)),),
        num_workers=2,
    ),
    Row(
        name="own_ring_2_of_slices_2_zero_1_adamw_shares_2_1",
        make_strategy=_recomputing(_ring(cpus_in_groups("slice:2", zero=1), slices=SliceOptions()), "sqrt"),
        shares=(2.0, 1.0),
        ring=RingOptions(worker_shares=(2.0, 1.0), check_divergence_every_steps=5),
        options=(("rule", Adam(weight_decay=0.1)),),
        num_workers=2,
    ),
    Row(
        name="own_ring_2_of_2_towers_of_branches_2_zero_2_accumulation_2_adamw",
        make_strategy=_recomputing(
            _ring(cpus_in_groups("data:2,branch:2", zero=2), branches=BranchOptions()), "sqrt"
        ),
        accumulation=2,
        shares=even_shares(4),
        reference=TWO_MICROBATCHES,
        ring=RingOptions(check_divergence_every_steps=5),
        options=(("rule", Adam(weight_decay=0.1)), ("clipping", Clipping(global_norm=0.5))),
        num_workers=2,
    ),
    Row(
        name="ps_sync_3_workers_2_servers",
        **_servers("sync", cpus(1)),
        shares=even_shares(3),
        num_workers=3,
        num_servers=2,
        batch_stats="average",
    ),
    Row(
        name="ps_sync_2_workers_of_2_towers_shares_2_1",
        in_quick=True,
        every_trial=True,
        float32=True,
        **_servers("sync", cpus(2, parameters=1), (2.0, 1.0)),
        shares=(2.0, 1.0, 2.0, 1.0),
        num_workers=2,
        num_servers=3,
        batch_stats="average",
    ),
    Row(
        name="ps_sync_2_workers_of_2_towers_one_stands_still",
        **_servers("sync", cpus(2, parameters=1), (2.0, 1.0), worker_timeout_seconds=0.3),
        shares=(2.0, 1.0, 2.0, 1.0),
        num_workers=2,
        num_servers=2,
        batch_stats="average",
        late_seconds=2.0,
    ),
    Row(
        name="ps_tensorflow_1_worker_2_servers",
        in_quick=True,
        every_trial=True,
        **_servers("async", cpus(1), engine="tensorflow"),
        num_workers=1,
        num_servers=2,
    ),
    Row(
        name="ps_tensorflow_1_worker_of_2_towers_shares_2_1_accumulation_2",
        **_servers("async", cpus(2, parameters=1), (2.0, 1.0), engine="tensorflow"),
        shares=(2.0, 1.0),
        accumulation=2,
        reference=TWO_MICROBATCHES,
        num_workers=1,
        batch_stats="average",
        num_servers=3,
    ),
    Row(
        name="ps_bound_0_2_workers_accumulation_2",
        **_servers("0", cpus(1)),
        accumulation=2,
        reference=TWO_MICROBATCHES,
        num_workers=2,
        num_servers=2,
    ),
)
