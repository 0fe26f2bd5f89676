"""The offset of each record in TFRecord files: random access to a format made for sequential reading.

A record is  length: uint64 | its checksum: uint32 | data: length bytes | the data's checksum: uint32,  all
little-endian (tensorflow/core/lib/io/record_writer.h). One scan over the lengths finds all records without reading
their data.
"""

import dataclasses
import os
import struct
from collections.abc import Sequence

import numpy as np

from towers.errors import UserError

_LENGTH = struct.Struct("<Q")
_HEADER_BYTES = 12
_FOOTER_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordRange:
    """Records `skip` .. `skip + take - 1` of a TFRecord file.

    Attributes:
      path: a local file.
      skip: records before the first wanted one.
      take: number of wanted records.
    """

    path: str
    skip: int
    take: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RecordIndex:
    """Files and offsets of N records, in the order of their ranges.

    Attributes:
      paths: paths of the files.
      files: int32 [N], index in `paths` of each record's file.
      offsets: int64 [N], offset of each record's data in its file, in bytes.
      lengths: int64 [N], length of each record's data, in bytes.
    """

    paths: tuple[str, ...]
    files: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets)


def index_records(ranges: Sequence[RecordRange]) -> RecordIndex:
    """Finds the records of `ranges` by scanning the lengths in their files.

    Raises:
      UserError: a file cannot be read, ends within a record, or holds fewer records than its range.
    """
    files, offsets, lengths = [], [], []
    for file_index, wanted in enumerate(ranges):
        found = np.asarray(_scan(wanted), np.int64).reshape(-1, 2)[wanted.skip :]
        files.append(np.full(len(found), file_index, np.int32))
        offsets.append(found[:, 0])
        lengths.append(found[:, 1])
    return RecordIndex(
        paths=tuple(wanted.path for wanted in ranges),
        files=np.concatenate(files),
        offsets=np.concatenate(offsets),
        lengths=np.concatenate(lengths),
    )


def _scan(wanted: RecordRange) -> list[tuple[int, int]]:
    """(offset, length) in bytes of the data of the first skip + take records of a file."""
    try:
        with open(wanted.path, "rb", buffering=0) as file:
            return _scan_descriptor(wanted, file.fileno())
    except OSError as error:
        raise UserError(
            f"{wanted.path}: {error.strerror}: "
            "record files must be readable local files; copy them to a local disk"
        ) from error


def _scan_descriptor(wanted: RecordRange, descriptor: int) -> list[tuple[int, int]]:
    found, position, size = [], 0, os.fstat(descriptor).st_size
    while len(found) < wanted.skip + wanted.take:
        header = os.pread(descriptor, _HEADER_BYTES, position)
        length = _LENGTH.unpack_from(header)[0] if len(header) == _HEADER_BYTES else 0
        end = position + _HEADER_BYTES + length + _FOOTER_BYTES
        if len(header) < _HEADER_BYTES or end > size:
            raise UserError(
                f"{wanted.path}: ends at byte {size}, inside record {len(found)} of "
                f"{wanted.skip + wanted.take}: "
                "the file is incomplete or not a TFRecord file; copy or prepare it again"
            )
        found.append((position + _HEADER_BYTES, length))
        position = end
    return found
