"""Model states with ZeRO: the published table."""

import itertools

import pytest

from tests.towers.user_errors import refused
from towers.memory.zero import BytesPerParameter, ModelStates, model_states

# Rajbhandari et al. 2020, table 1, in GB: for each number of devices zero=1, 2 and 3 of each model.
MODELS = (7_500_000_000, 128_000_000_000, 1_000_000_000_000)
TABLE = {
    1: "120 120 120  2048 2048 2048  16000 16000 16000",
    4: "52.5 41.3 30  896 704 512  7000 5500 4000",
    16: "35.6 21.6 7.5  608 368 128  4750 2875 1000",
    64: "31.4 16.6 1.88  536 284 32  4187 2218 250",
    256: "30.4 15.4 0.47  518 263 8  4046 2054 62.5",
    1024: "30.1 15.1 0.12  513 257 2  4011 2013 15.6",
}
CELLS = [
    (devices, parameters, zero, published)
    for devices, row in TABLE.items()
    for (parameters, zero), published in zip(itertools.product(MODELS, (1, 2, 3)), row.split(), strict=True)
]


def test_the_published_table():
    """To one unit of the last printed digit: the paper rounds some figures and truncates others."""
    assert len(CELLS) == 54
    for devices, parameters, zero, published in CELLS:
        unit = 10.0 ** -len(published.partition(".")[2])
        total_bytes = model_states(parameters, devices, zero=zero).total_bytes
        assert abs(total_bytes / 1e9 - float(published)) < unit, (devices, parameters, zero, published)


def test_the_published_example():
    """Figure 1 of the paper: 7.5 billion parameters on 64 devices."""
    totals = [model_states(7_500_000_000, 64, zero=zero).total_bytes / 1e9 for zero in range(4)]
    assert totals == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_what_is_sharded():
    each = BytesPerParameter(parameter_bytes=4, gradient_bytes=4, optimizer_bytes=8)
    assert [model_states(100, 4, zero=zero, each=each) for zero in range(4)] == [
        ModelStates(400, 400, 800),
        ModelStates(400, 400, 200),
        ModelStates(400, 100, 200),
        ModelStates(100, 100, 200),
    ]


def test_what_is_refused():
    with refused("zero=4", "1 the optimizer state"):
        model_states(100, 4, zero=4)
    with refused("0 devices"):
        model_states(100, 0, zero=1)
