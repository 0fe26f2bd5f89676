"""Keeps passwords and the like out of a report.

A text that may hold one is hidden whole: what is left of it could be a part of the password, and a report is read
by many. So this hides too much rather than too little.
"""

import dataclasses
import re
from collections.abc import Mapping

HIDDEN = "hidden"

_WORDS = "key|token|secret|passw|passphrase|credential|auth|signature|jwt|cookie|private"
_SECRET_NAME = re.compile(_WORDS, re.IGNORECASE)
# A name is looked at from its beginning alone: from each of its letters a long one would take minutes.
_BEGIN = r"(?<![\w.-])"
_NAMED = rf"(?=[\w.-]*(?:{_WORDS}))[\w.-]+"
_SUSPECT = re.compile(
    "|".join(
        (
            rf"{_BEGIN}{_NAMED}[\"']?\s*=",  # --api_key=..., "token" = ...
            rf"[\"']{_NAMED}\\?[\"']\s*:",  # {"token": ...}, quoted once more too
            # token: ..., but not the host auth-0 with its port.
            rf"{_BEGIN}(?![\w.-]*[\d.][\w.-]*:\d{{1,5}}\b){_NAMED}:\s*\S",
            rf"{_BEGIN}--?{_NAMED}\s+\S",  # --password ...
            r"\A[^:]*:[\s\S]*@",  # user:password@host, whatever is in the password
            r"[?&][^\s=?&]*=",  # a query, where signatures stand
            r"\b(?:bearer|basic)\s+\S",
            r"-----BEGIN",
            # As they are given out by Amazon, GitHub, GitLab, Hugging Face, Slack and others; JSON web tokens.
            r"\b(?:AKIA|ASIA)[0-9A-Z]{12,}|\b(?:gh[opsur]_|github_pat_|glpat-|hf_|sk-|xox[abp]-|eyJ)[\w.-]{10,}",
        )
    ),
    re.IGNORECASE,
)
# A shorter one would hide every text in which its few letters happen to stand.
_MIN_KNOWN_LETTERS = 6


def names_a_secret(name: str) -> bool:
    """Whether a variable of this name may hold a credential."""
    return _SECRET_NAME.search(name) is not None


@dataclasses.dataclass(frozen=True)
class Credentials:
    """What must not be shown.

    Attributes:
      known: values that are credentials, wherever they turn up.
    """

    known: frozenset[str] = frozenset()

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> "Credentials":
        """Knows the values of all variables with a telling name, shown in the report or not."""
        return cls(
            frozenset(
                value
                for name, value in environment.items()
                if names_a_secret(name) and len(value) >= _MIN_KNOWN_LETTERS
            )
        )

    def shown(self, text: str) -> str:
        """The text, or 'hidden'."""
        if _SUSPECT.search(text) or any(value in text for value in self.known):
            return HIDDEN
        return text
