"""The Service and the NetworkPolicy of the pods."""

from launch.manifests.pod_template import PORT_NAME
from launch.manifests.pods import Pods


def headless_service(pods: Pods) -> dict[str, object]:
    """A Service that gives each pod the DNS name HOST.NAME, where NAME is the pods' subdomain."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": pods.metadata,
        "spec": {
            "clusterIP": "None",
            # Processes look up each other's names before any of them is ready.
            "publishNotReadyAddresses": True,
            "selector": pods.labels,
            "ports": [{"name": PORT_NAME, "port": pods.port}],
        },
    }


def network_policy(pods: Pods) -> dict[str, object]:
    """A NetworkPolicy that admits only connections between these pods, on any port: NCCL chooses its own."""
    own_pods = {"podSelector": {"matchLabels": pods.labels}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": pods.metadata,
        "spec": {**own_pods, "policyTypes": ["Ingress"], "ingress": [{"from": [own_pods]}]},
    }
