"""What the built-in rules find. Each is a pattern and, where there is one, a checksum.

Pure functions of text; positions are in characters. The patterns have bounded repetition, so that
no text makes them slow.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator

Span = tuple[int, int]
"""Start and end (exclusive), in characters."""
Finder = Callable[[str], Iterator[Span]]

_EMAIL = re.compile(r"(?<![\w.%+-])[\w.%+-]{1,64}@(?:[\w-]{1,63}\.){1,8}[^\W\d_]{2,24}(?![\w-])")
_PHONE = re.compile(
    r"(?<![\w+.-])(?:"
    r"(?:\+|00)[1-9](?:[ ().\-/]{0,2}\d){6,14}"  # international
    r"|(?:\(\d{3}\) ?|\d{3}[-. ])\d{3}[-. ]\d{4}"  # North America
    r"|0\d{1,4}[ /]\d{3,8}(?:[ -]\d{2,6}){0,4}"  # national, with a leading zero
    r")(?![\w-])"
)
_CARD = re.compile(r"(?<![\w-])[2-6]\d{3}(?:[ -]?\d){9,15}(?![\w-])")
_IBAN = re.compile(r"(?<!\w)([A-Za-z]{2})\d{2}(?: ?[A-Za-z0-9]){11,30}")
_IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w]|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f.]{0,15}){2,8}(?![\w:])")
_SECRETS = tuple(
    re.compile(pattern)
    for pattern in (
        r"-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----"  # of any kind, whole or cut off
        r"[\s\S]{0,16384}?(?:-----END [A-Z ]{0,32}KEY-----|\Z)",
        r"(?<!\w)sk-[A-Za-z0-9_-]{20,256}",  # OpenAI, Anthropic and those who copied the form
        r"(?<!\w)orl-[A-Za-z0-9_-]{43}(?!\w)",  # onlinerl
        r"(?<!\w)(?:AKIA|ASIA)[0-9A-Z]{16}(?!\w)",  # AWS
        r"(?<!\w)gh[pousr]_[A-Za-z0-9]{36,255}",  # GitHub
        r"(?<!\w)github_pat_[A-Za-z0-9_]{22,255}",
        r"(?<!\w)glpat-[A-Za-z0-9_-]{20,255}",  # GitLab
        r"(?<!\w)xox[abeprs]-[A-Za-z0-9-]{10,255}",  # Slack
        r"(?<!\w)AIza[0-9A-Za-z_-]{35}(?!\w)",  # Google
        r"(?<!\w)(?:sk|rk|pk)_(?:live|test)_[0-9A-Za-z]{16,255}",  # Stripe
        r"(?<!\w)hf_[A-Za-z0-9]{30,255}",  # Hugging Face
        r"(?<!\w)eyJ[\w-]{8,4096}\.eyJ[\w-]{8,8192}\.[\w-]{8,4096}",  # JSON web tokens
    )
)
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
    return _spans(_EMAIL, text) if "@" in text else iter(())


def phones(text: str) -> Iterator[Span]:
    """Numbers in international form, in North American form, or with a leading zero and a space."""
    for start, end in _spans(_PHONE, text):
        if 7 <= sum(character.isdigit() for character in text[start:end]) <= 15:
            yield start, end


def cards(text: str) -> Iterator[Span]:
    """Payment cards: 13 to 19 digits with the right check digit (Luhn, ISO/IEC 7812-1)."""
    for start, end in _spans(_CARD, text):
        if luhn(re.sub(r"\D", "", text[start:end])):
            yield start, end


def ibans(text: str) -> Iterator[Span]:
    """Account numbers of the country's length with the right check digits (ISO 13616)."""
    for match in _IBAN.finditer(text):
        end = _end_of_iban(text, match.start(), match[1].upper())
        if end is not None and mod97(text[match.start() : end].replace(" ", "")):
            yield match.start(), end


def ips(text: str) -> Iterator[Span]:
    """Addresses of version 4 and 6 that exist."""
    for pattern in (_IPV4, _IPV6):
        for start, end in _spans(pattern, text):
            trimmed = text[start:end].rstrip(".")
            if _is_ip(trimmed):
                yield start, start + len(trimmed)


def secrets(text: str) -> Iterator[Span]:
    """Keys and tokens of common services, by their prefix, and private keys."""
    for pattern in _SECRETS:
        yield from _spans(pattern, text)


FINDERS: dict[str, Finder] = {
    "email": emails,
    "phone": phones,
    "card": cards,
    "iban": ibans,
    "ip": ips,
    "secret": secrets,
}
"""By the name that the configuration uses."""


def luhn(digits: str) -> bool:
    """Whether the last digit is the check digit of those before it."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        doubled = int(digit) * (2 if place % 2 else 1)
        total += doubled - 9 if doubled > 9 else doubled
    return total % 10 == 0


def mod97(iban: str) -> bool:
    """Whether digits three and four are the check digits of an account number without spaces."""
    moved = iban[4:] + iban[:4]
    return int("".join(str(int(character, 36)) for character in moved)) % 97 == 1


def _spans(pattern: re.Pattern[str], text: str) -> Iterator[Span]:
    return (match.span() for match in pattern.finditer(text))


def _end_of_iban(text: str, start: int, country: str) -> int | None:
    """After as many letters and digits as the country has; None when there are not that many."""
    left = _IBAN_LENGTHS.get(country)
    if left is None:
        return None
    for place in range(start, len(text)):
        if text[place] == " ":
            continue
        if not (text[place].isascii() and text[place].isalnum()):
            return None
        left -= 1
        if left == 0:
            after = text[place + 1 : place + 2]
            return None if after.isalnum() else place + 1
    return None


def _is_ip(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not address.is_unspecified
