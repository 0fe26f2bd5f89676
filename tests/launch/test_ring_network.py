"""A ring over a network: each worker on its own host, with wires between the hosts."""

import json
import pathlib
import time

import pytest

from launch.binary import PEER_LOST
from launch.networks.network_namespaces import Network, hosts, namespaces
from tests.launch.programs import Ended, assert_same_end, checkpoint_values, errors, wait_for
from tests.launch.system_networks import needs_hosts
from tests.launch.workers import TRAIN, Workers

pytestmark = [pytest.mark.timeout(280), needs_hosts, pytest.mark.full]

LIMIT_SECONDS = 200
SLOW_MEGABITS = 20
PORT = 2222
TIMEOUT_SECONDS = 6
# Limit from the loss of a wire to the last worker's exit: the collective's timeout and the time to end.
END_SECONDS = 3 * TIMEOUT_SECONDS
# Each step takes about four seconds on the slow wire.
SLOW_STEPS = 2
# The evaluation has few, large batches, because each of them waits for all workers.
SLOW_RUN = (f"--steps={SLOW_STEPS}", "--model=classic_cnn", "--eval_batch_size=256")


def ring(network: Network, cwd: pathlib.Path, *flags: str) -> Workers:
    """A ring with one worker on each host."""
    ranks = range(network.num_hosts)
    return Workers(
        [(*TRAIN, *flags)] * network.num_hosts,
        cwd=cwd,
        addresses=[f"{network.address(rank)}:{PORT}" for rank in ranks],
        networks={rank: network.namespace(rank) for rank in ranks},
    )


def assert_all_done(workers: Workers) -> None:
    ends = workers.ends(LIMIT_SECONDS)
    assert [ended.code for ended in ends] == [0] * len(ends), [ended.err for ended in ends]


def assert_gradients_crossed(network: Network, directory: pathlib.Path, num_steps: int) -> None:
    """Each of W workers sends 2 (W - 1) / W of the gradients a step; gradients are as large as parameters."""
    saved = checkpoint_values(directory, num_steps)
    one_step = sum(value.nbytes for key, value in saved.items() if key.startswith("parameters/"))
    assert one_step > 1_000_000, saved.keys()
    count = network.num_hosts
    needed = num_steps * one_step * 2 * (count - 1) // count
    sent = [network.bytes_sent(host) for host in range(count)]
    assert min(sent) >= needed, (sent, needed)


def test_two_hosts_give_the_same_bits_as_one_machine(tmp_path, undisturbed):
    with hosts(2) as network, ring(network, tmp_path) as workers:
        assert_all_done(workers)
    assert_same_end(tmp_path / "run", undisturbed.directory)


def test_four_hosts_one_of_them_on_a_slow_wire(tmp_path):
    with hosts(4) as network:
        network.limit(2, SLOW_MEGABITS)
        began = time.monotonic()
        with ring(network, tmp_path, *SLOW_RUN) as workers:
            assert_all_done(workers)
        assert_gradients_crossed(network, tmp_path / "run", SLOW_STEPS)
        # The run took as long as the slow wire needs for its bytes.
        assert time.monotonic() - began > 8 * network.bytes_sent(2) / (SLOW_MEGABITS * 1e6)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary["workers"]) == {f"worker:{rank}" for rank in range(4)}


def ends_after_a_pull(network: Network, cwd: pathlib.Path, lost: int) -> list[Ended]:
    """Pulls one host's wire after step 10; the workers must end in time. Returns how they ended."""
    with ring(network, cwd, f"--collective_timeout_seconds={TIMEOUT_SECONDS}") as workers:
        wait_for(cwd / "run" / "checkpoints" / "step-10.index", workers.processes[0])
        network.pull(lost)
        deadline = time.monotonic() + END_SECONDS
        return [workers.end(rank, deadline - time.monotonic()) for rank in range(network.num_hosts)]


def test_the_ring_resumes_when_the_wire_is_back(tmp_path, undisturbed):
    with hosts(2) as network:
        for ended in ends_after_a_pull(network, tmp_path, 1):
            assert ended.code == PEER_LOST, ended.err
            (line,) = errors(ended)
            assert "was lost at step" in line or "did not answer at step" in line
        network.plug(1)
        with ring(network, tmp_path) as workers:
            assert_all_done(workers)
            assert "resumed at step" in workers.written(0, "out")
    assert_same_end(tmp_path / "run", undisturbed.directory)


def test_no_namespace_is_left():
    with pytest.raises(ZeroDivisionError), hosts(2) as network:
        assert len(namespaces()) == 3
        assert network.bytes_sent(0) >= 0
        raise ZeroDivisionError
    assert namespaces() == []
