"""Text of others, made fit for a status: no credentials, no query strings, nothing of a conversation, bounded.

Statuses and events are read by more people than logs are, and they are kept. What a container says last may be a
traceback with a signed URL or a request in it.
"""

from __future__ import annotations

import re

LIMIT = 1500  # characters; several are joined in one condition

_URL = re.compile(
    r"""(?ix) \b ([a-z][a-z0-9+.-]*://)  # scheme
        ([^\s/?\#@"'<>]*@)?  # user and password
        ([^\s?\#"'<>]*)
        ([?\#][^\s"'<>)\]]*)?  # query and fragment: signatures are there"""
)
_SECRETS = (
    # name = value, however it is written: JSON, YAML, a flag, a header, an environment variable
    re.compile(
        r"(?i)([\"']?[\w.-]*(?:password|passwd|secret(?:[_-]?access)?[_-]?key|api[_-]?keys?|access[_-]?key(?:[_-]?id)?"
        r"|(?:auth|session|access|refresh|security|bearer|hf)[_-]?token|credential|signature|x-amz-[\w-]+)[\"']?"
        r"\s*(?:[=:]\s*|\s+(?=[A-Za-z0-9+/_.=-]{16,}))[\"']?)[^\s\"',;}\]]+"
    ),
    re.compile(r"(?i)(\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"(?i)(\bauthorization[\"']?\s*[:=]\s*[\"']?)[^\s\"',;}\]]+"),
    re.compile(r"()\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b"),
    re.compile(r"()\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-)[A-Za-z0-9_-]{8,}"),
    re.compile(r"()\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"),
    re.compile(r"()-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S),
)
# What people and models say to each other, in the shapes that requests have in a log: the value up to the end of its
# quotes, or, where they do not close, up to the end of the text.
_SPOKEN = re.compile(
    r"""(?ix) (
        ["']? \b (?:content|prompt|message_text|input_text|text|input|arguments|completion|user_message) \b ["']?
        \s* [:=] \s* ) (?: "(?:[^"\\]|\\.)*(?:"|\Z) | '(?:[^'\\]|\\.)*(?:'|\Z) )""",
    re.S,
)
_LISTS = re.compile(r"""(?is)(["']?\bmessages\b["']?\s*[:=]\s*)\[.*?(?:\]|\Z)""")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x1b]")


def redact(text: str, limit: int = LIMIT) -> str:
    """At most `limit` characters of `text`; the end is kept, because that is where an error is. Line breaks stay."""
    text = _CONTROL.sub("", text.replace("\r\n", "\n")).strip()
    text = _LISTS.sub(r"\1[…]", text)
    text = _SPOKEN.sub(r"\1…", text)
    text = _URL.sub(lambda m: m[1] + m[3], text)
    for pattern in _SECRETS:
        text = pattern.sub(r"\1…", text)
    return text if len(text) <= limit else "…" + text[1 - limit :].lstrip()
