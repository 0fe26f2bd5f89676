"""Describes the pods of a cluster: their roles and number, image, resources, volume and command."""

import dataclasses
import pathlib
import posixpath
import re
import secrets
from collections.abc import Mapping

from launch.flags.flag_in_command import check_resumes, flag_value
from launch.manifests.cluster_of_command import check_cluster, num_servers
from strategies.cluster import CHIEF, SERVER, WORKER
from towers.errors import UserError

# TF_CONFIG names every pod, see MAX_TF_CONFIG_BYTES.
MAX_WORKERS = MAX_SERVERS = 1000
MAX_RESTARTS = 1000
SHARED_MEMORY = "/dev/shm"

# A label of RFC 1123 has at most 63 letters; some names are several labels joined by dots.
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DOTTED_LABELS = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_CPUS = re.compile(r"[0-9]+(\.[0-9]{1,3})?|[0-9]+m")
# A unit is required: Kubernetes reads a plain 8 as eight bytes, and 8m as thousandths of a byte.
_MEMORY = re.compile(r"[0-9]+(\.[0-9]+)?[MGT]i?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pods:
    """The processes of one cluster, each in its own pod: the workers of a ring, or chief, servers and workers.

    Attributes:
      name: name of the job; the pods' names begin with it.
      image: container image in which this project is installed.
      workers: number of workers.
      command: words of the command that each pod runs.
      ps: number of parameter servers; with any, there is a chief too. None: what the command needs.
      gpus_per_worker: NVIDIA GPUs of each worker and of the chief; may be 0.
      cpus: cores requested per pod, e.g. '4', '2.5' or '500m'; the limit of pods without GPUs.
      memory: memory requested per pod and its limit, e.g. '8Gi'.
      namespace: Kubernetes namespace; None for kubectl's current one.
      volume_claim: PersistentVolumeClaim that every pod mounts at `mount`; None for no volume.
      mount: path of the volume in a pod.
      max_restarts: maximum restarts of each pod, and so of the cluster.
      port: port that TensorFlow's server listens on.
      secret: text that a process must have to connect to parameter servers; drawn at random for each object.

    Raises:
      UserError: Kubernetes would refuse a value, or a restarted run could not resume.
    """

    name: str
    image: str
    workers: int
    command: tuple[str, ...]
    ps: int | None = None
    gpus_per_worker: int = 1
    cpus: str = "4"
    memory: str = "8Gi"
    namespace: str | None = None
    volume_claim: str | None = None
    mount: str = "/data"
    max_restarts: int = 10
    port: int = 2222
    secret: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16), repr=False)

    def __post_init__(self):
        self._check_names()
        self._check_numbers()
        self._check_quantities()
        self._check_mount()
        self._check_command()

    @property
    def labels(self) -> dict[str, str]:
        """Labels that only these pods have."""
        return {"app.kubernetes.io/name": "towers", "app.kubernetes.io/instance": self.name}

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of pods of each role that the cluster has."""
        servers = num_servers(self.command, self.ps)
        return {CHIEF: 1, WORKER: self.workers, SERVER: servers} if servers else {WORKER: self.workers}

    @property
    def has_servers(self) -> bool:
        return SERVER in self.counts

    @property
    def described(self) -> str:
        """The processes in words."""
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        servers = self.counts.get(SERVER, 0)
        if not servers:
            return f"a ring of {workers}"
        return f"a chief, {servers} parameter server{'' if servers == 1 else 's'} and {workers}"

    @property
    def metadata(self) -> dict[str, object]:
        """The metadata of every document."""
        namespace = {"namespace": self.namespace} if self.namespace else {}
        return {"name": self.name, **namespace, "labels": self.labels}

    @property
    def directory(self) -> str:
        """The run's directory, from the command; '' if the command names none."""
        return flag_value(self.command, "directory") or ""

    def _check_names(self):
        # This is also the name of the Service, which must begin with a letter.
        if not _LABEL.fullmatch(self.name) or not self.name[0].isalpha():
            raise UserError(
                f"--name={self.name}: a name has at most 63 lower-case letters, digits and '-', begins with a "
                "letter and does not end with '-'; choose a name such as resnet-run"
            )
        if self.namespace is not None and not _LABEL.fullmatch(self.namespace):
            raise UserError(
                f"--namespace={self.namespace}: a namespace has at most 63 lower-case letters, digits and '-'; "
                "give one that 'kubectl get namespaces' lists"
            )
        if not _IMAGE.fullmatch(self.image):
            raise UserError(
                f"--image={self.image}: not a valid image name; give a name such as registry.example/towers:1"
            )
        claim = self.volume_claim
        if claim is not None and not (_DOTTED_LABELS.fullmatch(claim) and len(claim) <= 253):
            raise UserError(
                f"--volume_claim={claim}: a claim's name has at most 253 lower-case letters, digits, '-' and '.'; "
                "give one that 'kubectl get pvc' lists"
            )

    def _check_numbers(self):
        allowed = (
            ("workers", self.workers, 1, MAX_WORKERS),
            ("ps", self.counts.get(SERVER, 0), 0, MAX_SERVERS),
            ("gpus_per_worker", self.gpus_per_worker, 0, 64),
            ("max_restarts", self.max_restarts, 0, MAX_RESTARTS),
            ("port", self.port, 1, 65535),
        )
        for flag, value, least, most in allowed:
            if not least <= value <= most:
                raise UserError(f"--{flag}={value} is out of range; give a number from {least} to {most}")

    def _check_quantities(self):
        if not (_CPUS.fullmatch(self.cpus) and float(self.cpus.rstrip("m")) > 0):
            raise UserError(f"--cpus={self.cpus}: must be a number of cores above 0, e.g. 4, 2.5 or 500m")
        if not (_MEMORY.fullmatch(self.memory) and float(self.memory.rstrip("MGTi")) > 0):
            raise UserError(f"--memory={self.memory}: must be above 0 with the unit Mi, Gi or Ti, e.g. 8Gi")

    def _check_mount(self):
        plain = posixpath.normpath(self.mount) in (self.mount, self.mount.rstrip("/"))
        if not plain or not self.mount.startswith("/") or self.mount.strip("/") == "" or ":" in self.mount:
            raise UserError(
                f"--mount={self.mount}: must be an absolute path other than /, without '..' and ':', e.g. /data"
            )
        if self.mount.rstrip("/") == SHARED_MEMORY:
            raise UserError(
                f"--mount={self.mount}: this is the pod's shared memory, which NCCL needs; choose e.g. /data"
            )

    def _check_command(self):
        if not self.command:
            raise UserError(
                "no command for the pods; add it after --, e.g. -- python -m launch.train --strategy=ring "
                "--directory=/data/run"
            )
        for word in self.command:
            if any("\ud800" <= letter <= "\udfff" for letter in word):
                raise UserError(
                    f"the command's word {word!a} is not valid UTF-8, so YAML can't contain it; "
                    "put the command into a script in the image"
                )
        check_cluster(self.command, sum(self.counts.values()), f"--workers={self.workers}")
        if self.max_restarts:
            check_resumes(self.command, "a restarted pod")
        if not self.directory:
            raise UserError(
                "the command has no --directory, in which a restarted worker finds its checkpoint; "
                f"add a folder on the mounted volume, e.g. --directory={posixpath.join(self.mount, 'run')}"
            )
        if self.volume_claim is not None and not _lies_in(self.directory, self.mount):
            raise UserError(
                f"--directory={self.directory} is not on the volume at --mount={self.mount}, so a restarted "
                "worker would not find it; "
                f"give a folder on the volume, e.g. --directory={posixpath.join(self.mount, 'run')}"
            )


def _lies_in(path: str, folder: str) -> bool:
    return pathlib.PurePosixPath(posixpath.normpath(path)).is_relative_to(folder)
