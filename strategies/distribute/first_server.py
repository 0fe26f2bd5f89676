"""The functions by which graphs and the chief use server 0's table of claims."""

import json
import math
from collections.abc import Callable

import numpy as np

from strategies.distribute.claims import Claims
from strategies.distribute.closure import FIGURES


def functions(claims: Claims) -> dict[str, Callable]:
    """The host functions of server 0, by name. Texts between processes are JSON."""

    def begin(text):
        claims.begin(**json.loads(text))
        return np.bool_(True)

    def claim(run, number, since, figures):
        named = dict(zip(FIGURES, figures.tolist(), strict=False))
        return claims.claim(
            run.decode(), int(number), int(since), bool(named["finite"]), worker=int(named["worker"])
        )

    def count(run, number, figures):
        named = dict(zip(FIGURES, figures.tolist(), strict=False))
        worker = f"worker:{int(named.pop('worker'))}"
        named |= {
            "examples": int(named["examples"]),
            "finite": bool(named["finite"]),
            "stop_asked": bool(named["stop_asked"]),
            "norm": named["norm"] if math.isfinite(named["norm"]) else math.nan,
            "others": figures[len(FIGURES) :].tolist(),
        }
        return np.int64(claims.count(run.decode(), int(number), worker, named))

    return {
        "begin": begin,
        "plan": lambda first, count: np.array(claims.plan(int(first), int(count)), np.int64),
        "claim": lambda *given: _as_arrays(claim(*given)),
        "count": count,
        "progress": lambda: json.dumps(claims.progress()).encode(),
        "open_steps": lambda end: json.dumps(claims.open_steps(int(end))).encode(),
        "lost": lambda text: json.dumps(claims.lost(json.loads(text))).encode(),
        "totals": lambda: json.dumps(claims.totals()).encode(),
        "report": lambda: json.dumps(claims.report()).encode(),
    }


def _as_arrays(found):
    allowed, updates = found
    return np.bool_(allowed), np.int64(updates)
