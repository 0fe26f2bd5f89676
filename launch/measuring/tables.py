"""Writes the results as a Markdown table, and ratios between rows."""

import statistics
from collections.abc import Mapping, Sequence

from launch.measuring.case import NO_LINK
from launch.measuring.imitated_cpu import NO_ISA, in_words
from launch.measuring.results import CPU, FIRST_STEP, JITTER, MEMORY, PARTS, RATE, is_one_tower, same_work

_MIB = 2**20
_LARGE_RATE = 100
_RATE_HEAD = ("images/s", "min - max", "± error", "jitter")
_HEAD = ("case", "work", *_RATE_HEAD, "first step s", "memory MiB", "efficiency", *PARTS)

_KERNEL_HEAD = ("kernel", "precision", "in a run", "ours, CPU ms", "TensorFlow's", "ours / TensorFlow's")


def table(found: Mapping) -> list[str]:
    """The lines of a Markdown table with one row per case."""
    lines = [table_row(_HEAD), table_row(["---"] * len(_HEAD))]
    for one in with_rate(found):
        rate = one["figures"][RATE]
        lines.append(
            table_row(
                [
                    one["name"],
                    _work(one),
                    rate_text(rate["median"]),
                    f"{rate_text(rate['min'])} - {rate_text(rate['max'])}",
                    _written(rate["standard_error"], ".1f" if rate["median"] >= _LARGE_RATE else ".2g"),
                    _median(one, JITTER, ".1%"),
                    _median(one, FIRST_STEP, ".2f"),
                    _median(one, MEMORY, ".0f", divisor=_MIB),
                    _written(one["efficiency"], ".2f"),
                    *(_written(one["time"] and one["time"][part], ".1%") for part in PARTS),
                ]
            )
        )
    left_out = [f"{name}: not measured, {reason}" for name, reason in found.get("left_out", {}).items()]
    lines = lines if with_rate(found) else []
    return [*lines, *kernel_table(found), *(["", *left_out] if left_out else []), *in_words(found)]


def with_rate(found: Mapping) -> list[Mapping]:
    """The cases that measured a rate: all but the kernels."""
    return [one for one in found["cases"] if RATE in one["figures"]]


def kernel_table(found: Mapping) -> list[str]:
    """A table of our own kernels beside TensorFlow's, with medians over the rounds; [] if none was measured."""
    rows = []
    for one in found["cases"]:
        for of_rounds in zip(*(round_.get("kernels", ()) for round_ in one["rounds"]), strict=True):
            ours, theirs, ratio = (
                statistics.median(each[name] for each in of_rounds)
                for name in ("ours_ms", "tensorflow_ms", "ratio")
            )
            first = of_rounds[0]
            on = "on" if first["on"] else "off"
            cells = (first["kernel"], one["precision"], on, f"{ours:.3g}", f"{theirs:.3g}", f"{ratio:.2f}")
            rows.append(table_row(cells))
    return rows and [table_row(_KERNEL_HEAD), table_row(["---"] * len(_KERNEL_HEAD)), *rows]


def rate_text(rate: float) -> str:
    """Images per second with at least three digits: '367', '3.04'."""
    return format(rate, ".0f" if rate >= _LARGE_RATE else ".3g")


def _work(one: Mapping) -> str:
    """The work in short, without values 'none': 'resnet20, 256, 1gbit'."""
    parts = (one["network"], one["batch"], one["link"], one.get("isa", NO_ISA), one.get("flags", ""))
    return ", ".join(str(part) for part in parts if part not in (NO_LINK, NO_ISA, ""))


def table_row(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _written(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _median(one: Mapping, name: str, form: str, *, divisor: float = 1.0) -> str:
    found = one["figures"].get(name)
    return "" if found is None else format(found["median"] / divisor, form)


def ratios(found: Mapping) -> list[str]:
    """Lines with the ratios that have targets, such as our rows / each peer's row on the same work."""
    own = [one for one in with_rate(found) if not one["is_peer"]]
    peers = [one for one in with_rate(found) if one["is_peer"]]
    pairs = [(ours, peer) for peer in peers for ours in _beside(peer, own)]
    lines = [_ratio(ours, peer, RATE) for ours, peer in pairs]
    # Other programs on the same cores change the ratio of CPU times less than that of the rates.
    lines += [_ratio(peer, ours, CPU, "CPU time, ") for ours, peer in pairs if _have(CPU, ours, peer)]
    lines += [
        f"{one['name']}, loop time / step time: {one['figures']['loop_over_step']['median']:.4f}"
        for one in own
        if "loop_over_step" in one["figures"]
    ]
    alone = [one for one in own if is_one_tower(one)]
    lines += [_of_allowed(one, alone[0]) for one in own if alone and one.get("allowed_speedup")]
    return lines + _first_steps(own, alone)


def _first_steps(own: Sequence[Mapping], alone: Sequence[Mapping]) -> list[str]:
    """The time to the first step of the most towers beside that of one tower on the same work."""
    if not alone:
        return []
    towers = [one for one in own if one["strategy"] == "towers" and same_work(one, alone[0])]
    most = max(towers, key=lambda one: one["count"])
    if most is alone[0] or not _have(FIRST_STEP, most, alone[0]):
        return []
    return [_ratio(most, alone[0], FIRST_STEP, "time to first step, ")]


def _of_allowed(one: Mapping, alone: Mapping) -> str:
    """A pipeline's rate beside one device's, and the share of what the schedule's bubble allows."""
    quotient = one["figures"][RATE]["median"] / alone["figures"][RATE]["median"]
    allowed = one["allowed_speedup"]
    return (
        f"{one['name']} / {alone['name']}: {quotient:.2f}, {quotient / allowed:.0%} of the {allowed:.2f} that the "
        "bubble allows"
    )


def _beside(peer: Mapping, own: Sequence[Mapping]) -> Sequence[Mapping]:
    """Our rows to compare with a peer's: those of several processes with its count, else the first one."""
    ours = [one for one in own if all(one[field] == peer[field] for field in ("precision", "network", "link"))]
    return [one for one in ours if one["engine"] and one["count"] == peer["count"]] or ours[:1]


def _have(figure: str, *cases: Mapping) -> bool:
    return all(figure in one["figures"] for one in cases)


def _ratio(one: Mapping, other: Mapping, figure: str, what: str = "") -> str:
    quotient = one["figures"][figure]["median"] / other["figures"][figure]["median"]
    return f"{what}{one['name']} / {other['name']}: {quotient:.2f}"
