"""Slurm's short forms of hosts and counts are expanded as Slurm expands them."""

import pytest
from hypothesis import given
from hypothesis import strategies as drawn

from launch.membership.hostlist import MAX_HOSTS, expand_counts, expand_hosts

HOSTS = {
    "login": "login",
    "node[8-10,12]": "node8 node9 node10 node12",
    "node[2,10],node1": "node2 node10 node1",
    "gpu-a[001-003]-ib": "gpu-a001-ib gpu-a002-ib gpu-a003-ib",
    "node[8-10,12],gpu-a[001-002]-ib,login": "node8 node9 node10 node12 gpu-a001-ib gpu-a002-ib login",
    "n[08-10]": "n08 n09 n10",
    "n[9-011]": "n9 n10 n11",
    "n[098-101,7]": "n098 n099 n100 n101 n7",
    "n5[1-2]": "n51 n52",
    "[1-3]": "1 2 3",
    "a.b_c-[1]": "a.b_c-1",
    "r[1-2]n[1-2]": "r1n1 r1n2 r2n1 r2n2",
    "r[1-2]n[01,03]": "r1n01 r1n03 r2n01 r2n03",
    # An unexpected order, but Slurm's own.
    "r[1-2]n[1-2]x[7-8]": "r1n1x7 r1n1x8 r2n1x7 r2n1x8 r1n2x7 r1n2x8 r2n2x7 r2n2x8",
    "r[1-2]n[1-2]x[7]": "r1n1x7 r2n1x7 r1n2x7 r2n2x7",
    "a[1-2,2]": "a1 a2 a2",
}
# Forms that the Slurm of the comparison, an older version, does not read.
WITH_ENDS = ("gpu-a[001-003]-ib", "node[8-10,12],gpu-a[001-002]-ib,login")


@pytest.mark.parametrize("text", HOSTS)
def test_hosts(text):
    assert " ".join(expand_hosts(text)) == HOSTS[text]


NOT_HOSTS = [
    *("", ",", "a,", "a,,b", "n 1", "n;1", "n(x2)", "ñ", "n\n", "n[1-2]\n"),
    *("n[1-2", "n1-2]", "n[[1]]", "n[]", "n[,1]", "n[1,]"),
    *("n[1-]", "n[-1]", "n[1-2-3]", "n[3-1]", "n[a-b]", "n[1 - 2]", "n[\u0661]"),
]


@pytest.mark.parametrize("text", NOT_HOSTS)
def test_invalid_lists_of_hosts(text):
    with pytest.raises(ValueError):
        expand_hosts(text)


@pytest.mark.parametrize("text", ["n[0-65536]", "n[0-999999999]", "r[0-999]n[0-999]", "r[0-9999]n[0-9999],a"])
def test_too_many_hosts_are_refused_before_they_fill_the_memory(text):
    with pytest.raises(ValueError, match="more than 65536"):
        expand_hosts(text)


def test_as_many_hosts_as_slurm_allows():
    assert expand_hosts(f"n[1-{MAX_HOSTS}]")[-1] == "n65536"


numbers = drawn.integers(0, 400)
groups = drawn.lists(drawn.tuples(numbers, drawn.integers(0, 5)), min_size=1, max_size=4)
prefixes, widths = drawn.sampled_from(["n", "gpu-a", "x."]), drawn.integers(1, 4)
names = drawn.lists(drawn.tuples(prefixes, groups, widths), min_size=1)


@given(names)
def test_names_that_are_folded_here_expand_to_their_hosts(names):
    """Builds short forms and, separately, the hosts that they stand for."""
    folded, hosts = [], []
    for prefix, ranges, width in names:
        written = [f"{first:0{width}d}" + (f"-{first + more:0{width}d}" if more else "") for first, more in ranges]
        folded.append(f"{prefix}[{','.join(written)}]")
        hosts += [f"{prefix}{first + i:0{width}d}" for first, more in ranges for i in range(more + 1)]
    assert expand_hosts(",".join(folded)) == tuple(hosts)


@pytest.mark.parametrize(
    "text, counts",
    [("1", (1,)), ("2(x3),1", (2, 2, 2, 1)), ("1,2", (1, 2)), ("16(x2),8(x1),4", (16, 16, 8, 4)), ("0", (0,))],
)
def test_counts(text, counts):
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "2(x3", "2(3)", "2x3", "(x3)", "-1", "1,", "1.5", "2 (x3)", "1(x999999999)"])
def test_invalid_counts(text):
    with pytest.raises(ValueError):
        expand_counts(text)
