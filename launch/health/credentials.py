"""Hides passwords, tokens and other credentials in a report.

A text that may contain a credential is hidden completely, because a remaining part of it could be a part of the
password, and many people read a report. So this hides too much rather than too little.
"""

import dataclasses
import re
from collections.abc import Mapping

HIDDEN = "hidden"

_WORDS = "key|token|secret|passw|passphrase|credential|auth|signature|jwt|cookie|private"
_SECRET_NAME = re.compile(_WORDS, re.IGNORECASE)
# A match starts only where a name begins: trying every letter of a long name would take minutes.
_BEGIN = r"(?<![\w.-])"
_NAMED = rf"(?=[\w.-]*(?:{_WORDS}))[\w.-]+"
_SUSPECT = re.compile(
    "|".join(
        (
            rf"{_BEGIN}{_NAMED}[\"']?\s*=",  # --api_key=..., "token" = ...
            rf"[\"']{_NAMED}\\?[\"']\s*:",  # {"token": ...}, also with escaped quotes
            # token: ..., but not a host with its port, such as auth-0.auth:2222.
            rf"{_BEGIN}(?![\w.-]*[\d.][\w.-]*:\d{{1,5}}\b){_NAMED}:\s*\S",
            rf"{_BEGIN}--?{_NAMED}\s+\S",  # --password ...
            r"\A[^:]*:[\s\S]*@",  # user:password@host, whatever characters the password has
            r"[?&][^\s=?&]*=",  # a URL's query, which may contain a signature
            r"\b(?:bearer|basic)\s+\S",
            r"-----BEGIN",
            # The formats of Amazon, GitHub, GitLab, Hugging Face, Slack and others; JSON web tokens.
            r"\b(?:AKIA|ASIA)[0-9A-Z]{12,}|\b(?:gh[opsur]_|github_pat_|glpat-|hf_|sk-|xox[abp]-|eyJ)[\w.-]{10,}",
        )
    ),
    re.IGNORECASE,
)
# A shorter value would hide every text that happens to contain its few letters.
_MIN_KNOWN_LETTERS = 6


def names_a_secret(name: str) -> bool:
    """Whether a variable of this name may hold a credential."""
    return _SECRET_NAME.search(name) is not None


@dataclasses.dataclass(frozen=True)
class Credentials:
    """Finds and hides credentials in texts.

    Attributes:
      known: values to hide wherever they occur.
    """

    known: frozenset[str] = frozenset()

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> "Credentials":
        """Knows the values of all variables whose names suggest a credential, also of those not in the report."""
        return cls(
            frozenset(
                value
                for name, value in environment.items()
                if names_a_secret(name) and len(value) >= _MIN_KNOWN_LETTERS
            )
        )

    def shown(self, text: str) -> str:
        """The text, or 'hidden' if it may contain a credential."""
        if _SUSPECT.search(text) or any(value in text for value in self.known):
            return HIDDEN
        return text
