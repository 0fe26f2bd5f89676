"""The strategy 'ps': what each role of the cluster does, on the engine that the options choose."""

import dataclasses

from strategies.distribute import coordinated_roles
from strategies.engines import OWN
from strategies.servers.chief import ServersStrategy
from strategies.servers.membership import ServersMembership
from strategies.servers.own import roles as own_roles


def joined_servers(membership: ServersMembership, *, num_cpus: int) -> ServersMembership:
    """Joins the cluster and returns the membership. Call it before TensorFlow computes anything.

    Args:
      membership: the cluster and this process's membership.
      num_cpus: number of logical CPU devices of this process.

    Raises:
      UserError: this process's address is in use.
      PeerLost: a process did not start in time; the message names it.
    """
    if _is_own(membership):
        return membership
    part = coordinated_roles.joined(
        membership.cluster, num_cpus=num_cpus, startup_timeout_seconds=membership.startup_timeout_seconds
    )
    return dataclasses.replace(membership, joined=part)


def servers_strategy(task, devices, options, *, shares=None, servers: ServersMembership) -> ServersStrategy:
    """The strategy for the chief, as `own_servers_strategy` or `coordinated_strategy` builds it."""
    build = own_roles.own_servers_strategy if _is_own(servers) else coordinated_roles.coordinated_strategy
    return build(task, devices, options, shares=shares, servers=servers)


def run_server(options, membership: ServersMembership, *, stop_asked=lambda: False) -> str:
    """Runs a server to the end: `own_roles.run_own_server` or `coordinated_roles.run_coordinated_server`."""
    if _is_own(membership):
        return own_roles.run_own_server(options, membership, stop_asked=stop_asked)
    return coordinated_roles.run_coordinated_server(options, membership, stop_asked=stop_asked)


def run_worker(task, devices, options, membership: ServersMembership, **named) -> str:
    """Runs a worker to the end: `own_roles.run_own_worker` or `coordinated_roles.run_coordinated_worker`."""
    run = own_roles.run_own_worker if _is_own(membership) else coordinated_roles.run_coordinated_worker
    if named.get("shares") is None:
        devices = devices.for_examples(membership.own_examples(task.batch_size) // options.accumulation)
    return run(task, devices, options, membership, **named)


def _is_own(membership: ServersMembership) -> bool:
    return membership.options.engine_choice().name == OWN
