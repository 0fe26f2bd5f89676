"""Writes documents as YAML that every YAML parser reads the same way."""

import re
from collections.abc import Mapping, Sequence

import yaml

# No parser reads a word of three letters or more as a number, and PyYAML itself quotes those that mean yes, no or
# null. Everything else is quoted: Go's parser reads 1e-3 as a number and y as yes, PyYAML reads both as text.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z./-]{2,}")


class _Dumper(yaml.SafeDumper):
    """Quotes all text that some parser might not read as text, and repeats values instead of using aliases."""

    def ignore_aliases(self, data):
        return True

    def represent_text(self, text: str):
        quotes = "'" if text.isprintable() else '"'
        style = None if _PLAIN.fullmatch(text) else quotes
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def yaml_text(documents: Sequence[Mapping[str, object]], *, comment: str) -> str:
    """The documents as one YAML text that begins with a comment of one or more lines."""
    lines = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    # No line is broken: a line break within quotes is hard to read and to edit.
    return lines + yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, explicit_start=True, allow_unicode=True, width=2**30
    )
