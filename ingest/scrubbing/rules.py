"""The built-in rules: patterns, with a check of the checksum where the data has one.

Pure functions of text; positions are in characters. All repetition in the patterns is bounded, so
that no text makes them slow. A pattern is tried only where a cheaper check says that it may match.

Only an ASCII letter or digit beside a match makes it part of a longer word. Other neighbours are
allowed: letters of scripts without spaces, and the escape of a line break within JSON.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator

Span = tuple[int, int]
"""Start and end (exclusive), in characters."""
Finder = Callable[[str], Iterator[Span]]

_BEGINS = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))"
_ENDS = r"(?![A-Za-z0-9])"
_GAP = r"[ .\-\u00a0\u2007\u2009\u202f\u2010-\u2015]"
"""Between groups of digits: spaces, dots and dashes of all kinds."""

_LOCAL = re.compile(r"[\w.%+-]{1,64}\Z")
_DOMAIN = re.compile(
    rf"(?:[\w-]{{1,63}}\.){{1,8}}(?:xn--[A-Za-z0-9-]{{2,59}}|[A-Za-z]{{2,24}}{_ENDS}|[^\W\d_]{{2,24}})"
)
_DIGITS = re.compile(r"\d(?:[^A-Za-z\d]{0,3}\d){6}")
_PHONE = re.compile(
    r"(?:(?<![A-Za-z0-9+.\-])|(?<=\\[nrt]))(?:"
    rf"(?:\+|00)[1-9](?:(?:{_GAP}|[()/]){{0,2}}\d){{6,14}}"  # international
    rf"|(?:\(\d{{3}}\) ?|\d{{3}}{_GAP})\d{{3}}{_GAP}\d{{4}}"  # North America
    # National, with a leading zero.
    r"|(?:0\d{1,4}[ /\u00a0]|\(0\d{1,4}\)[ /\u00a0]?)\d{3,8}(?:[ \u00a0-]\d{2,6}){0,4}"
    r")(?![A-Za-z0-9]|-\d)"
)
_CARD = re.compile(rf"\d(?:{_GAP}{{0,2}}\d){{12,}}")
_CARD_BEGINS = re.compile(rf"{_BEGINS}[2-6\uff12-\uff16]")
_IBAN_DIGITS = re.compile(r"\d{2,}")
_IBAN_BEGINS = re.compile(_BEGINS)
_IBAN_GAP = re.compile(_GAP)
_IPV4 = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}(?![A-Za-z0-9]|\.\d)")
_IPV4_BEGINS = re.compile(r"(?:(?<![A-Za-z0-9.])|(?<=\\[nrt]))")
_IPV6_HINT = re.compile(r"::|:[0-9A-Fa-f]{1,4}:[0-9A-Fa-f]{1,4}:")
_IPV6 = re.compile(
    r"(?:(?<![A-Za-z0-9:.])|(?<=\\[nrt])|(?<=[G-Zg-z]:))"
    r"[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f.]{0,15}){2,8}(?![A-Za-z0-9:])"
)
_SECRETS = tuple(
    (mark, re.compile(pattern if mark == "PRIVATE KEY" else _BEGINS + pattern))
    for mark, pattern in (
        (
            "PRIVATE KEY",  # of any kind, whole or cut off
            r"-----BEGIN [A-Z ]{0,32}PRIVATE KEY(?: BLOCK)?-----(?:"
            r"[\s\S]{0,65536}?-----END [A-Z ]{0,32}KEY(?: BLOCK)?-----|[\s\S]{0,65536})",
        ),
        ("sk-", r"sk-[A-Za-z0-9_-]{20,1024}"),  # OpenAI, Anthropic and those who copied the form
        ("orl-", rf"orl-[A-Za-z0-9_-]{{43}}{_ENDS}"),  # onlinerl
        ("AKIA", rf"AKIA[0-9A-Z]{{16}}{_ENDS}"),  # AWS
        ("ASIA", rf"ASIA[0-9A-Z]{{16}}{_ENDS}"),
        ("gh", r"gh[pousr]_[A-Za-z0-9]{36,255}"),  # GitHub
        ("github_pat_", r"github_pat_[A-Za-z0-9_]{22,255}"),
        ("glpat-", r"glpat-[A-Za-z0-9_-]{20,255}"),  # GitLab
        ("xox", r"xox[abeprs]-[A-Za-z0-9-]{10,255}"),  # Slack
        ("AIza", rf"AIza[0-9A-Za-z_-]{{35}}{_ENDS}"),  # Google
        ("ya29.", r"ya29\.[0-9A-Za-z_-]{20,1024}"),
        ("k_", r"(?:sk|rk|pk)_(?:live|test)_[0-9A-Za-z]{16,255}"),  # Stripe
        ("hf_", r"hf_[A-Za-z0-9]{30,255}"),  # Hugging Face
        ("gsk_", r"gsk_[A-Za-z0-9]{40,255}"),  # Groq
        ("npm_", r"npm_[A-Za-z0-9]{36,255}"),
        ("pypi-", r"pypi-[A-Za-z0-9_-]{50,1024}"),
        ("SG.", r"SG\.[\w-]{16,64}\.[\w-]{16,128}"),  # SendGrid
        ("eyJ", r"eyJ[\w-]{8,4096}\.eyJ[\w-]{8,8192}\.[\w-]{8,4096}"),  # JSON web tokens
    )
)
"""Patterns, each with a text that must occur for the pattern to be tried."""
_IBAN_LENGTHS = {
    "AD": 24, "AE": 23, "AL": 28, "AT": 20, "AZ": 28, "BA": 20, "BE": 16, "BG": 22, "BH": 22,
    "BR": 29, "BY": 28, "CH": 21, "CR": 22, "CY": 28, "CZ": 24, "DE": 22, "DK": 18, "DO": 28,
    "EE": 20, "EG": 29, "ES": 24, "FI": 18, "FO": 18, "FR": 27, "GB": 22, "GE": 22, "GI": 23,
    "GL": 18, "GR": 27, "GT": 28, "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IQ": 23, "IS": 26,
    "IT": 27, "JO": 30, "KW": 30, "KZ": 20, "LB": 28, "LC": 32, "LI": 21, "LT": 20, "LU": 20,
    "LV": 21, "LY": 25, "MC": 27, "MD": 24, "ME": 22, "MK": 19, "MR": 27, "MT": 31, "MU": 30,
    "NL": 18, "NO": 15, "PK": 24, "PL": 28, "PS": 29, "PT": 25, "QA": 29, "RO": 24, "RS": 22,
    "SA": 24, "SC": 31, "SE": 24, "SI": 19, "SK": 24, "SM": 27, "ST": 25, "SV": 28, "TL": 23,
    "TN": 24, "TR": 26, "UA": 29, "VA": 22, "VG": 24, "XK": 20,
}  # fmt: skip
"""Length by country (SWIFT IBAN registry), without spaces."""


def emails(text: str) -> Iterator[Span]:
    """Addresses with a domain of at least two labels."""
    at = text.find("@")
    while at >= 0:
        local = _LOCAL.search(text, max(at - 64, 0), at)
        domain = _DOMAIN.match(text, at + 1)
        if local is not None and domain is not None:
            yield local.start(), domain.end()
        at = text.find("@", at + 1)


def phones(text: str) -> Iterator[Span]:
    """Numbers in international form, in North American form, or with a leading zero and a space."""
    if _DIGITS.search(text) is None:
        return
    for start, end in _spans(_PHONE, text):
        if 7 <= sum(character.isdigit() for character in text[start:end]) <= 15:
            yield start, end


def cards(text: str) -> Iterator[Span]:
    """Payment cards: 13 to 19 digits with the right check digit (Luhn, ISO/IEC 7812-1).

    Other numbers, such as an expiry date or code, may stand beside a card number after a gap.
    """
    for match in _CARD.finditer(text):
        places = [at for at in range(*match.span()) if text[at].isdigit()]
        done = match.start()
        for first, start in enumerate(places):
            if start < done or _CARD_BEGINS.match(text, start) is None:
                continue
            end = _end_of_card(text, places[first : first + 20])
            if end is not None:
                yield start, end
                done = end


def ibans(text: str) -> Iterator[Span]:
    """Account numbers of the country's length with the right check digits (ISO 13616)."""
    for match in _IBAN_DIGITS.finditer(text):
        start = match.start() - 2
        country = text[max(start, 0) : match.start()].upper()
        if country not in _IBAN_LENGTHS or _IBAN_BEGINS.match(text, start) is None:
            continue
        end = _end_of_iban(text, start, country)
        if end is not None and mod97(_IBAN_GAP.sub("", text[start:end])):
            yield start, end


def ips(text: str) -> Iterator[Span]:
    """Valid IP addresses of version 4 and 6, except the unspecified ones."""
    if text.count(".") >= 3:
        for start, end in _spans(_IPV4, text):
            if _IPV4_BEGINS.match(text, start) and _is_ip(text[start:end]):
                yield start, end
    if _IPV6_HINT.search(text) is not None:
        for start, end in _spans(_IPV6, text):
            trimmed = text[start:end].rstrip(".")
            if _is_ip(trimmed):
                yield start, start + len(trimmed)


def secrets(text: str) -> Iterator[Span]:
    """Private keys, and keys and tokens of common services, recognised by their prefix."""
    for mark, pattern in _SECRETS:
        if mark in text:
            yield from _spans(pattern, text)


FINDERS: dict[str, Finder] = {
    "email": emails,
    "phone": phones,
    "card": cards,
    "iban": ibans,
    "ip": ips,
    "secret": secrets,
}
"""By the rule's name in the configuration."""


def luhn(digits: str) -> bool:
    """Whether the last digit is the Luhn check digit of the digits before it."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        doubled = int(digit) * (2 if place % 2 else 1)
        total += doubled - 9 if doubled > 9 else doubled
    return total % 10 == 0


def mod97(iban: str) -> bool:
    """Whether digits three and four are the check digits of an IBAN without spaces."""
    moved = iban[4:] + iban[:4]
    return int("".join(str(int(character, 36)) for character in moved)) % 97 == 1


def _spans(pattern: re.Pattern[str], text: str) -> Iterator[Span]:
    return (match.span() for match in pattern.finditer(text))


def _end_of_card(text: str, places: list[int]) -> int | None:
    """Position after the longest card number that begins at the first place and ends at a gap.

    Args:
        text: The text with the digits.
        places: Positions of the digits, at most one more than a card has.
    """
    digits = "".join(text[place] for place in places)
    for count in range(min(len(places), 19), 12, -1):
        end = places[count - 1] + 1
        follows = text[end : end + 1]
        if not (follows.isdigit() or (follows.isascii() and follows.isalpha())) and luhn(
            digits[:count]
        ):
            return end
    return None


def _end_of_iban(text: str, start: int, country: str) -> int | None:
    """Position after the country's number of letters and digits; None when there are too few."""
    left = _IBAN_LENGTHS[country]
    gap = 0
    for place in range(start, len(text)):
        character = text[place]
        if not (character.isascii() and character.isalnum()):
            gap += 1
            if gap > 2 or _IBAN_GAP.match(character) is None:
                return None
            continue
        gap = 0
        left -= 1
        if left == 0:
            after = text[place + 1 : place + 2]
            return None if after.isascii() and after.isalnum() else place + 1
    return None


def _is_ip(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not address.is_unspecified
