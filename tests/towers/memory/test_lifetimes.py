"""The bytes that live at once in graphs made by hand."""

import dataclasses

import pytest

from towers.memory.executor_order import schedule
from towers.memory.lifetimes import WORKSPACE, Operation, Output, peaks


def operation(name, *, reads=(), num_bytes=10, after=(), workspace=0, executor="", is_cheap=False, **output):
    """An operation with one output, which reads the first outputs of others."""
    return Operation(
        name=name,
        reads=tuple((index, 0) for index in reads),
        after=tuple(after),
        outputs=(Output(num_bytes=num_bytes, kind=name[0], **output),),
        workspace_bytes=workspace,
        executor=executor,
        is_cheap=is_cheap,
    )


def order(operations):
    return [index for index, is_end in schedule(operations) if not is_end]


def peak(operations):
    return peaks(operations)[""]


def test_a_chain_holds_two_neighbours():
    chain = [operation("a"), operation("b", reads=[0], num_bytes=7), operation("c", reads=[1], num_bytes=5)]
    assert peak(chain).total_bytes == 17
    assert peak(chain).operation == "b"
    assert peak(chain).kinds == {"a": 10, "b": 7}


def test_what_the_backward_pass_reads_lives_until_then():
    """Forward a, b, c; the gradient d reads a, so a lives to the end."""
    graph = [
        operation("a", num_bytes=100),
        operation("b", reads=[0], num_bytes=10),
        operation("c", reads=[1], num_bytes=1),
        operation("d", reads=[2, 0], num_bytes=5),
    ]
    assert peak(graph).total_bytes == 111
    assert peak(graph[:3]).total_bytes == 110
    assert peak([*graph[:2], operation("c", reads=[1], num_bytes=50), *graph[3:]]).total_bytes == 160


def test_a_diamond_holds_both_sides():
    diamond = [
        operation("a", num_bytes=1),
        operation("b", reads=[0], num_bytes=20),
        operation("c", reads=[0], num_bytes=30),
        operation("d", reads=[1, 2], num_bytes=4),
    ]
    assert order(diamond) == [0, 2, 1, 3]
    assert peak(diamond).total_bytes == 54


def test_an_operation_in_place_takes_its_last_input():
    """It does so only if nothing else reads that input, and if the sizes are equal."""
    chain = [operation("a"), operation("b", reads=[0], workspace=1, may_reuse=(0,)), operation("c", reads=[1])]
    assert peak(chain[:2]).kinds == {"b": 10, WORKSPACE: 1}
    assert peak([*chain, operation("d", reads=[0, 2])]).total_bytes == 30
    larger = [operation("a"), operation("b", reads=[0], num_bytes=12, may_reuse=(0,))]
    assert peak(larger).total_bytes == 22
    twice = [operation("a"), operation("b", reads=[0, 0], may_reuse=(0, 1))]
    assert peak(twice).total_bytes == 20


def test_an_operation_in_place_takes_the_last_part_of_a_larger_buffer():
    """a has two halves: once nothing reads the other half, c is written to its own one, and all of a stays."""
    halves = [operation(f"half {k}", reads=[0], num_bytes=5, shares=0) for k in range(2)]
    other = operation("o", reads=[2], num_bytes=1)
    graph = [operation("a"), *halves, other, operation("c", reads=[1], after=[3], num_bytes=5, may_reuse=(0,))]
    assert peak([*graph, operation("d", reads=[4, 3], num_bytes=2)]).total_bytes == 13
    # While the other half is read, c has a buffer of its own.
    graph[3] = dataclasses.replace(other, after=(4,))
    graph[4] = dataclasses.replace(graph[4], after=())
    assert peak(graph).total_bytes == 15


def test_a_reshape_shares_its_input_for_as_long_as_either_is_read():
    graph = [
        operation("a"),
        operation("b", reads=[0], shares=0),
        operation("c", reads=[0], num_bytes=1),
        operation("d", reads=[1, 2], num_bytes=2),
    ]
    assert peak(graph).total_bytes == 13
    assert peak(graph).kinds == {"a": 10, "c": 1, "d": 2}


def test_a_workspace_is_needed_while_its_operation_runs():
    graph = [operation("a"), operation("b", reads=[0], workspace=50), operation("c", reads=[1], num_bytes=30)]
    assert peak(graph).total_bytes == 70
    assert peak(graph).kinds[WORKSPACE] == 50


def test_what_the_caller_holds_lives_to_the_end():
    graph = [operation("a", is_kept=True), operation("b", reads=[0]), operation("c", reads=[1])]
    assert peak(graph).total_bytes == 30


def test_each_memory_has_its_own_peak():
    graph = [
        operation("a", memory="GPU:0"),
        operation("b", reads=[0], num_bytes=6, memory="GPU:1", may_reuse=(0,)),
    ]
    found = peaks(graph)
    assert found["GPU:0"].total_bytes == 10 and found["GPU:1"].total_bytes == 6


def test_operations_wait_for_control_inputs_and_never_for_each_other():
    ordered = [operation("a", after=[1]), operation("b")]
    assert order(ordered) == [1, 0]
    with pytest.raises(ValueError, match="a, b"):
        order([operation("a", after=[1]), operation("b", after=[0])])


def test_several_threads_need_several_workspaces():
    graph = [
        operation("a", num_bytes=1),
        *(operation(f"b{k}", reads=[0], num_bytes=2, workspace=100) for k in range(3)),
    ]
    assert [peaks(graph, threads)[""].total_bytes for threads in (1, 2, 3)] == [103, 205, 307]


def test_workspaces_of_two_threads_meet_in_one_of_several_orders():
    """Thread 0: a, work a; thread 1: b, work b. By their costs, work a ends before work b begins."""
    costs = {"a": 1.0, "b": 2.5, "work a": 1.0, "work b": 1.0}
    reads = {"work a": [0], "work b": [1]}
    graph = [
        dataclasses.replace(
            operation(name, reads=reads.get(name, ()), num_bytes=0, workspace=100 * name.startswith("work")),
            cost=cost,
        )
        for name, cost in costs.items()
    ]
    assert peaks(graph, 2)[""].total_bytes == 100
    assert peaks(graph, 2, 9)[""].total_bytes == 200
    assert peaks(graph, 1, 9)[""].total_bytes == 100


def two_towers(num_layers):
    """Each of two devices computes a gradient of 10 bytes for each layer; the first device also sums them."""
    first, second = "CPU:0", "CPU:1"
    graph = [
        operation("begin", num_bytes=0, executor=first, is_cheap=True),
        operation("begin", num_bytes=0, executor=second, is_cheap=True),
        operation("argument", num_bytes=0, after=[0], executor=first, is_cheap=True),
        operation("batch", num_bytes=1, reads=[2], executor=first),
        operation("forward", num_bytes=1, reads=[3], executor=first),
        operation("receive", num_bytes=0, after=[1], executor=second),
        operation("send", reads=[3], after=[5], executor=first, shares=0),
        operation("forward", num_bytes=1, reads=[6], executor=second),
    ]
    graph[3] = dataclasses.replace(graph[3], cost=0.5)
    for _ in range(num_layers):
        index = len(graph)
        graph += [
            operation("gradient", reads=[4], executor=first),
            operation("gradient", reads=[7], executor=second),
            dataclasses.replace(operation("receive", num_bytes=0, after=[0], executor=first), cost=0.01),
            operation("send", reads=[index + 1], after=[index + 2], executor=second, shares=0),
            operation("sum", reads=[index, index + 3], may_reuse=(0,), is_kept=True, executor=first),
        ]
    return graph


def test_sums_come_late_if_a_thread_wakes_up_late():
    """An idle thread starts to receive gradients at once; without one, all gradients are computed first."""
    graph = two_towers(16)
    awake, late = (peaks(graph, 2, num_orders)[""].total_bytes for num_orders in (1, 9))
    assert awake < 200
    # 32 gradients of 10 bytes.
    assert late > 320
