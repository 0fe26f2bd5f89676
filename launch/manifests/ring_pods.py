"""What the pods of a ring are: how many, of which image, with what, running which command."""

import dataclasses
import itertools
import pathlib
import posixpath
import re
from collections.abc import Sequence

from towers.errors import UserError

# Linux passes no variable above 128 KiB, and TF_CONFIG names every worker.
MAX_WORKERS = 1000
MAX_RESTARTS = 1000

# RFC 1123's label, of at most 63 letters, and several of them joined by dots.
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DOTTED_LABELS = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_CPUS = re.compile(r"[0-9]+(\.[0-9]{1,3})?|[0-9]+m")
# Kubernetes takes a plain 8 for eight bytes, and 8m for thousandths of one.
_MEMORY = re.compile(r"[0-9]+(\.[0-9]+)?[MGT]i?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingPods:
    """The workers of one ring, each a pod.

    Attributes:
      name: of the whole; the pods' names begin with it.
      image: the container image, with this package in it.
      workers: how many pods.
      command: what each of them runs, word by word.
      gpus_per_worker: NVIDIA GPUs of a pod; may be 0.
      cpus: cores promised to a pod, as '4', '2.5' or '500m'.
      memory: a pod's memory, at most and promised, as '8Gi'.
      namespace: None for the one kubectl is set to.
      volume_claim: a PersistentVolumeClaim that all pods see at `mount`; None for none.
      mount: the folder of the volume within a pod.
      max_restarts: how often each worker may be begun anew, and so the ring.
      port: that TensorFlow's server listens on.

    Raises:
      UserError: a value that Kubernetes would refuse, or a run that a restart could not go on with.
    """

    name: str
    image: str
    workers: int
    command: tuple[str, ...]
    gpus_per_worker: int = 1
    cpus: str = "4"
    memory: str = "8Gi"
    namespace: str | None = None
    volume_claim: str | None = None
    mount: str = "/data"
    max_restarts: int = 10
    port: int = 2222

    def __post_init__(self):
        self._check_names()
        self._check_numbers()
        self._check_quantities()
        self._check_mount()
        self._check_command()

    @property
    def labels(self) -> dict[str, str]:
        """What these pods have and no others."""
        return {"app.kubernetes.io/name": "towers", "app.kubernetes.io/instance": self.name}

    @property
    def metadata(self) -> dict[str, object]:
        """Of every document."""
        place = {"namespace": self.namespace} if self.namespace else {}
        return {"name": self.name, **place, "labels": self.labels}

    @property
    def directory(self) -> str:
        """Where the command keeps its checkpoints."""
        return flag_value(self.command, "directory") or ""

    def _check_names(self):
        # The name of a Service, which this is too, begins with a letter.
        if not _LABEL.fullmatch(self.name) or not self.name[0].isalpha():
            raise UserError(
                f"--name={self.name}: small letters, digits and '-', at most 63, a letter first and no '-' last; "
                "give one as resnet-run"
            )
        if self.namespace is not None and not _LABEL.fullmatch(self.namespace):
            raise UserError(
                f"--namespace={self.namespace}: small letters, digits and '-', at most 63; "
                "name one that 'kubectl get namespaces' lists"
            )
        if not _IMAGE.fullmatch(self.image):
            raise UserError(f"--image={self.image}: no name of an image; give one as registry.example/towers:1")
        claim = self.volume_claim
        if claim is not None and not (_DOTTED_LABELS.fullmatch(claim) and len(claim) <= 253):
            raise UserError(
                f"--volume_claim={claim}: small letters, digits, '-' and '.'; "
                "name a claim that 'kubectl get pvc' lists"
            )

    def _check_numbers(self):
        allowed = (
            ("workers", self.workers, 1, MAX_WORKERS),
            ("gpus_per_worker", self.gpus_per_worker, 0, 64),
            ("max_restarts", self.max_restarts, 0, MAX_RESTARTS),
            ("port", self.port, 1, 65535),
        )
        for flag, value, least, most in allowed:
            if not least <= value <= most:
                raise UserError(f"--{flag}={value}: give a number from {least} to {most}")

    def _check_quantities(self):
        if not (_CPUS.fullmatch(self.cpus) and float(self.cpus.rstrip("m")) > 0):
            raise UserError(f"--cpus={self.cpus}: cores above 0 are needed; give 4, 2.5 or 500m")
        if not (_MEMORY.fullmatch(self.memory) and float(self.memory.rstrip("MGTi")) > 0):
            raise UserError(f"--memory={self.memory}: give an amount above 0 with Mi, Gi or Ti, as 8Gi")

    def _check_mount(self):
        plain = posixpath.normpath(self.mount) in (self.mount, self.mount.rstrip("/"))
        if not plain or not self.mount.startswith("/") or self.mount.strip("/") == "" or ":" in self.mount:
            raise UserError(f"--mount={self.mount}: a whole path without ':' is needed; give it as /data")

    def _check_command(self):
        if not self.command:
            raise UserError("no command: put it behind --, as -- python -m launch.train --directory=/data/run")
        for word in self.command:
            if any("\ud800" <= letter <= "\udfff" for letter in word):
                raise UserError(
                    f"the command's {word!a} is no UTF-8, which YAML is; put it into a script in the image"
                )
        if not self.directory:
            raise UserError(
                "the command has no --directory, where a restarted worker must find its checkpoint; "
                f"name one on the mounted volume, as --directory={posixpath.join(self.mount, 'run')}"
            )
        if self.volume_claim is not None and not _lies_in(self.directory, self.mount):
            raise UserError(
                f"--directory={self.directory}: a restarted worker finds only what lies on the volume, "
                f"at --mount={self.mount}; name one in there"
            )


def flag_value(command: Sequence[str], name: str) -> str | None:
    """What absl takes for a flag of the command, which is the last one given; None if there is none."""
    found = None
    for word, following in itertools.zip_longest(command, command[1:]):
        flag, is_joined, value = word.partition("=")
        if flag in (f"--{name}", f"-{name}"):
            found = value if is_joined else following
    return found


def _lies_in(path: str, folder: str) -> bool:
    return pathlib.PurePosixPath(posixpath.normpath(path)).is_relative_to(folder)
