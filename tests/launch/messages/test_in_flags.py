"""Messages name the flags that a user types, where the program has them."""

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import binary, train  # noqa: F401, defines the flags
from launch.messages.in_flags import in_flags


@pytest.mark.parametrize(
    "text, found",
    [
        (
            "zero=1 with strategy 'pipeline' and 1 tower: omit zero, or use more, as grid='data:2,stage:2'",
            "--zero=1 with --strategy=pipeline and 1 tower: omit --zero, or use more, as --grid=data:2,stage:2",
        ),
        ("(fused_batch_norm=False disables this)", "(--nofused_batch_norm disables this)"),
        ("xla=True with recompute='blocks'; omit it", "--xla with --recompute=blocks; omit it"),
        ("network='tiny': must be one of", "--model=tiny: must be one of"),
        ("use stages=2, or schedule=interleaved", "use --stages=2, or --pipeline_schedule=interleaved"),
        ("schedule=cosine", "--schedule=cosine"),
        ("resume=old/step-5: no such checkpoint", "--resume=old/step-5: no such checkpoint"),
        ("directory='a folder'", "--directory='a folder'"),
    ],
    ids=str,
)
def test_arguments_become_flags(text, found):
    assert in_flags(text) == found
    assert in_flags(found) == found


@pytest.mark.parametrize(
    "text",
    [
        "use shuffle(..., seed=1) on the data",
        "width=8, heads=3: the width must be a multiple",
        "TF_CONFIG=seed and a/seed=3 and my-seed=3",
        "omit the grid",
        "a strategy of batch sizes; loss = 3",
    ],
)
def test_other_words_stay(text):
    assert in_flags(text) == text


@flagsaver.flagsaver(verify=True)
def test_the_precision_of_verify_has_a_flag_of_its_own():
    assert in_flags("pass precision=float32") == "pass --verify_precision=float32"


def test_a_program_without_the_flag_keeps_the_argument(monkeypatch):
    monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
    text = "zero=1 with strategy 'pipeline': omit zero"
    assert in_flags(text) == text


@flagsaver.flagsaver
def test_errors_and_notes_of_a_program_are_in_flags(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/train.py"])
    binary.fail("zero=4: use 1, 2 or 3")
    binary.note("num_towers=2 gives each 4 threads")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["train: error: --zero=4: use 1, 2 or 3", "train: note: --num_towers=2 gives each 4 threads"]
