"""Masks secrets in a command line before it is recorded: traces are copied, uploaded and shown."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Final

MASK: Final = "***"

_SECRET_ENDS: Final = (
    *("token", "password", "passwd", "passphrase", "passcode", "secret", "apikey", "accesskey"),
    *("secretkey", "credential", "credentials", "authorization", "cookie", "signature"),
)
_SECRET_WORDS: Final = frozenset({"auth", "bearer", "pat", "pwd", "pass", "sshpass", "sig"})
_KEY_KINDS: Final = frozenset(
    {
        *("api", "access", "account", "app", "auth", "client", "encryption", "license", "master"),
        *("private", "secret", "security", "service", "shared", "signing", "ssh", "storage"),
    }
)
_SWITCHES: Final = frozenset(
    {"use", "no", "with", "enable", "disable", "skip", "allow", "require", "has", "is", "trust"}
)
_SPECIAL_TOKENS: Final = frozenset(
    {*("pad", "eos", "bos", "unk", "sep", "cls", "mask", "image", "special", "per"), "stop"}
)
_PUBLIC: Final = frozenset(
    {"revision", "rev", "ref", "commit", "sha", "sha1", "sha256", "md5", "hash", "digest", "uuid"}
)
"""Last words of names whose values look like keys, but are none."""

_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SEPARATORS: Final = re.compile(r"[^A-Za-z0-9]+")
_NAME: Final = r"[A-Za-z_+~@-][\w.+@-]*"
_NAMED: Final = re.compile(
    rf"(?<![\w.+@-])(?P<name>{_NAME})(?:[\"']?\s*[=:]\s*(?:(?:Bearer|Basic|Token)\s+)?|\s+(?!-))",
    re.IGNORECASE,
)
_VALUE: Final = re.compile(r"\"[^\"]*\"|'[^']*'|[^\s\"',;&}\])]+")
_IN_URL: Final = re.compile(
    r"(?<![A-Za-z0-9+.-])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^\s/?#\"']+)@"
)
_LOGIN: Final = re.compile(r"(?<![^\s\"'=])[\w.+-]+:[^\s@/:\"']+@(?=[\w.-]+)")
_KEY: Final = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"sk-(?=[\w-]*\d)[\w-]{8,}|sk-[\w-]{20,}|[spr]k_(?:live|test)_\w{8,}"
    r"|hf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{8,}|hf_[A-Za-z0-9]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{8,}|github_pat_\w{8,}|gl(?:pat|ptt|dt|rt|cbt)-[\w-]{8,}"
    r"|xox[abeoprs]-[\w-]{8,}|xapp-[\w-]{8,}|A(?:KIA|SIA|GPA|IDA|ROA|NPA|NVA)[0-9A-Z]{8,}"
    r"|AIza[\w-]{20,}|ya29\.[\w.-]{8,}|npm_\w{16,}|pypi-[\w-]{16,}|dckr_pat_[\w-]{8,}"
    r"|SG\.[\w-]{8,}\.[\w-]{8,}|nvapi-[\w-]{8,}|gsk_\w{16,}|r8_\w{16,}|dop_v1_\w{16,}"
    r"|eyJ[\w-]{4,}\.[\w-]{4,}\.[\w-]*"
    r")"
)
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_LONG: Final = re.compile(r"[A-Za-z0-9+/_-]{24,}={0,2}")
_RUN: Final = re.compile(r"[A-Za-z0-9]{16,}")
_SHORT: Final = 4
_LONGEST_NAME: Final = 12
_MIN_CHANGES: Final = 0.25
"""Of random letters and digits, about half are followed by another class; in names few are."""


def masked_command(command: Sequence[str]) -> list[str]:
    """Returns a command line with `MASK` in place of what is or looks like a secret.

    Masked are the values of options and variables whose names say so (``--api-key X``,
    ``--password=X``, ``HF_TOKEN=X``), credentials in URLs, and words with the form of a key.

    Args:
        command: Its words.
    """
    masked = []
    name = ""
    for word in command:
        is_option = word.startswith("-")
        if name and not is_option and _is_secret(name, word):
            masked.append(MASK)
        else:
            masked.append(_masked_word(word, name))
        name = word if is_option and "=" not in word and not any(map(str.isspace, word)) else ""
    return masked


def is_masked(command: Sequence[str]) -> bool:
    """Whether something of a recorded command line was masked."""
    return any(MASK in word for word in command)


def _masked_word(text: str, name: str = "") -> str:
    """A word of a command line, which may be a command line of a shell, or JSON.

    Args:
        text: The word.
        name: The option before it.
    """
    text = _IN_URL.sub(_without_user, text)
    text = _LOGIN.sub(f"{MASK}@", text)
    text = _without_named_values(text)
    text = _KEY.sub(MASK, text)
    named = _NAMED.match(text)
    last = _words_of(name or (named["name"] if named else ""))[-1:]
    if last and last[0] in _PUBLIC:
        return text
    return _LONG.sub(lambda match: MASK if _is_random(match, text) else match[0], text)


def _without_user(match: re.Match[str]) -> str:
    """A URL without its user's secret; a name alone is none."""
    user = match["user"]
    is_name = ":" not in user and _KEY.search(user) is None and len(user) < 20
    return match[0] if is_name else f"{match['scheme']}{MASK}@"


def _without_named_values(text: str) -> str:
    """A text without the secrets behind ``name=``, ``name:`` and ``--name``."""
    pieces, done = [], 0
    for match in _NAMED.finditer(text):
        is_before_space = match[0][-1].isspace() and not any(mark in match[0] for mark in "=:")
        is_name = match["name"].startswith("-") or not is_before_space
        if match.start() < done or not is_name or not _may_be_secret(match["name"]):
            continue
        value = _VALUE.match(text, match.end())
        if value is None or MASK in value[0]:
            continue
        if _is_secret(match["name"], value[0].strip("\"'")):
            quote = value[0][0] if value[0][0] in "\"'" else ""
            pieces += [text[done : match.end()], quote, MASK, quote]
            done = value.end()
    return "".join([*pieces, text[done:]])


def _words_of(name: str) -> list[str]:
    return _SEPARATORS.sub(" ", _CAMEL.sub(" ", name)).lower().split()


def _is_secret(name: str, value: str) -> bool:
    """Whether the value of an option or variable is a secret, by its name."""
    words = _words_of(name)
    if not words or not value or value.startswith(("$", MASK)) or value.endswith(".py"):
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "key":
        return before in _KEY_KINDS or _looks_chosen_by_machine(value)
    is_harmless = (
        (words[0] in _SWITCHES and not name.isupper())
        or (last == "token" and before in _SPECIAL_TOKENS)
        or (last in {"pwd", "cookie"} and value.startswith(("/", "~", ".")))
        or (last == "pass" and value.isdigit() and len(value) < _SHORT)  # a number of passes
    )
    return not is_harmless and _may_be_secret(name)


def _may_be_secret(name: str) -> bool:
    last = "".join(_words_of(name)[-1:])
    return last == "key" or last in _SECRET_WORDS or last.endswith(_SECRET_ENDS)


def _looks_chosen_by_machine(value: str) -> bool:
    has_both = any(map(str.isdigit, value)) and any(map(str.isalpha, value))
    return has_both and len(value) >= _LONGEST_NAME and "/" not in value


def _is_random(match: re.Match[str], text: str) -> bool:
    """Whether a long word consists of random letters and digits, as keys do."""
    found = match[0]
    is_path = (match.start() > 0 and text[match.start() - 1] in "/.~") or found.startswith("/")
    if is_path or _UUID.fullmatch(found):
        return False
    return any(_changes(run) >= _MIN_CHANGES for run in _RUN.findall(found))


def _changes(text: str) -> float:
    """How often the class of characters changes (digit, small, capital), per character."""
    classes = [character.isdigit() + 2 * character.isupper() for character in text]
    return sum(one != other for one, other in itertools.pairwise(classes)) / len(text)
