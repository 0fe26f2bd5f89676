"""Writes the sections as text or as JSON, and hides credentials in them."""

import json
from collections.abc import Mapping

from launch.health.credentials import HIDDEN, Credentials
from launch.health.section import Fact, Section


def without_credentials(title: str, section: Section, credentials: Credentials) -> Section:
    """The section, with every text hidden that may contain a credential."""

    def shown(fact: Fact) -> Fact:
        return [credentials.shown(text) for text in fact] if isinstance(fact, list) else credentials.shown(fact)

    instead = (
        f"{title}: a problem is hidden because its text may contain a credential; "
        "check these settings on the machine itself"
    )
    problems = [credentials.shown(text) for text in section.problems]
    return Section(
        facts={name: shown(fact) for name, fact in section.facts.items()},
        problems=tuple(instead if text == HIDDEN else text for text in problems),
    )


def as_text(report: Mapping[str, Section]) -> str:
    """The report for people: one line per fact under each title, and all problems at the end."""
    width = max(len(name) for section in report.values() for name in section.facts) + 2
    lines = []
    for title, section in report.items():
        lines.append(title)
        for name, fact in section.facts.items():
            texts = fact if isinstance(fact, list) else [fact]
            labels = [name] + [""] * (len(texts) - 1)
            lines += [f"  {label:{width}}{_one_line(text)}" for label, text in zip(labels, texts, strict=True)]
        lines.append("")
    problems = [_one_line(text) for section in report.values() for text in section.problems]
    lines += ["problems:", *(f"  {text}" for text in problems)] if problems else ["problems: none"]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def as_json(report: Mapping[str, Section]) -> str:
    """The report for programs: facts[title][name], and a list of all problems."""
    facts = {title: dict(section.facts) for title, section in report.items()}
    problems = [text for section in report.values() for text in section.problems]
    return json.dumps({"facts": facts, "problems": problems}, indent=1) + "\n"


def _one_line(text: str) -> str:
    """The text; if it has a line break or another unprintable character, as a Python literal with escapes."""
    return text if text.isprintable() else ascii(text)
