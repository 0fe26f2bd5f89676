"""A valid TF_CONFIG becomes a Cluster; an invalid one is refused in one line that says what to write."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as drawn

from launch.membership.tf_config import cluster_from, public_addresses, tf_config_text
from strategies.cluster import CHIEF, EVALUATOR, SERVER, WORKER, Cluster, Member
from tests.towers.user_errors import refused

RING = {"worker": ["a:2222", "b:2222"]}
SERVERS = {"chief": ["c:1"], "worker": ["w0:1", "w1:1"], "ps": ["p:1"]}


def described(cluster, role="worker", index=0, **more):
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}, **more})


def test_a_ring():
    cluster = cluster_from(described(RING, index=1))
    assert cluster == Cluster(addresses={WORKER: ("a:2222", "b:2222")}, role=WORKER, index=1)
    assert cluster.this == Member(WORKER, 1, "b:2222")
    assert cluster.rank == 1


def test_a_chief_has_rank_0_wherever_it_is_listed():
    cluster = cluster_from(described({"worker": ["a:1", "b:1"], "chief": ["c:1"]}))
    assert [member.name for member in cluster.ring] == ["chief:0", "worker:0", "worker:1"]
    assert cluster.rank == 1


@pytest.mark.parametrize("role, index", [("chief", 0), ("worker", 1), ("ps", 0), ("evaluator", 0)])
def test_every_role_of_a_cluster_with_servers(role, index):
    cluster = cluster_from(described(SERVERS, role, index))
    assert (cluster.role, cluster.index) == (role, index)
    assert cluster.members(SERVER) == (Member(SERVER, 0, "p:1"),)
    assert cluster.members(EVALUATOR) == ()
    assert (cluster.this.address == "") == (role == EVALUATOR)


def test_an_index_may_be_a_string_of_digits():
    assert cluster_from(described(RING, index="1")).index == 1


def test_names_for_other_programs_are_ignored():
    text = json.dumps(
        {
            "cluster": RING,
            "task": {"type": "worker", "index": 0, "trial": "3", "cloud": "x"},
            "environment": "cloud",
            "rpc_layer": "grpc",
            "job": {"scale_tier": "CUSTOM"},
        }
    )
    assert cluster_from(text) == cluster_from(described(RING))


def test_a_role_without_processes_is_omitted():
    assert cluster_from(described({**RING, "ps": [], "chief": []})) == cluster_from(described(RING))


def test_hosts_of_every_form():
    hosts = ["localhost:1", "10.0.0.1:65535", "[::1]:2222", "my_host-0.svc.cluster.local:80", "a.b.:1"]
    assert cluster_from(described({"worker": hosts})).addresses[WORKER] == tuple(hosts)


@pytest.mark.parametrize("text", ["", "  \n", "{}", " { } "])
def test_an_empty_text_means_no_cluster(text):
    assert cluster_from(text) is None


@pytest.mark.parametrize(
    "text",
    [described({}), described(None, "chief", "0"), '{"environment": "cloud"}', '{"task": {}, "cluster": {}}'],
)
def test_a_platform_s_text_for_one_process_means_no_cluster(text):
    assert cluster_from(text) is None


CASES = {
    "no JSON": ("{'cluster': 1}", ("not JSON", "line 1 column 2", '"cluster"')),
    "JSON cut off": (described(RING)[:-1], ("not JSON",)),
    "JSON without an end": ("[" * 100_000, ("not JSON",)),
    "lines that are no JSON": ("worker:\n  - a:1\n", ("not JSON", "worker:\\n")),
    "no object": ('["a:1"]', ('["a:1"]', "not a JSON object")),
    "no cluster": ('{"task": {"type": "worker", "index": 1}}', ("its cluster is null",)),
    "an empty cluster": (described({}, index=1), ("its cluster is {}",)),
    "an evaluator of no cluster": (described({}, "evaluator"), ("its cluster is {}",)),
    "a cluster of empty roles": (described({"worker": []}), ('its cluster is {"worker": []}',)),
    "a cluster that is a list": (described(["a:1"]), ('its cluster is ["a:1"]',)),
    "a role that is an address": (described({"worker": "a:1"}), ("'worker' has \"a:1\"", "list of addresses")),
    "a role by number": (described({"worker": {"0": "a:1"}}), ("'worker' has {", "list of addresses")),
    "an unknown role": (described({"wroker": ["a:1"]}), ('"wroker"', "chief, worker, ps")),
    "an address without a port": (described({"worker": ["a:1", "b"]}), ("worker:1", '"b"', "host:port")),
    "port 0": (described({"worker": ["a:0"]}), ('"a:0"', "1 to 65535")),
    "port 65536": (described({"worker": ["a:65536"]}), ('"a:65536"', "1 to 65535")),
    "a port that is no number": (described({"worker": ["a:http"]}), ('"a:http"',)),
    "no host": (described({"worker": [":2222"]}), ('":2222"',)),
    "a host with a space": (described({"worker": ["a b:1"]}), ('"a b:1"',)),
    "a URL": (described({"worker": ["grpc://a:1"]}), ('"grpc://a:1"',)),
    "a host with two dots": (described({"worker": ["a:1", "a..b:1"]}), ('"a..b:1"', "between the dots")),
    "a host with a long part": (described({"worker": [f"{'a' * 64}.b:1"]}), ("between the dots",)),
    "IPv6 without brackets": (described({"worker": ["::1:2222"]}), ('"::1:2222"', "in brackets")),
    "brackets without IPv6": (described({"worker": ["[a]:2222"]}), ('"[a]:2222"', "in brackets")),
    "an address that is a number": (described({"worker": [2222]}), ("is 2222", "host:port")),
    "an address twice": (described({"worker": ["a:1", "b:1", "a:1"]}), ("'a:1'", "worker:0", "worker:2")),
    "an address of two roles": (described({**SERVERS, "ps": ["w1:1"]}), ("'w1:1'", "worker:1", "ps:0")),
    "an address in other letters": (described({"worker": ["a:1", "A:01"]}), ("worker:0", "worker:1")),
    "an IPv6 address in other digits": (
        described({"worker": ["[::1]:1", "[0:0::01]:1"]}),
        ("worker:0", "worker:1"),
    ),
    "a role twice": (
        '{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}}',
        ('"worker" occurs 2 times', "list of all its addresses"),
    ),
    "no task": (json.dumps({"cluster": RING}), ("its task is null", '"type"')),
    "a task that is a text": (json.dumps({"cluster": RING, "task": "worker:0"}), ('its task is "worker:0"',)),
    "a task without type": (json.dumps({"cluster": RING, "task": {"index": 0}}), ('{"index": 0}', '"type"')),
    "a task without index": (json.dumps({"cluster": RING, "task": {"type": "worker"}}), ('"worker"', '"index"')),
    "an index that is a word": (described(RING, index="first"), ('index is "first"', "integer")),
    "an index that is a fraction": (described(RING, index=0.5), ("index is 0.5", "integer")),
    "an index that is true": (described(RING, index=True), ("index is true", "integer")),
    "an index that is null": (described(RING, index=None), ("index is null", "integer")),
    "an index below 0": (described(RING, index=-1), ("index is -1", "start at 0")),
    "an index of digits below 0": (described(RING, index="-1"), ("index is -1", "start at 0")),
    "an index too large": (described(RING, index=2), ("index is 2", "has 2 of role 'worker'", "give 0 to 1")),
    "an evaluator's index below 0": (described(RING, "evaluator", -1), ("index is -1",)),
    "a type that the cluster does not have": (described(RING, "chief"), ('type is "chief"', "has worker")),
    "a type that is a number": (described(RING, 7), ("type is 7", "has worker")),
    "a type that is a list": (described(RING, ["worker"]), ('type is ["worker"]',)),
    "an evaluator in the cluster": (described({**RING, "evaluator": ["e:1"]}), ("'evaluator'", "omit it there")),
    "a master": (described({"master": ["m:1"], **RING}), ("'master'", "call it 'chief'")),
    "a master's task": (described(RING, "master"), ('"master"', "call it 'chief'")),
    "two chiefs": (described({"chief": ["c:1", "d:1"]}, "chief"), ("2 chiefs", "at most one")),
    "servers without a chief": (
        described({**RING, "ps": ["p:1"]}),
        ("1 of role 'ps'", 'add "chief"', "or --chief for launch.local"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_in_one_line(name):
    text, parts = CASES[name]
    with refused("TF_CONFIG: ", *parts):
        cluster_from(text)


def test_a_long_value_is_cut_off_in_the_message():
    with pytest.raises(ValueError) as caught:
        cluster_from(json.dumps(["a:1"] * 10_000))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "host, public",
    [
        ("8.8.8.8", True),
        ("[2001:4860:4860::8888]", True),
        ("[::ffff:8.8.8.8]", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("192.168.0.1", False),
        ("169.254.1.1", False),
        ("0.0.0.0", False),
        ("[::1]", False),
        ("[fd00::1]", False),
        ("[fe80::1%eth0]", False),
        ("[::ffff:10.0.0.1]", False),
        ("google.com", False),
    ],
)
def test_public_addresses(host, public):
    cluster = cluster_from(described({"chief": ["a:1"], "ps": [f"{host}:2222"]}, "chief"))
    assert public_addresses(cluster) == ((f"{host}:2222",) if public else ())


addresses = drawn.lists(
    drawn.tuples(
        drawn.from_regex(r"[a-z][a-z0-9-]{0,5}(\.[a-z0-9-]{1,4}){0,2}", fullmatch=True), drawn.integers(1, 65535)
    ),
    min_size=2,
    max_size=12,
    unique=True,
).map(lambda pairs: [f"{host}:{port}" for host, port in pairs])


@given(addresses, drawn.data())
def test_a_cluster_survives_writing_and_reading(addresses, data):
    num_servers = data.draw(drawn.integers(0, len(addresses) - 1))
    by_role = {
        CHIEF: tuple(addresses[:1]),
        SERVER: tuple(addresses[1 : 1 + num_servers]),
        WORKER: tuple(addresses[1 + num_servers :]),
    }
    by_role = {role: of_role for role, of_role in by_role.items() if of_role}
    role = data.draw(drawn.sampled_from([*by_role, EVALUATOR]))
    index = data.draw(drawn.integers(0, len(by_role.get(role, "x")) - 1))
    cluster = Cluster(addresses=by_role, role=role, index=index)
    assert cluster_from(tf_config_text(cluster)) == cluster
