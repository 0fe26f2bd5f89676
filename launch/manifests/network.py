"""How the pods of a ring find one another, and who else may reach them."""

from launch.manifests.pod_template import PORT_NAME
from launch.manifests.ring_pods import RingPods


def headless_service(ring: RingPods) -> dict[str, object]:
    """Gives each pod a name in DNS: HOST.NAME, where NAME is the pods' subdomain."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": ring.metadata,
        "spec": {
            "clusterIP": "None",
            # Workers look for one another before any of them is ready.
            "publishNotReadyAddresses": True,
            "selector": ring.labels,
            "ports": [{"name": PORT_NAME, "port": ring.port}],
        },
    }


def network_policy(ring: RingPods) -> dict[str, object]:
    """Lets nobody in but the pods of this ring, to each other on every port: NCCL chooses its own."""
    own_pods = {"podSelector": {"matchLabels": ring.labels}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": ring.metadata,
        "spec": {**own_pods, "policyTypes": ["Ingress"], "ingress": [{"from": [own_pods]}]},
    }
