"""Every Python example in the README runs unchanged, and is shorter than 30 lines; links lead somewhere."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.tiers import first_quick

ROOT = pathlib.Path(__file__).resolve().parent.parent
READMES = [ROOT / name for name in ("README.md", "strategies/README.md", "launch/measuring/README.md")]
EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def first_line(example: str) -> str:
    return example.splitlines()[0].lstrip("# ")


def test_there_are_examples():
    assert len(EXAMPLES) >= 2


@pytest.mark.timeout(180)
@pytest.mark.parametrize("example", first_quick(EXAMPLES), ids=list(map(first_line, EXAMPLES)))
def test_example_runs(example, tmp_path):
    assert len(example.strip().splitlines()) < 30
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # Each example prints its accuracy, which shows that the model learns.
    accuracy = float(re.search(r"accuracy\D+([0-9.]+)", done.stdout).group(1))
    assert accuracy > 0.9


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors of a page: its headings, as GitHub spells them, and the ids that it defines."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}"
