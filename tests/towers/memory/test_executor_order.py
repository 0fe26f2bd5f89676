"""The order of operations of small graphs on one thread and on two."""

import pytest

from towers.memory.executor_order import schedule
from towers.memory.lifetimes import Operation, Output


def operation(name, *reads, after=(), cost=1.0, executor="CPU:0", is_cheap=False):
    """An operation with one output, which reads the first outputs of others."""
    return Operation(
        name=name,
        reads=tuple((index, 0) for index in reads),
        after=tuple(after),
        outputs=(Output(num_bytes=1),),
        cost=cost,
        executor=executor,
        is_cheap=is_cheap,
    )


def order(operations, num_threads=1):
    return [operations[index].name for index, is_end in schedule(operations, num_threads) if not is_end]


def test_the_last_follower_runs_at_once_and_the_others_after_all_that_follows_from_it():
    """A backward pass: 'g2' leads to the gradient of kernel 2 and to 'g1', which leads to that of kernel 1."""
    graph = [operation("g2"), operation("kernel 2", 0), operation("g1", 0)]
    graph += [operation("kernel 1", 2), operation("g0", 2)]
    assert order(graph) == ["g2", "g1", "g0", "kernel 1", "kernel 2"]
    # The two followers of 'g2' in the other order.
    graph = [operation("g2"), operation("g1", 0), operation("kernel 2", 0)]
    assert order([*graph, operation("g0", 1)]) == ["g2", "kernel 2", "g1", "g0"]


def test_cheap_operations_come_first_and_then_the_queue():
    graph = [operation("a"), operation("view", 0, is_cheap=True), operation("b", 0), operation("after view", 1)]
    # The thread goes on with 'after view' when the view ends; 'b' is in the queue, because the view came first.
    assert order(graph) == ["a", "view", "after view", "b"]


def test_readers_come_before_operations_that_only_wait():
    graph = [operation("a"), operation("waits", after=[0]), operation("reads", 0)]
    assert order(graph) == ["a", "waits", "reads"]


def test_what_is_sent_to_another_device_waits_in_the_queue():
    graph = [operation("a"), operation("there", 0, executor="CPU:1"), operation("here", 0)]
    assert order(graph) == ["a", "here", "there"]


def test_an_idle_thread_takes_the_oldest_operation_of_another_one():
    """Thread 0 begins 'a', then 'a4'; thread 1, which is idle, takes 'a1' from the back of thread 0's queue."""
    graph = [operation("a"), *(operation(f"a{k}", 0) for k in range(1, 5))]
    assert order(graph) == ["a", "a4", "a3", "a2", "a1"]
    assert order(graph, 2) == ["a", "a4", "a1", "a3", "a2"]


def test_two_towers_run_side_by_side():
    towers = [operation(f"{tower}{k}", *([2 * k - 2 + tower] if k else [])) for k in range(3) for tower in (0, 1)]
    assert order(towers, 2) == ["00", "10", "01", "11", "02", "12"]
    assert order(towers) == ["00", "01", "02", "10", "11", "12"]


def test_a_circle_is_named():
    with pytest.raises(ValueError, match="a, b"):
        order([operation("a", after=[1]), operation("b", after=[0])])


def test_a_seed_is_another_order_of_two_threads():
    towers = [operation(f"{tower}{k}", *([2 * k - 2 + tower] if k else [])) for k in range(9) for tower in (0, 1)]

    def of_seed(seed, num_threads):
        return [towers[index].name for index, is_end in schedule(towers, num_threads, seed=seed) if not is_end]

    assert of_seed(2, 2) == of_seed(2, 2) != order(towers, 2)
    assert sorted(of_seed(2, 2)) == sorted(order(towers, 2))
    assert of_seed(2, 1) == order(towers)
