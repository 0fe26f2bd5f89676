"""YAML that means the same to every reader."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.manifests.yaml_text import yaml_text


@settings(deadline=None)
@given(st.lists(st.text()))
def test_text_comes_back(words):
    assert yaml.safe_load(yaml_text([{"words": words}], comment="")) == {"words": words}


# Numbers, truths and nothings to YAML 1.1, to 1.2 or to Go's reader, which is kubectl's.
NO_TEXT = "1e3 1e-3 0x1F 0o17 07 1_000 .5 -1 .inf y n Y on no ~ null = 12:30:00 2001-01-01"


@pytest.mark.parametrize("word", NO_TEXT.split())
def test_what_might_be_no_text_is_quoted(word):
    assert yaml_text([[word]], comment="") == f"---\n- '{word}'\n"


def test_words_are_plain_and_lines_whole():
    text = yaml_text([{"kind": "Job", "command": ["x " * 500]}, {"kind": "Service"}], comment="one\n\ntwo")
    quoted = "x " * 500
    assert text == f"# one\n#\n# two\n---\nkind: Job\ncommand:\n- '{quoted}'\n---\nkind: Service\n"


def test_what_stands_twice_is_written_twice():
    labels = {"app": "towers"}
    assert "&" not in yaml_text([{"one": labels, "two": labels}], comment="")
