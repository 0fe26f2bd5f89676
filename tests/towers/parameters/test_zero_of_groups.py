"""ZeRO over pipelines and slices: who has what, numbers of one device, checkpoints, and what is refused."""

import dataclasses

import pytest
import tensorflow as tf

from strategies.registry import build_strategy
from strategies.training.checkpoints import Checkpoints
from tests.tiers import first_quick
from tests.towers.logical_cpus import cpus, cpus_in_groups
from tests.towers.table_and_matrices import task
from tests.towers.tiny_tasks import assert_close, parameters_of
from tests.towers.user_errors import refused
from towers.options import StepOptions
from towers.stages.options import PipelineOptions
from towers.updates.clipping import Clipping
from towers.updates.composed_rules import Lookahead
from towers.updates.rules import Adam, Momentum, Muon
from towers.updates.schedules import Constant

ONE_DEVICE = ("towers", cpus(1))
STAGES, SLICES = "data:2,stage:2", "data:2,slice:2"
GROUPS = (("CPU:0", "CPU:1"), ("CPU:2", "CPU:3"))


def built(mode, rule=None, **options):
    """A strategy with float64 layers; `mode` is its name, its devices and other arguments."""
    name, devices, *others = mode
    step = StepOptions(rule=rule or Adam(), schedule=Constant(0.1), precision="float64", **options)
    exact = dataclasses.replace(task(), losses=losses)
    return build_strategy(name, exact, devices, step, **others[0] if others else {})


def losses(outputs, batch):
    """Cross-entropy in the precision of the layers."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(batch.labels, outputs)


def pipeline(zero=0, grid=STAGES):
    return "pipeline", cpus_in_groups(grid, zero=zero), {"pipeline": PipelineOptions(microbatches=2)}


def slices(zero=0, grid=SLICES):
    return "slices", cpus_in_groups(grid, zero=zero)


def trained(mode, rule=None, steps=3, **options):
    strategy = built(mode, rule, **options)
    strategy.run_steps(steps)
    return strategy


def of_device(variable) -> str:
    return variable.device.rpartition("device:")[2]


@pytest.mark.parametrize("mode", first_quick([(pipeline(1),), (slices(2),)]), ids=lambda mode: mode[0])
def test_counterparts_share_the_optimizer_state_of_what_they_hold_alike(mode):
    strategy = trained(mode, steps=2)
    held: dict[str, int] = {}
    for part in strategy.engine.placement.parts:
        copies = {of_device(copy): copy.numpy().tobytes() for copy in part.copies.values()}
        assert set(copies) in [set(counterparts) for counterparts in zip(*GROUPS, strict=True)]
        assert len(set(copies.values())) == 1, f"the copies of {part.shard.name} differ"
        ((device, slots),) = part.slots.items()
        assert device == part.device
        for slot in slots.values():
            assert of_device(slot) == device.removeprefix("/device:")
            held[of_device(slot)] = held.get(of_device(slot), 0) + slot.dtype.size * slot.shape.num_elements()
    everything = sum(held.values())
    assert everything == 2 * 8 * strategy.model.count_params(), "two slots a parameter, each once in all"
    for index, device in enumerate(GROUPS[0]):
        shared = [held[device], held[GROUPS[1][index]]]
        assert max(shared) <= 0.6 * sum(shared), held
    assert (
        f"2 towers divide their optimizer state, device by device; optimizer state: {held['CPU:0']:,} bytes"
        in (" ".join(strategy.notices))
    )


@pytest.mark.parametrize("zero", [1, 2])
def test_what_is_kept_between_microbatches(zero):
    """ZeRO-1 keeps both towers' gradients and sums them once a step; ZeRO-2 keeps the sum of each part."""
    strategy = built(slices(zero), accumulation=2)
    kept = strategy.engine.first_function(strategy._next_batch(0)).gradients
    placement = strategy.engine.placement
    num_parts, num_gradients = len(placement.parts), 2 * len(placement.owners.held)
    assert num_parts != num_gradients, "or this test shows nothing"
    assert len(kept) == {1: num_gradients, 2: num_parts}[zero]


CASES = [
    (pipeline(2), Momentum(momentum=0.9), {"clipping": Clipping(norm=0.05), "accumulation": 2}),
    (slices(1), Adam(weight_decay=0.1), {"clipping": Clipping(global_norm=0.1)}),
    (pipeline(1), Lookahead(rule=Muon(momentum=0.9), num_updates=3, every=2), {}),
    (pipeline(3), Muon(momentum=0.9), {"clipping": Clipping(norm=0.05), "accumulation": 2}),
    (slices(3), Adam(weight_decay=0.1), {"clipping": Clipping(global_norm=0.1)}),
]


@pytest.mark.parametrize("mode, rule, options", first_quick(CASES, 0), ids=lambda given: type(given).__name__)
def test_it_equals_one_device(mode, rule, options):
    """With norms of parameters that several devices share, and rules that need whole parameters."""
    microbatches = options.get("accumulation", 1) * (2 if mode[0] == "pipeline" else 1)
    found = trained(mode, rule, **options)
    expected = trained(ONE_DEVICE, rule, **options | {"accumulation": microbatches})
    assert_close(parameters_of(found), parameters_of(expected), 1e-9)


RING_OF_STAGES = ("ring", cpus_in_groups("stage:2", zero=1), {"pipeline": PipelineOptions(microbatches=2)})


@pytest.mark.full
def test_each_mode_resumes_from_the_checkpoint_of_another(tmp_path):
    modes = [pipeline(3), slices(2), RING_OF_STAGES, ("towers", cpus(3, zero=3)), slices(3), pipeline(1)]
    for leg, mode in enumerate(modes):
        strategy = built(mode)
        checkpoints = Checkpoints(tmp_path, strategy)
        if leg:
            assert checkpoints.restore_latest() == 2 * leg
            strategy.restored()
        else:
            checkpoints.prepare()
        strategy.run_steps(2)
        path = checkpoints.save()
    assert_close(parameters_of(strategy), parameters_of(trained(ONE_DEVICE, steps=2 * len(modes))), 1e-9)
    shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    assert sum(shape == [40, 6] for shape in shapes.values()) == 3, "the table and its two slots, once"


@pytest.mark.parametrize(
    "mode, parts",
    [
        (pipeline(1, "stage:2"), ("zero=1 with strategy 'pipeline' and 1 tower", "grid='data:2,stage:2'")),
        (
            ("branches", cpus_in_groups("branch:2", zero=1)),
            ("zero=1 with strategy 'branches' and 1 tower", "grid='data:2,branch:2'"),
        ),
        (pipeline(3, "stage:2"), ("zero=3 with strategy 'pipeline' and 1 tower", "grid='data:2,stage:2'")),
    ],
    ids=lambda given: given[0],
)
def test_what_is_refused(mode, parts):
    with refused(*parts):
        built(mode)
