"""A chief of TensorFlow's servers whose cluster is lost once all have started: nobody listens any more."""

from launch import binary
from launch.membership.free_ports import free_addresses
from strategies.cluster import CHIEF, SERVER, WORKER, Cluster
from strategies.distribute import coordinator_connection


def main(_) -> None:
    coordinator_connection.wait_for_all = lambda *members, **named: None
    coordinator_connection._CONNECT_SECONDS = 3
    chief, server, worker = free_addresses(3)
    addresses = {CHIEF: [chief], SERVER: [server], WORKER: [worker]}
    cluster = Cluster(addresses=addresses, role=CHIEF, index=0)
    coordinator_connection.CoordinatorConnection(cluster, startup_timeout_seconds=1)


if __name__ == "__main__":
    binary.run(main)
