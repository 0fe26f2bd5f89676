"""YAML that every parser reads the same way."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.manifests.yaml_text import yaml_text


@pytest.mark.full
@settings(deadline=None)
@given(st.lists(st.text()))
def test_parsing_returns_the_same_text(words):
    assert yaml.safe_load(yaml_text([{"words": words}], comment="")) == {"words": words}


# YAML 1.1, YAML 1.2 or Go's parser, which kubectl uses, reads these as numbers, booleans, nulls or dates.
NO_TEXT = "1e3 1e-3 0x1F 0o17 07 1_000 .5 -1 .inf y n Y on no ~ null = 12:30:00 2001-01-01"


@pytest.mark.parametrize("word", NO_TEXT.split())
def test_words_that_some_parser_does_not_read_as_text_are_quoted(word):
    assert yaml_text([[word]], comment="") == f"---\n- '{word}'\n"


def test_plain_words_are_not_quoted_and_lines_not_broken():
    text = yaml_text([{"kind": "Job", "command": ["x " * 500]}, {"kind": "Service"}], comment="one\n\ntwo")
    quoted = "x " * 500
    assert text == f"# one\n#\n# two\n---\nkind: Job\ncommand:\n- '{quoted}'\n---\nkind: Service\n"


def test_repeated_values_are_written_without_aliases():
    labels = {"app": "towers"}
    assert "&" not in yaml_text([{"one": labels, "two": labels}], comment="")
