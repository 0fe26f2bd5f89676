"""Lints and checks the format of the whole tree, with the settings in setup.cfg.

python -m tests.lint          prints ruff's findings; exit code 0 when there are none
python -m tests.lint --fix    fixes what ruff can fix
"""

import configparser
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main(fix: bool) -> int:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    rules = settings["tool:ruff"]
    shared = ["--isolated", f"--line-length={rules['line-length']}", f"--target-version={rules['target-version']}"]
    check = ["check", *shared, f"--select={rules['select']}", *(["--fix"] if fix else [])]
    layout = ["format", *shared, *([] if fix else ["--check"])]
    codes = [
        subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT).returncode
        for command in (check, layout)
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main("--fix" in sys.argv[1:]))
