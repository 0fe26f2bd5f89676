"""A program whose caller closed its streams runs, and no file gets a stream's number."""

import subprocess
import sys

import pytest

from tests.launch.programs import LIMIT_SECONDS, environment

STREAMS = """
import launch
with open('out.txt', 'w') as out:
    print('to nobody', flush=True)
    out.write(f'{out.fileno() > 2} ')
"""
TENSORFLOW = """
import tensorflow, towers
towers.configure_devices(num_towers=1)
open('out.txt', 'a').write('done')
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "closed, program, written",
    [("2>&-", STREAMS, "True "), (">&-", STREAMS, "True "), ("<&- >&- 2>&-", STREAMS + TENSORFLOW, "True done")],
)
def test_a_program_runs(closed, program, written, tmp_path):
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program],
        cwd=tmp_path,
        env=environment(),
        timeout=LIMIT_SECONDS,
    )
    assert (done.returncode, (tmp_path / "out.txt").read_text()) == (0, written)
