"""A module is imported inside its context managers, whichever module imports it first."""

import contextlib
import copy
import importlib
import importlib.util
import sys

from launch.at_import.around_import import around_import


def test_several_are_around_one_import(tmp_path, monkeypatch):
    (tmp_path / "imported_inside.py").write_text("import sys\nsys.seen.append('module')\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    monkeypatch.setattr(sys, "seen", seen, raising=False)

    def around(name):
        @contextlib.contextmanager
        def entered(module):
            seen.append(f"{name} before {module.__name__}")
            yield
            seen.append(f"{name} after")

        return entered

    around_import("imported_inside", around("first"))
    around_import("imported_inside", around("second"))
    assert importlib.util.find_spec("imported_inside") is not None, "somebody only asks whether it is there"
    module = importlib.import_module("imported_inside")
    assert copy.copy(module.__spec__.loader).get_source("imported_inside").startswith("import sys")
    del sys.modules["imported_inside"]
    begun = ["second before imported_inside", "first before imported_inside"]
    assert seen == [*begun, "module", "first after", "second after"]
