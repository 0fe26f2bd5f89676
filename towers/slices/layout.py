"""Which layers of a model are split over the devices of a tower, and how: the user's table, and defaults.

table       (("logits", "whole"), ("block_*/mlp_*", "columns"))     the first pattern that fits a layer's path
defaults    Dense by columns, or by rows if it reads the columns of another; Embedding by vocabulary;
            MultiHeadAttention by heads; convolutions by output channels, or input channels as Dense by rows
"""

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from towers.errors import UserError
from towers.parameters.placement import canonical_names, constraints_of
from towers.parameters.shards import Shard
from towers.slices.elementwise import feeder, is_elementwise
from towers.slices.splits import READS_PARTS_OF, SPLITS, VOCABULARY, WHOLE, Cut, cuts_of
from towers.tower import ModelVariables

Table = Sequence[tuple[str, str]]
NO_RULE = "no rule"
# Largest number of layers that one message names.
_MOST_LISTED = 12


@dataclasses.dataclass(frozen=True, eq=False)
class LayerSplit:
    """How a layer is split.

    Attributes:
      layer: the layer.
      path: its path in the model, 'block_0/mlp_up'; a repeated path gets the suffix of its parameters, 'up#2'.
      split: one of SPLITS.
      cut: what the split cuts; None for a layer that is whole.
      lengths: number of units of each slice; they differ by at most 1. Empty for a layer that is whole.
      reason: why a layer is whole.
    """

    layer: keras.layers.Layer
    path: str
    split: str
    cut: Cut | None = None
    lengths: tuple[int, ...] = ()
    reason: str = ""


class Layout:
    """The splits of a model's layers, and so of its parameters.

    Attributes:
      num_slices: number of devices of a tower.
      layers: the splits of all layers with parameters, in the model's order.
      names: canonical names of the parameters, in the model's order.
      cuts: the dimension and the lengths of the slices, by the index of a sliced parameter.
    """

    def __init__(self, model: keras.Model, num_slices: int, table: Table = ()):
        """Args:
        model: a built template.
        num_slices: number of devices of a tower, at least 2.
        table: pairs (pattern of layers' paths, split). The first pattern that fits a layer counts; other layers
          get the defaults. Patterns are as in `fnmatch`, so * is any text, slashes included.

        Raises:
          UserError: a pattern fits no layer that can be split in this way, a split is unknown, or a layer has
            fewer units than slices.
        """
        self.num_slices = num_slices
        variables = ModelVariables.of(model)
        self._parameters = variables.parameters
        self.names = canonical_names(variables.parameters)
        named = dict(zip(map(id, variables.parameters), self.names, strict=True))
        chosen = _Choice(_layers_of(model, named), table, num_slices, self._why_not(variables))
        self.layers = tuple(chosen.layers.values())
        self._owners = {id(variable): found for found in self.layers for variable in found.layer.variables}
        self.cuts: dict[int, tuple[int, tuple[int, ...]]] = {}
        for found in self.layers:
            for variable, dimension in found.cut.dimensions if found.cut else ():
                self.cuts[self.index(variable)] = (dimension, found.lengths)

    def index(self, variable: keras.Variable) -> int:
        """The index of a parameter."""
        return next(index for index, own in enumerate(self._parameters) if own is variable)

    def split_of(self, index: int) -> LayerSplit | None:
        """The split of the layer of a parameter; None if no layer owns it alone."""
        return self._owners.get(id(self._parameters[index]))

    def reader_of_parts(self, split: LayerSplit) -> LayerSplit | None:
        """The layer that reads the parts of this layer's outputs; None if they are gathered."""
        wanted = READS_PARTS_OF.get(split.split)
        for found in self.layers:
            if found.split == wanted and found.lengths == split.lengths and feeder(found.layer) is split.layer:
                return found
        return None

    def bytes_of(self, index: int) -> list[int]:
        """Bytes of a parameter on each of the devices."""
        template = self._parameters[index]
        of_all = math.prod(template.shape) * tf.as_dtype(template.dtype).size
        if index not in self.cuts:
            return [of_all] + [0] * (self.num_slices - 1)
        dimension, lengths = self.cuts[index]
        return [of_all // template.shape[dimension] * length for length in lengths]

    def shape(self, index: int) -> tuple[int, ...]:
        """The shape of a parameter."""
        return tuple(self._parameters[index].shape)

    def is_first_cut(self, index: int) -> bool:
        """Whether a parameter is the first that its layer's split cuts."""
        split = self.split_of(index)
        return bool(split and split.cut) and split.cut.dimensions[0][0] is self._parameters[index]

    def shards(self) -> list[Shard]:
        """The slices: slice i is owned by device i, a whole parameter by the first device."""
        found = []
        for index, name in enumerate(self.names):
            dimension, lengths = self.cuts.get(index, (None, ()))
            if dimension is None:
                found.append(Shard(name, 0))
            for owner, length in enumerate(lengths):
                begin = sum(lengths[:owner])
                found.append(Shard(name, owner, dimension, begin, begin + length))
        return found

    def _why_not(self, variables: ModelVariables) -> Mapping[int, str]:
        """By the id of a variable, why it must stay whole; variables that may be cut are not in it."""
        constrained = constraints_of(variables)
        described = zip(self.names, variables.parameters, strict=True)
        found = {
            id(variable): "its constraint needs the whole" for name, variable in described if name in constrained
        }
        return found | {id(variable): "it is not trained" for variable in variables.state}


class _Choice:
    """Chooses a split for each layer. A layer's default depends on the split of the layer that feeds it."""

    def __init__(self, layers: Mapping[str, keras.layers.Layer], table: Table, num_slices: int, why_not):
        self._num_slices, self._why_not = num_slices, why_not
        self._layers = layers
        self._asked = self._asked_of(table)
        self._paths = {id(layer): path for path, layer in layers.items()}
        self.layers: dict[str, LayerSplit] = {}
        for path in layers:
            self._choose(path)
        self.layers = {path: self.layers[path] for path in layers}

    def _choose(self, path: str) -> LayerSplit:
        if path not in self.layers:
            layer = self._layers[path]
            asked = self._asked.get(path)
            self.layers[path] = self._split_so(path, layer, asked) if asked else self._default(path, layer)
        return self.layers[path]

    def _default(self, path, layer) -> LayerSplit:
        cuts, reason = self._possible(layer)
        if not cuts:
            return LayerSplit(layer, path, WHOLE, reason=reason)
        split = next(iter(cuts))
        before = feeder(layer)
        if id(before) in self._paths and is_elementwise(getattr(before, "activation", None)):
            split = READS_PARTS_OF.get(self._choose(self._paths[id(before)]).split, split)
        if split not in cuts or cuts[split].units < self._num_slices:
            split = next(iter(cuts))
        if cuts[split].units < self._num_slices:
            reason = f"{_units(cuts[split], split)}, fewer than {self._num_slices} slices"
            return LayerSplit(layer, path, WHOLE, reason=reason)
        return self._split_so(path, layer, split)

    def _split_so(self, path, layer, split) -> LayerSplit:
        if split == WHOLE:
            return LayerSplit(layer, path, WHOLE, reason="the layout says so")
        cut = self._possible(layer)[0][split]
        if cut.units < self._num_slices:
            raise UserError(
                f"layout='{path}={split}': the layer has {_units(cut, split)}, fewer than {self._num_slices} "
                f"slices; use {path}={WHOLE}, or fewer slices"
            )
        least, more = divmod(cut.units, self._num_slices)
        lengths = tuple(least + (index < more) for index in range(self._num_slices))
        return LayerSplit(layer, path, split, cut, lengths)

    def _possible(self, layer) -> tuple[Mapping[str, Cut], str]:
        """The ways to split a layer, and if there are none, why."""
        cuts = cuts_of(layer)
        if not cuts:
            return {}, f"{NO_RULE} splits {type(layer).__name__}"
        for variable in {id(own) for cut in cuts.values() for own, _ in cut.dimensions}:
            if variable in self._why_not:
                return {}, self._why_not[variable]
        return cuts, ""

    def _asked_of(self, table: Table) -> dict[str, str]:
        """The split that the user's table asks for, by path."""
        asked: dict[str, str] = {}
        for pattern, split in table:
            if split not in SPLITS:
                raise UserError(
                    f"layout='{pattern}={split}': unknown split {split!r}; use one of {', '.join(SPLITS)}"
                )
            fitting = [path for path in self._layers if fnmatch.fnmatchcase(path, pattern)]
            if not fitting:
                raise UserError(
                    f"layout='{pattern}={split}': the pattern fits no layer with parameters; the model has "
                    f"{_listed(list(self._layers))}"
                )
            able = [path for path in fitting if split == WHOLE or split in self._possible(self._layers[path])[0]]
            if not able:
                raise UserError(f"layout='{pattern}={split}': {self._why_not_so(fitting[0])}")
            for path in able:
                asked.setdefault(path, split)
        return asked

    def _why_not_so(self, path: str) -> str:
        cuts, reason = self._possible(self._layers[path])
        kind = type(self._layers[path]).__name__
        able = (
            f"a {kind} can be split by {' or '.join(cuts)}; use one of these" if cuts else f"{reason}; use {WHOLE}"
        )
        return f"layer {path!r} can't be split this way: {able}"


def _units(cut: Cut, split: str) -> str:
    return f"{cut.units} {'ids' if split == VOCABULARY else split.replace('_', ' ')}"


def _listed(paths: Sequence[str]) -> str:
    """The paths for a message; of many, the first and their number."""
    if len(paths) <= _MOST_LISTED:
        return ", ".join(paths)
    return f"{', '.join(paths[:_MOST_LISTED])} and {len(paths) - _MOST_LISTED} more; show_layout=True lists them"


def _layers_of(model: keras.Model, names: Mapping[int, str]) -> dict[str, keras.layers.Layer]:
    """The layers that own parameters, by path; an attention counts as one layer.

    Args:
      model: the model.
      names: canonical names of the parameters, by id.
    """
    found: dict[str, keras.layers.Layer] = {}
    inner: set[int] = set()
    for layer in model._flatten_layers():
        if type(layer) is keras.layers.MultiHeadAttention:
            inner |= {id(part) for part in layer._flatten_layers(include_self=False)}
            found[_path_of(layer.variables[0], 2, names)] = layer
        elif id(layer) not in inner and layer._trainable_variables:
            found.setdefault(_path_of(layer._trainable_variables[0], 1, names), layer)
    return found


def _path_of(variable: keras.Variable, depth: int, names: Mapping[int, str]) -> str:
    """The path of the layer `depth` levels above a variable: models inside the model may repeat it."""
    number = names.get(id(variable), variable.path).removeprefix(variable.path)
    return variable.path.rsplit("/", depth)[0] + number
