"""Every kind of manifest: it is valid under Kubernetes' published schemas, and the pods find each other."""

import json

import kubernetes_validate
import pytest

from launch import binary
from launch.manifests.kinds import KINDS, documents
from launch.membership.tf_config import cluster_from
from tests.launch.manifests.clusters import (
    environment_of,
    expanded,
    of_kind,
    pod_template,
    pod_templates,
    ring,
    with_servers,
)
from towers.errors import UserError

every_kind = pytest.mark.parametrize("kind", KINDS)
indexed_kind = pytest.mark.parametrize("kind", ["job", "jobset"])
# The oldest version with backoffLimitPerIndex, and the newest version of the schemas.
VERSIONS = ("1.29", kubernetes_validate.latest_version())
OF_KUBERNETES_ITSELF = ("Secret", "Service", "NetworkPolicy", "Job")
RINGS = (
    ring(),
    ring(workers=1, gpus_per_worker=0, volume_claim=None),
    ring(gpus_per_worker=8, cpus="500m", memory="1.5Ti", namespace="ml", port=65535, max_restarts=0),
)


def validate(document):
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


@every_kind
@pytest.mark.parametrize("pods", RINGS, ids=["usual", "least", "most"])
def test_documents_are_valid_under_the_published_schemas(kind, pods):
    found = of_kind(kind, pods)
    for name in OF_KUBERNETES_ITSELF:
        if name in found:
            validate(found[name])
    pod_template_head = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
    validate(pod_template_head | {"template": pod_template(kind, pods)})
    if kind == "jobset":
        (replicated,) = found["JobSet"]["spec"]["replicatedJobs"]
        validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}} | replicated["template"])


def test_the_schemas_refuse_a_misspelt_field():
    """Otherwise the test above would prove nothing."""
    job = of_kind("job", ring())["Job"]
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = ["x"]
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(job)


def test_each_kind_has_its_documents():
    assert [of["kind"] for of in documents("job", ring())] == ["Secret", "Service", "NetworkPolicy", "Job"]
    assert [of["kind"] for of in documents("jobset", ring())] == ["Secret", "NetworkPolicy", "JobSet"]
    assert [of["kind"] for of in documents("tfjob", ring())] == ["Secret", "NetworkPolicy", "TFJob"]


@every_kind
def test_every_document_names_the_namespace(kind):
    assert {of["metadata"].get("namespace") for of in documents(kind, ring())} == {None}
    assert {of["metadata"].get("namespace") for of in documents(kind, ring(namespace="ml"))} == {"ml"}


@every_kind
def test_all_pods_get_the_secret_of_their_run(kind):
    secret = of_kind(kind, ring())["Secret"]
    assert environment_of(pod_template(kind, ring()), 1)["TOWERS_SECRET"] == "secret of resnet"
    assert secret["metadata"]["name"] == "resnet"
    assert len(secret["stringData"]["secret"]) == 32
    assert secret != of_kind(kind, ring())["Secret"]


@indexed_kind
def test_the_workers_have_one_cluster_and_different_indices(kind):
    """Each expanded TF_CONFIG is JSON. The pods' differ only in the index, and list the pods' host names."""
    found = [
        json.loads(environment_of(pod_template(kind, ring(port=3333)), index)["TF_CONFIG"]) for index in range(3)
    ]
    clusters = [config["cluster"] for config in found]
    assert clusters[0] == clusters[1] == clusters[2]
    prefix = {"job": "resnet-", "jobset": "resnet-worker-0-"}[kind]
    assert clusters[0] == {"worker": [f"{prefix}{index}.resnet:3333" for index in range(3)]}
    assert [config["task"] for config in found] == [{"type": "worker", "index": str(index)} for index in range(3)]


def test_the_service_defines_the_host_names_that_the_job_uses():
    found = of_kind("job", ring(port=3333))
    service, template = found["Service"], pod_template("job", ring(port=3333))
    assert service["metadata"]["name"] == template["spec"]["subdomain"] == "resnet"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert [port["port"] for port in service["spec"]["ports"]] == [3333]


def test_the_job_set_defines_the_host_names_that_its_pods_use():
    network = of_kind("jobset", ring())["JobSet"]["spec"]["network"]
    assert network == {"enableDNSHostnames": True, "subdomain": "resnet", "publishNotReadyAddresses": True}


SERVERS_OF_KINDS = {
    "job": ("resnet-chief-0", "resnet-ps-1"),
    "jobset": ("resnet-chief-0-0", "resnet-ps-0-1"),
    "tfjob": ("resnet-chief-0", "resnet-ps-1"),
}


@every_kind
def test_a_cluster_with_servers_has_all_roles(kind):
    """One chief, the servers and the workers; each valid, and admitted by the policy that admits the others."""
    templates = pod_templates(kind, with_servers())
    assert list(templates) == ["chief", "worker", "ps"]
    pod_template_head = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
    (policy,) = (of for of in documents(kind, with_servers()) if of["kind"] == "NetworkPolicy")
    for template in templates.values():
        validate(pod_template_head | {"template": template})
        assert template["metadata"]["labels"] == policy["spec"]["podSelector"]["matchLabels"]
    for document in documents(kind, with_servers()):
        if document["kind"] in OF_KUBERNETES_ITSELF:
            validate(document)
    limits = {role: of["spec"]["containers"][0]["resources"]["limits"] for role, of in templates.items()}
    assert {role: of.get("nvidia.com/gpu", 0) for role, of in limits.items()} == {"chief": 1, "worker": 1, "ps": 0}


@indexed_kind
def test_the_roles_have_one_cluster(kind):
    """The cluster of TF_CONFIG that our programs read has all pods, and each pod knows which it is."""
    templates = pod_templates(kind, with_servers(port=3333))
    found = {
        (role, index): cluster_from(environment_of(templates[role], index)["TF_CONFIG"])
        for role, index in (("chief", 0), ("worker", 2), ("ps", 1))
    }
    assert [(of.role, of.index) for of in found.values()] == list(found)
    (addresses,) = {tuple(of.addresses.items()) for of in found.values()}
    assert {role: len(of_role) for role, of_role in addresses} == {"chief": 1, "worker": 3, "ps": 2}
    assert [found["chief", 0].this.host, found["ps", 1].this.host] == [
        f"{host}.resnet" for host in SERVERS_OF_KINDS[kind]
    ]


def test_the_jobs_of_roles_are_as_large_as_the_roles():
    jobs = [of for of in documents("job", with_servers(max_restarts=7)) if of["kind"] == "Job"]
    assert {of["metadata"]["name"]: of["spec"]["completions"] for of in jobs} == {
        "resnet-chief": 1,
        "resnet-worker": 3,
        "resnet-ps": 2,
    }
    assert {of["spec"]["backoffLimitPerIndex"] for of in jobs} == {7}
    assert {of["spec"]["template"]["spec"]["subdomain"] for of in jobs} == {"resnet"}


def test_a_job_set_ends_with_its_chief_and_replaces_a_worker_alone():
    spec = of_kind("jobset", with_servers(max_restarts=7))["JobSet"]["spec"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["chief"]}
    jobs = {job["name"]: job["template"]["spec"] for job in spec["replicatedJobs"]}
    assert {role: job["completions"] for role, job in jobs.items()} == {"chief": 1, "worker": 3, "ps": 2}
    assert {role: job.get("backoffLimit") for role, job in jobs.items()} == {"chief": 0, "worker": None, "ps": 0}
    assert jobs["worker"]["backoffLimitPerIndex"] == 7
    validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": jobs["worker"]})


def test_the_operator_ends_with_the_chief():
    spec = of_kind("tfjob", with_servers(max_restarts=7))["TFJob"]["spec"]
    counts = {role: of["replicas"] for role, of in spec["tfReplicaSpecs"].items()}
    assert counts == {"Chief": 1, "Worker": 3, "PS": 2}
    assert "successPolicy" not in spec
    assert spec["runPolicy"]["backoffLimit"] == 43


@every_kind
def test_only_pods_of_the_ring_may_connect(kind):
    policy = of_kind(kind, ring())["NetworkPolicy"]["spec"]
    labels = pod_template(kind, ring())["metadata"]["labels"]
    assert labels["app.kubernetes.io/instance"] == "resnet"
    own = {"podSelector": {"matchLabels": labels}}
    assert policy == {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}]}


@every_kind
def test_a_pod_without_gpus_has_no_more_cores_than_it_requests(kind):
    """Its processes count the cores of the limit; without one they would count those of the node."""
    (container,) = pod_template(kind, ring(gpus_per_worker=0, cpus="4"))["spec"]["containers"]
    assert container["resources"]["limits"]["cpu"] == container["resources"]["requests"]["cpu"] == "4"


@every_kind
def test_the_fields_of_a_pod(kind):
    template = pod_template(kind, ring(gpus_per_worker=2, cpus="2.5", memory="16Gi", port=3333))
    (container,) = template["spec"]["containers"]
    # Kubeflow's operator requires these two names.
    assert container["name"] == "tensorflow"
    assert container["ports"] == [{"name": "tfjob-port", "containerPort": 3333}]
    assert container["resources"] == {
        "requests": {"cpu": "2.5", "memory": "16Gi"},
        "limits": {"memory": "16Gi", "nvidia.com/gpu": 2},
    }
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert volumes[mounted["/data"]]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert volumes[mounted["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    assert template["spec"]["terminationGracePeriodSeconds"] == binary.SECONDS_TO_SAVE
    assert template["spec"]["automountServiceAccountToken"] is False


@every_kind
def test_kubernetes_runs_the_command_as_it_was_typed(kind):
    command = (*ring().command, "$(HOME)", "$$", "$", "a$(", "--note=1e3")
    written = pod_template(kind, ring(command=command))["spec"]["containers"][0]["command"]
    assert tuple(expanded(word, {"HOME": "/root"}) for word in written) == command


def test_a_failed_worker_of_a_job_is_replaced():
    job = of_kind("job", ring(max_restarts=7))["Job"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 3, 3)
    assert (job["backoffLimitPerIndex"], job["maxFailedIndexes"]) == (7, 0)
    assert "backoffLimit" not in job
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    hopeless, disrupted = job["podFailurePolicy"]["rules"]
    assert hopeless["action"] == "FailJob"
    assert hopeless["onExitCodes"] == {"operator": "In", "values": [2, 3, 4]}
    assert disrupted["action"] == "Ignore"
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


def test_exit_codes_after_which_a_restart_may_succeed_are_not_final():
    """75: saved and interrupted; 5: a peer was lost; 1: an error, which may be the machine's."""
    (rule, _) = of_kind("job", ring())["Job"]["spec"]["podFailurePolicy"]["rules"]
    assert not {binary.INTERRUPTED, 1, 5} & set(rule["onExitCodes"]["values"])


def test_a_job_set_restarts_all_its_workers():
    job_set = of_kind("jobset", ring(max_restarts=7))["JobSet"]
    assert job_set["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert job_set["spec"]["failurePolicy"] == {
        "maxRestarts": 7,
        "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (replicated["name"], replicated["replicas"], job["backoffLimit"]) == ("worker", 1, 0)
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 3, 3)
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2, 3, 4])


def test_the_operator_restarts_a_failed_worker():
    job = of_kind("tfjob", ring(max_restarts=7))["TFJob"]
    assert job["apiVersion"] == "kubeflow.org/v1"
    (role, worker), *others = job["spec"]["tfReplicaSpecs"].items()
    assert (role, others, worker["replicas"], worker["restartPolicy"]) == ("Worker", [], 3, "OnFailure")
    assert job["spec"]["successPolicy"] == "AllWorkers"
    # The operator gives up when the restarts reach the limit: seven restarts of three workers must stay below it.
    assert job["spec"]["runPolicy"]["backoffLimit"] == 22
    # The operator sets both itself.
    (variable,) = worker["template"]["spec"]["containers"][0]["env"]
    assert variable["name"] == "TOWERS_SECRET"
    assert "restartPolicy" not in worker["template"]["spec"]
    assert worker["template"]["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}


@pytest.mark.parametrize("kind, longest", [("job", 60), ("jobset", 45), ("tfjob", 53)])
def test_a_name_is_short_enough_for_the_pods_host_names(kind, longest):
    """Host names have at most 63 letters; ten workers add '-9', eleven '-10'. JobSet limits pods' names too."""
    name = "n" * (longest + 1)
    assert documents(kind, ring(name=name, workers=10))
    with pytest.raises(UserError, match=f"too long by 1; .* at most {longest} letters") as error:
        documents(kind, ring(name=name, workers=11))
    assert f"--name={name}" in str(error.value)
    assert documents(kind, ring(name=name[1:], workers=11))


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_the_pods_names_fit_a_variable_of_the_environment(kind):
    with pytest.raises(UserError, match="--name=nnn.* bytes, but Linux allows .*; choose a shorter name or fewer"):
        documents(kind, with_servers(name="n" * 43, workers=1000, ps=1000))
    assert documents(kind, with_servers(name="clicks", workers=1000, ps=1000))
