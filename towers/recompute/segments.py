"""Which parts of a model are computed again in the backward pass.

    blocks   the parts whose structure the model repeats: residual blocks, blocks of a transformer, convolutions
             with their batch norms
    full     all parts, except the last one: the backward pass begins with it, so its activations are there
    sqrt     about sqrt(n) segments of the model's n links, with equally many activations (Chen et al. 2016,
             arXiv:1604.06174), except the last one

In a model with a call() of its own only the layers are known: 'full' means each layer with weights, 'blocks' each
layer that has another one of the same structure. If such a layer is a functional model, it is divided too.

No part has both the frozen layers that a model begins with and layers that are trained. The backward pass ends
before it reaches the frozen layers, so these are computed once, and only their last result is kept.
"""

import collections
import dataclasses
import itertools
import math
import os
from collections.abc import Sequence

import keras
from keras.src.ops.operation import Operation

from towers.errors import UserError
from towers.recompute.chain import Link, finest, functional_form, links_of, opened

POLICIES = ("none", "blocks", "sqrt", "full")


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A part of a model's forward pass, from the begin of one call to the end of another one.

    Attributes:
      name: its name for the user.
      first, last: its first and last operation; the same for a single layer.
      first_number, last_number: which of their calls; None for every call of a single layer.
    """

    name: str
    first: Operation
    last: Operation
    first_number: int | None = None
    last_number: int | None = None


def check_recompute(recompute: str) -> None:
    """Raises UserError for an unknown policy."""
    if recompute not in POLICIES:
        raise UserError(f"recompute={recompute!r} is unknown: use one of {', '.join(POLICIES)}")


def segments_of(model: keras.Model, recompute: str) -> list[Segment]:
    """The parts to compute again; none for 'none'.

    Args:
      model: a built model.
      recompute: one of POLICIES.

    Raises:
      UserError: the model has no such parts.
    """
    if recompute == "none":
        return []
    functional = functional_form(model)
    found = _of_layers(model, recompute) if functional is None else _of_chain(links_of(functional), recompute)
    if not found and functional is not None and _begin_and_rest(finest(links_of(functional)))[0]:
        raise UserError(
            f"recompute={recompute!r}: model {model.name!r} has no such part after its first, frozen layers, "
            "which are computed once anyway; use recompute='none'"
        )
    if not found and recompute == "blocks":
        raise UserError(
            f"recompute='blocks': model {model.name!r} repeats no block; use one of full, sqrt, none instead"
        )
    if not found:
        raise UserError(
            f"recompute={recompute!r}: model {model.name!r} is one part, as nowhere a single tensor connects "
            "trained layers with trained layers after them; use recompute='none'"
        )
    return found


def shown(names: Sequence[str]) -> str:
    """The names in one line; only the first two and the last if there are more than four."""
    few = [*names[:2], "...", names[-1]] if len(names) > 4 else names
    return ", ".join(few)


def _of_chain(links: Sequence[Link], recompute: str) -> list[Segment]:
    if recompute == "sqrt":
        return [_segment(part) for part in _equal_parts(_begin_and_rest(finest(links))[1])[:-1]]
    _, trained = _begin_and_rest(_without_wrappers(links))
    return _chosen(_groups(trained), recompute, keeps_last=True)


def _begin_and_rest(links: Sequence[Link]) -> tuple[list[Link], list[Link]]:
    """The frozen layers that the chain begins with, and what follows, which begins with a link that is trained.

    Without frozen layers nothing is cut off: layers without weights may make large results of small inputs.
    """
    num = next((index for index, link in enumerate(links) if _weights(link)), 0)
    if not any(getattr(call.operation, "weights", ()) for link in links[:num] for call in link):
        num = 0
    return list(links[:num]), list(links[num:])


def _chosen(groups: Sequence[Sequence[Link]], recompute: str, *, keeps_last: bool = False) -> list[Segment]:
    """The groups to compute again."""
    counts = collections.Counter(map(_kind, groups))
    candidates = groups[:-1] if keeps_last else groups
    chosen = [one for one in candidates if recompute == "full" or (_kind(one) and counts[_kind(one)] > 1)]
    return [_segment(group) for group in chosen]


def _equal_parts(links: Sequence[Link]) -> list[list[Link]]:
    """The chain in about sqrt(n) parts of equal cost: a link belongs to the part that contains its middle."""
    costs = [sum(call.num_outputs for call in link) for link in links]
    num_parts = max(2, round(math.sqrt(len(links))))
    ends = itertools.accumulate(costs)
    parts = [int(num_parts * (end - cost / 2) / sum(costs)) for cost, end in zip(costs, ends, strict=True)]
    by_part = itertools.groupby(zip(parts, links, strict=True), key=lambda one: one[0])
    return [[link for _, link in found] for _, found in by_part]


def _without_wrappers(links: Sequence[Link]) -> list[Link]:
    """The chain, with every inner model opened that has no other of the same structure."""
    counts = collections.Counter(_kind([link]) for link in links)
    found = []
    for link in links:
        parts = opened(link)
        found += [link] if parts == [link] or counts[_kind([link])] > 1 else _without_wrappers(parts)
    return found


def _groups(links: Sequence[Link]) -> list[list[Link]]:
    """The links in groups that have weights. A group begins with a block or a layer that has a kernel."""
    found: list[list[Link]] = []
    for link in links:
        begins = _is_block(link) or _num_kernels(link) or (found and _is_block(found[-1][0]) and _weights(link))
        if not found or (begins and any(map(_weights, found[-1]))):
            found.append([])
        found[-1].append(link)
    return found


def _is_block(link: Link) -> bool:
    """Whether the link has an inner structure: several calls, an inner model, or a layer with several kernels."""
    return len(link) > 1 or bool(link[0].inner) or _num_kernels(link) > 1


def _weights(link: Link) -> list[keras.Variable]:
    return [variable for call in link for variable in getattr(call.operation, "trainable_weights", ())]


def _num_kernels(link: Link) -> int:
    return sum(len(variable.shape) > 1 for variable in _weights(link))


def _kind(group: Sequence[Link]) -> tuple:
    """Equal for groups of the same structure; links after a block and layers without weights don't count."""
    weighted = [link for link in group if _weights(link)]
    links = weighted[:1] if weighted and _is_block(weighted[0]) else weighted
    return tuple(call.kind for link in links for call in link)


def _segment(links: Sequence[Link]) -> Segment:
    calls = [call for link in links for call in link]
    named = next((call for call in calls if getattr(call.operation, "weights", ())), calls[0])
    first, last = calls[0], calls[-1]
    return Segment(_path(named.operation), first.operation, last.operation, first.number, last.number)


def _path(operation: Operation) -> str:
    """The path with the blocks around it, as in its weights' paths: 'block_0/mlp_norm'; else its name."""
    parents = [variable.path.split("/")[:-1] for variable in getattr(operation, "weights", ())]
    return "/".join(os.path.commonprefix(parents)) or operation.name


def _of_layers(model: keras.Model, recompute: str) -> list[Segment]:
    if recompute == "sqrt":
        raise UserError(
            f"recompute='sqrt': model {model.name!r} has a call() of its own, so the order of its layers is "
            "unknown; build it as keras.Model(inputs, outputs), or use recompute='blocks' or 'full'"
        )
    layers = [layer for layer in model._flatten_layers(include_self=False, recursive=False) if layer.weights]
    counts = collections.Counter(map(_structure, layers))
    found = []
    for layer in layers:
        form, repeats = functional_form(layer), counts[_structure(layer)] > 1
        if form is not None and not repeats:
            # A gradient may flow through its frozen layers to layers before it: then they are computed again.
            frozen, trained = _begin_and_rest(_without_wrappers(links_of(form)))
            found += _chosen([*([frozen] if frozen else []), *_groups(trained)], recompute)
        elif repeats or recompute == "full":
            found.append(Segment(layer.name, layer, layer))
    return found


def _structure(layer: keras.layers.Layer) -> tuple[str, ...]:
    form = functional_form(layer)
    inner = form.operations if form else ()
    return (type(layer).__name__, *(type(operation).__name__ for operation in inner))
