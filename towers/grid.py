"""A grid of devices with named axes: which devices form a tower, and which towers divide a batch.

data:2,stage:3      device 0 1 2 | 3 4 5      two towers of three stages each
                    tower  0         1
"""

import dataclasses
import math

from towers.errors import UserError

DATA, STAGE, SLICE, BRANCH = "data", "stage", "slice", "branch"
AXES = (DATA, STAGE, SLICE, BRANCH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Sizes of the axes.

    Attributes:
      data: number of towers, which divide each batch.
      stage: number of devices of a tower, each with some layers of the model.
      slice: number of devices of a tower, each with a slice of the layers.
      branch: number of devices of a tower, each with some branches of the model's blocks.

    Raises:
      UserError: a size is below 1, or more than one of stage, slice and branch is above 1.
    """

    data: int = 1
    stage: int = 1
    slice: int = 1
    branch: int = 1

    def __post_init__(self):
        of_tower = (self.stage, self.slice, self.branch)
        if min(self.data, *of_tower) < 1:
            raise UserError(f"grid='{self}': each axis must be at least 1")
        if sum(size > 1 for size in of_tower) > 1:
            raise UserError(
                f"grid='{self}': a tower has stages, slices or branches; omit all but one of these axes"
            )

    @classmethod
    def parse(cls, text: str) -> "Grid":
        """The grid of 'data:2,stage:3'; an axis that is not named has size 1.

        Raises:
          UserError: `text` has another form, names an axis twice, or gives a size below 1.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            axis, _, size = part.strip().partition(":")
            if axis not in AXES or axis in sizes or not size.isdecimal():
                raise UserError(f"grid={text!r}: give each axis once, of {', '.join(AXES)}, as in data:2,stage:2")
            sizes[axis] = int(size)
        return cls(**sizes)

    @property
    def num_devices(self) -> int:
        return math.prod((self.data, self.stage, self.slice, self.branch))

    def groups(self, devices: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """The devices of each tower, in the order of stages, slices or branches.

        Raises:
          UserError: there are more or fewer devices than the grid has.
        """
        if len(devices) != self.num_devices:
            raise UserError(
                f"grid='{self}' needs {self.num_devices} devices, but there are {len(devices)}: the sizes of axes "
                "must multiply to the number of devices"
            )
        size = self.num_devices // self.data
        return tuple(devices[first : first + size] for first in range(0, len(devices), size))

    def __str__(self) -> str:
        named = [(axis, getattr(self, axis)) for axis in AXES]
        return ",".join(f"{axis}:{size}" for axis, size in named if size != 1) or f"{DATA}:1"
