"""Writes the Kubernetes manifests, as YAML, that train on a ring of pods, or on pods with parameter servers.

    python -m launch.kubernetes --name=resnet --image=registry.example/towers:1 --workers=4 --volume_claim=runs \
        -- python -m launch.train --strategy=ring --directory=/data/run > resnet.yaml
    kubectl apply -f resnet.yaml

    python -m launch.kubernetes --name=clicks --image=registry.example/towers:1 --workers=4 --ps=2 \
        --volume_claim=runs -- python -m launch.train --strategy=ps --directory=/data/run > clicks.yaml
        adds a chief and two parameter servers

--kind=job (the default) writes an Indexed Job for each role with a Service and a NetworkPolicy, which need only
Kubernetes 1.29 or later. jobset and tfjob need the controller of that name. Every pod runs the command after --.
Kubernetes replaces a pod that ends with an error, and the training resumes from the run's checkpoint, so
--directory must be on the volume.
"""

import pathlib
import sys

from absl import flags

from launch import binary
from launch.flags.paths import define_path
from launch.manifests.cluster_of_command import HELP
from launch.manifests.kinds import KINDS, documents
from launch.manifests.pods import Pods
from launch.manifests.yaml_text import yaml_text
from towers.errors import UserError

FLAGS = flags.FLAGS

_COMMENT = """\
{described} as {kind}, written by python -m launch.kubernetes.

Start:   kubectl apply -f FILE
Watch:   kubectl{namespace} get pods -l {selector}
         kubectl{namespace} logs -f --prefix --max-log-requests={count} -l {selector}
Stop:    kubectl delete -f FILE      (the run is saved first, within {seconds} seconds)
Change:  stop, then start the new file: the pods of a running job can't be changed.

{restarts}

{volume}

This file holds the run's secret, which parameter servers ask of a process that connects: keep it private.

TensorFlow's server has no authentication: anyone who can connect to port {port} can run code in the pod. The
NetworkPolicy admits only the pods of this file, but only if the cluster's network enforces such policies: ask the
cluster's administrators."""

_VOLUME = (
    "The volume claim '{claim}' must be ReadWriteMany, unless all pods run on one node: every pod mounts\nit."
)
_NO_VOLUME = (
    "NO VOLUME: the run's directory is inside each pod and is lost with it, so a restart begins again at step 0."
)


def comment(kind: str, pods: Pods) -> str:
    """The comment at the top of the file, for the person who applies it."""
    restarts = KINDS[kind].restarts_with_servers if pods.has_servers else KINDS[kind].restarts
    return _COMMENT.format(
        kind=kind,
        described=pods.described[0].upper() + pods.described[1:],
        count=sum(pods.counts.values()),
        namespace=f" -n {pods.namespace}" if pods.namespace else "",
        selector=",".join(f"{name}={value}" for name, value in pods.labels.items()),
        seconds=binary.SECONDS_TO_SAVE,
        restarts=restarts.format(max_restarts=pods.max_restarts),
        volume=_VOLUME.format(claim=pods.volume_claim) if pods.volume_claim else _NO_VOLUME,
        port=pods.port,
    )


def pods_from_flags(command: list[str]) -> Pods:
    """The pods that the flags describe.

    Raises:
      UserError: Kubernetes would refuse a value, or a restarted command could not resume.
    """
    names = ("name", "image", "workers", "ps", "gpus_per_worker", "cpus", "memory", "namespace", "volume_claim")
    more = ("mount", "max_restarts", "port")
    return Pods(command=tuple(command), **{name: FLAGS[name].value for name in (*names, *more)})


def write(text: str, output: str | None) -> None:
    """Writes the text to the file `output`; None: to stdout.

    Raises:
      UserError: the file can't be written.
    """
    if output is None:
        sys.stdout.write(text)
        return
    try:
        path = pathlib.Path(output)
        # The text holds a secret. `touch` does not change an existing file's mode. A device's mode must stay.
        path.touch(mode=0o600)
        if path.is_file():
            path.chmod(0o600)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output={output}: {error.strerror}; choose a file in a writable folder") from error


def _define_flags() -> None:
    flags.DEFINE_enum(
        "kind",
        "job",
        tuple(KINDS),
        "Kubernetes resource that runs the pods: Indexed Jobs, a JobSet or a Kubeflow TFJob. jobset and tfjob "
        "need the controller of that name.",
    )
    flags.DEFINE_string("name", None, "Name of the job; the pods' names begin with it.", required=True)
    flags.DEFINE_string("image", None, "Container image in which this project is installed.", required=True)
    flags.DEFINE_integer("workers", None, "Number of workers; each is one pod.", required=True)
    flags.DEFINE_integer("ps", None, f"{HELP} Each is one more pod, and so is their chief.")
    flags.DEFINE_integer("gpus_per_worker", 1, "NVIDIA GPUs of each worker and of the chief; 0 for none.")
    flags.DEFINE_string("cpus", "4", "CPU cores requested per pod, e.g. 4 or 500m. Pods without GPUs get no more.")
    flags.DEFINE_string("memory", "8Gi", "Memory requested per pod, which is also its limit.")
    flags.DEFINE_string("namespace", None, "Kubernetes namespace. Default: kubectl's current one.")
    flags.DEFINE_string(
        "volume_claim",
        None,
        "PersistentVolumeClaim that every pod mounts at --mount. Without one, a restart begins again at step 0.",
    )
    flags.DEFINE_string("mount", "/data", "Path at which every pod mounts the volume.")
    flags.DEFINE_integer("max_restarts", 10, "Maximum restarts of each pod; 0: none.")
    flags.DEFINE_integer("port", 2222, "Port on which TensorFlow's server listens in each pod.")
    define_path("output", None, "File to write. Default: stdout.")


def main(arguments: list[str]) -> int:
    """Writes the manifests for the flags and the command."""
    pods = pods_from_flags(arguments[1:])
    write(yaml_text(documents(FLAGS.kind, pods), comment=comment(FLAGS.kind, pods)), FLAGS.output)
    if pods.volume_claim is None and pods.max_restarts:
        print(
            f"kubernetes: note: --directory={pods.directory} is inside the pods and is lost when they restart; "
            "mount a volume with --volume_claim",
            file=sys.stderr,
        )
    return binary.DONE


def cli() -> None:
    """Console script."""
    _define_flags()
    binary.run(main, takes_command=True, trains=False)


if __name__ == "__main__":
    cli()
