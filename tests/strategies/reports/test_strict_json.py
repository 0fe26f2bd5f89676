"""JSON that strict readers accept."""

import json
import math
import pathlib

import numpy as np
import pytest

from strategies.reports.strict_json import dumps


def test_numbers_that_are_not_finite_are_null_and_those_of_numpy_are_numbers():
    value = {
        "a": [math.nan, -math.inf, 1.5],
        "b": np.float32("nan"),
        "c": np.int64(3),
        "d": (np.True_,),
    }
    found = json.loads(dumps(value | {"path": pathlib.Path("x")}), parse_constant=pytest.fail)
    assert found == {"a": [None, None, 1.5], "b": None, "c": 3, "d": [True], "path": "x"}
