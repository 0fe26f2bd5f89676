"""The script packs what every part said, also of one that fails or hangs. (This needs no GPU.)"""

import json
import tarfile

from tests.gpu.prove import Part, prove


def test_all_outputs_are_packed_whatever_fails(tmp_path):
    output = tmp_path / "proof.tar.gz"
    said = [
        Part("good", ("-c", "print('fine')"), 60.0),
        Part("bad", ("-c", "import sys; print('broken'); sys.exit(3)"), 60.0),
        Part("late", ("-c", "import time; print('begun', flush=True); time.sleep(600)"), 2.0),
    ]
    assert prove(output, ["/physical_device:GPU:0"], lambda folder: said) == 1
    with tarfile.open(output) as packed:
        text = {
            name: packed.extractfile(f"gpu-proof/{name}.txt").read().decode() for name in ("good", "bad", "late")
        }
        report = json.load(packed.extractfile("gpu-proof/report.json"))
    assert [text[name].strip() for name in ("good", "bad", "late")] == ["fine", "broken", "begun"]
    assert [part["exit_code"] for part in report["parts"].values()] == [0, 3, -15]
    assert [part["timed_out"] for part in report["parts"].values()] == [False, False, True]


def test_success_needs_a_gpu(tmp_path):
    said = [Part("good", ("-c", ""), 60.0)]
    codes = [prove(tmp_path / f"{len(found)}.tar.gz", found, lambda folder: said) for found in (["a GPU"], [])]
    assert codes == [0, 1]
