"""Documents as YAML that every reader reads the same."""

import re
from collections.abc import Mapping, Sequence

import yaml

# Three letters or more are a number to no reader, and PyYAML itself quotes those that mean yes, no or nothing.
# All else is quoted: to Go's YAML 1e-3 is a number and y means yes, to PyYAML they are text.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z./-]{2,}")


class _Dumper(yaml.SafeDumper):
    """Quotes whatever some reader might not take for text, and repeats rather than refers."""

    def ignore_aliases(self, data):
        return True

    def represent_text(self, text: str):
        quotes = "'" if text.isprintable() else '"'
        style = None if _PLAIN.fullmatch(text) else quotes
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def yaml_text(documents: Sequence[Mapping[str, object]], *, comment: str) -> str:
    """The documents one after another, under a comment of one or more lines."""
    lines = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    # A line is broken nowhere: within quotes a break would need care to read and to edit.
    return lines + yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, explicit_start=True, allow_unicode=True, width=2**30
    )
