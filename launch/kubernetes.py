"""Writes what Kubernetes needs to train on a ring of pods, as YAML.

    python -m launch.kubernetes --name=resnet --image=registry.example/towers:1 --workers=4 --volume_claim=runs \
        -- python -m launch.train --strategy=ring --directory=/data/run > resnet.yaml
    kubectl apply -f resnet.yaml

--kind=job (the default) is an Indexed Job with a Service and a NetworkPolicy, and needs nothing but Kubernetes
1.29; jobset and tfjob need the controllers of that name. What is behind -- runs in every pod. A pod that ends with
an error is made anew and goes on from the run's checkpoint, so --directory must lie on the volume.
"""

import pathlib
import sys

from absl import flags

from launch import binary
from launch.manifests.kinds import KINDS, documents
from launch.manifests.pod_template import SECONDS_TO_SAVE
from launch.manifests.ring_pods import RingPods
from launch.manifests.yaml_text import yaml_text
from towers.errors import UserError

FLAGS = flags.FLAGS

_COMMENT = """\
A ring of {workers} workers as {kind}, written by python -m launch.kubernetes.

Start:   kubectl apply -f FILE
Look:    kubectl{place} get pods -l {selector}
         kubectl{place} logs -f --prefix --max-log-requests={workers} -l {selector}
Stop:    kubectl delete -f FILE      (each worker saves first; it has {seconds} seconds)
Change:  stop, then start the new file: a running job's pods can't be changed.

{restarts}

{volume}

TensorFlow's server has no authentication: whoever reaches port {port} can run code in the pod. The NetworkPolicy
lets in only the pods of this ring. It holds only where the cluster's network enforces such policies: ask whoever
runs it."""

_VOLUME = (
    "The claim {claim} must be ReadWriteMany, unless all pods run on one node: every worker reads the checkpoints."
)
_NO_VOLUME = (
    "NO VOLUME: the run's directory lies in each pod and is lost with it, so that a restart begins at step 0."
)


def comment(kind: str, ring: RingPods) -> str:
    """What stands above the documents, for whoever applies them."""
    return _COMMENT.format(
        kind=kind,
        workers=ring.workers,
        place=f" -n {ring.namespace}" if ring.namespace else "",
        selector=",".join(f"{name}={value}" for name, value in ring.labels.items()),
        seconds=SECONDS_TO_SAVE,
        restarts=KINDS[kind].restarts.format(max_restarts=ring.max_restarts),
        volume=_VOLUME.format(claim=ring.volume_claim) if ring.volume_claim else _NO_VOLUME,
        port=ring.port,
    )


def ring_from_flags(command: list[str]) -> RingPods:
    """The pods that the flags describe.

    Raises:
      UserError: a value that Kubernetes would refuse, or a command that could not be resumed.
    """
    names = ("name", "image", "workers", "gpus_per_worker", "cpus", "memory", "namespace", "volume_claim")
    more = ("mount", "max_restarts", "port")
    return RingPods(command=tuple(command), **{name: FLAGS[name].value for name in (*names, *more)})


def write(text: str, output: str | None) -> None:
    """To a file, or to stdout for None.

    Raises:
      UserError: the file can't be written.
    """
    if output is None:
        sys.stdout.write(text)
        return
    try:
        pathlib.Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output={output}: {error.strerror}; give a file that can be written") from error


def _define_flags() -> None:
    flags.DEFINE_enum("kind", "job", tuple(KINDS), "What the ring is asked for as.")
    flags.DEFINE_string("name", None, "Name of the job; its pods' names begin with it.", required=True)
    flags.DEFINE_string("image", None, "Container image with this package in it.", required=True)
    flags.DEFINE_integer("workers", None, "Pods of the ring.", required=True)
    flags.DEFINE_integer("gpus_per_worker", 1, "NVIDIA GPUs of a pod; 0 for none.")
    flags.DEFINE_string("cpus", "4", "Cores promised to a pod, as 4 or 500m.")
    flags.DEFINE_string("memory", "8Gi", "Memory of a pod.")
    flags.DEFINE_string("namespace", None, "Namespace; default: the one kubectl is set to.")
    flags.DEFINE_string("volume_claim", None, "PersistentVolumeClaim that all pods see at --mount.")
    flags.DEFINE_string("mount", "/data", "Folder of the volume in a pod.")
    flags.DEFINE_integer("max_restarts", 10, "How often each worker may be begun anew.")
    flags.DEFINE_integer("port", 2222, "Port of TensorFlow's server.")
    flags.DEFINE_string("output", None, "File to write; default: stdout.")


def main(arguments: list[str]) -> int:
    """Writes the YAML of the flags and the command."""
    ring = ring_from_flags(arguments[1:])
    write(yaml_text(documents(FLAGS.kind, ring), comment=comment(FLAGS.kind, ring)), FLAGS.output)
    if ring.volume_claim is None and ring.max_restarts:
        print(
            f"kubernetes: note: --directory={ring.directory} lies in the pods and is lost when they restart; "
            "give --volume_claim",
            file=sys.stderr,
        )
    return binary.DONE


def cli() -> None:
    """Console script."""
    _define_flags()
    binary.run(main, takes_command=True)


if __name__ == "__main__":
    cli()
