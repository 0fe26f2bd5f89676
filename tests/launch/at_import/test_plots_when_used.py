"""Programs start without matplotlib, and plots are drawn all the same."""

import pytest

from tests.launch.programs import run

IMPORTED = "import launch, keras, sys; print('matplotlib' in sys.modules)\n"


@pytest.mark.full
def test_keras_draws_with_matplotlib_although_it_was_imported_without(tmp_path):
    program = IMPORTED + (
        "import numpy as np\n"
        "images = np.zeros((1, 4, 4, 3), np.uint8)\n"
        "keras.visualization.plot_image_gallery(images, value_range=(0, 255), path='plot.png')\n"
        "import matplotlib, matplotlib.pyplot as plots; print(matplotlib.pyplot is plots, bool(plots.__file__))\n"
    )
    done = run("-c", program, cwd=tmp_path)
    assert (done.code, done.out) == (0, "False\nTrue True\n"), done.err
    assert (tmp_path / "plot.png").stat().st_size > 0


@pytest.mark.full
def test_keras_hears_that_there_is_no_matplotlib(tmp_path):
    absent = "import importlib.util as u; find = u.find_spec\n"
    absent += "u.find_spec = lambda name, *rest: None if name == 'matplotlib' else find(name, *rest)\n"
    absent += "import sys; sys.modules['matplotlib.pyplot'] = None\n"
    program = (
        absent + "import launch, keras, numpy\nkeras.visualization.plot_image_gallery(numpy.zeros((1, 4, 4, 3)))\n"
    )
    done = run("-c", program, cwd=tmp_path)
    assert done.code == 1
    assert "ImportError" in done.err and "requires the `matplotlib`" in done.err
