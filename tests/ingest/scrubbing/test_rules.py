"""Texts that the built-in rules find, and texts that they leave alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.ingest.scrubbing.rules import FINDERS, luhn, mod97


def found(rule: str, text: str) -> list[str]:
    return [text[start:end] for start, end in FINDERS[rule](text)]


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("email", "write to ada.l+x@mail.example.org, please", "ada.l+x@mail.example.org"),
        ("email", "<ada@example.com>", "ada@example.com"),
        ("email", "jürgen@bücher.example", "jürgen@bücher.example"),
        ("email", "user<|im_end|>ada@example.com<|im_end|>", "ada@example.com"),
        ("phone", "call +49 170 1234567 now", "+49 170 1234567"),
        ("phone", "0049-170-123-4567", "0049-170-123-4567"),
        ("phone", "(555) 123-4567", "(555) 123-4567"),
        ("phone", "555-123-4567", "555-123-4567"),
        ("phone", "030 1234567", "030 1234567"),
        ("card", "4111 1111 1111 1111", "4111 1111 1111 1111"),
        ("card", "card 378282246310005.", "378282246310005"),
        ("iban", "DE89 3704 0044 0532 0130 00 is mine", "DE89 3704 0044 0532 0130 00"),
        ("iban", "gb82west12345698765432", "gb82west12345698765432"),
        ("iban", "NO9386011117947", "NO9386011117947"),
        ("ip", "from 192.168.10.254.", "192.168.10.254"),
        ("ip", "at 2001:db8::ff00:42:8329!", "2001:db8::ff00:42:8329"),
        ("ip", "[::1]:80", "::1"),
        ("secret", "sk-proj-abcdefghijklmnopqrstuv", "sk-proj-abcdefghijklmnopqrstuv"),
        ("secret", "AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
        ("secret", f"token ghp_{'a1' * 18}", f"ghp_{'a1' * 18}"),
        ("secret", f"orl-{'x' * 43}", f"orl-{'x' * 43}"),
        (
            "secret",
            "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nrest",
            "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
        ),
        ("secret", "-----BEGIN PRIVATE KEY-----\ncut", "-----BEGIN PRIVATE KEY-----\ncut"),
        (
            "secret",
            "Bearer eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeK",
            "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeK",
        ),
    ],
)
def test_a_rule_finds_exactly_this(rule: str, text: str, expected: str) -> None:
    assert expected in found(rule, text)
    assert len(found(rule, text)) == 1


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("email", "a@b and @handle and x@y."),
        ("phone", "on 2026-01-02 at 12:30:45, 3.14159265"),
        ("phone", "order 1234567 of 10000000"),
        ("card", "4111 1111 1111 1112"),
        ("card", "9111111111111111"),
        ("iban", "DE88 3704 0044 0532 0130 00"),
        ("iban", "DE89 3704 0044 0532 0130"),
        ("iban", "XX89370400440532013000"),
        ("ip", "version 1.2.3 and 300.1.1.1, 1.2.3.4.5"),
        ("ip", "12:30:45 and std::vector and ::"),
        ("secret", "sk-short and task-abcdefghijklmnopqrstuvwxyz"),
    ],
)
def test_a_rule_leaves_this_alone(rule: str, text: str) -> None:
    assert found(rule, text) == []


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("email", "_bob@example.com_", "_bob@example.com"),
        ("email", "bob@example.com-thanks", "bob@example.com"),
        ("email", "bob@example.com--thanks", "bob@example.com"),
        ("email", "bob@my.host-name.org", "bob@my.host-name.org"),
        ("email", "bob@example.xn--p1ai", "bob@example.xn--p1ai"),
        ("email", f"{'x' * 100}@example.com", f"{'x' * 64}@example.com"),
        ("card", "4111 1111 1111 1111 123", "4111 1111 1111 1111"),
        ("card", "4111111111111111 12/27", "4111111111111111"),
        ("card", "12 4111 1111 1111 1111 12", "4111 1111 1111 1111"),
        ("card", "4111\u00a01111\u00a01111\u00a01111", "4111\u00a01111\u00a01111\u00a01111"),
        ("card", "4111.1111.1111.1111", "4111.1111.1111.1111"),
        ("card", "4111\u20131111\u20131111\u20131111", "4111\u20131111\u20131111\u20131111"),
        ("card", "4111  1111  1111  1111", "4111  1111  1111  1111"),
        ("card", "card-4111111111111111-", "4111111111111111"),
        ("card", "\uff14" + "\uff11" * 15, "\uff14" + "\uff11" * 15),
        ("phone", "+49\u00a0170\u00a01234567", "+49\u00a0170\u00a01234567"),
        ("phone", "_+491701234567_", "+491701234567"),
        ("phone", "(030) 1234567", "(030) 1234567"),
        ("phone", "+491701234567-", "+491701234567"),
        ("iban", "DE89-3704-0044-0532-0130-00", "DE89-3704-0044-0532-0130-00"),
        ("iban", "DE89  3704 0044 0532 0130 00", "DE89  3704 0044 0532 0130 00"),
        ("iban", "AB12 DE89370400440532013000", "DE89370400440532013000"),
        ("ip", "_10.0.0.1_", "10.0.0.1"),
        ("ip", "ip:2001:db8::1,", "2001:db8::1"),
        ("secret", "KEY_AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
        (
            "secret",
            "-----BEGIN PGP PRIVATE KEY BLOCK-----\nx\n-----END PGP PRIVATE KEY BLOCK-----\n",
            "-----BEGIN PGP PRIVATE KEY BLOCK-----\nx\n-----END PGP PRIVATE KEY BLOCK-----",
        ),
        (
            "secret",
            "-----BEGIN PRIVATE KEY-----" + "x" * 70_000,
            "-----BEGIN PRIVATE KEY-----" + "x" * 65_536,
        ),
    ],
)
def test_what_stands_beside_or_within_a_finding_does_not_hide_it(
    rule: str, text: str, expected: str
) -> None:
    assert found(rule, text) == [expected]


FINDINGS = [
    ("email", "bob@example.com"),
    ("phone", "+8613812345678"),
    ("card", "4111111111111111"),
    ("iban", "DE89370400440532013000"),
    ("ip", "10.0.0.1"),
    ("ip", "2001:db8::1"),
    ("secret", "AKIAIOSFODNN7EXAMPLE"),
    ("secret", "sk-proj-abcdefghijklmnopqrstuv"),
]


@pytest.mark.parametrize(("rule", "finding"), FINDINGS)
@pytest.mark.parametrize("before", ["\u8bf7\u8054\u7cfb" * 30, '{"a": "line\\n', "\u00e9"])
@pytest.mark.parametrize("after", ["\u8c22\u8c22\u4f60\u7684" * 30, '\\n"}', "\u3002"])
def test_scripts_without_spaces_and_escaped_line_breaks_hide_nothing(
    rule: str, finding: str, before: str, after: str
) -> None:
    text = before + finding + after

    assert any(finding in one for one in found(rule, text))


def test_two_findings_are_two() -> None:
    assert found("email", "a@example.com b@example.com") == ["a@example.com", "b@example.com"]


def test_an_address_within_an_address_is_found_both_ways() -> None:
    assert found("ip", "::ffff:10.0.0.1") == ["10.0.0.1", "::ffff:10.0.0.1"]


def test_check_digits_by_hand() -> None:
    """79927398713 is the example of the Luhn article; 1 + 97 is the identity of ISO 7064."""
    assert luhn("79927398713")
    assert not any(luhn(f"7992739871{digit}") for digit in "012456789")
    assert mod97("GB82WEST12345698765432")
    assert not mod97("GB28WEST12345698765432")


@given(st.text(alphabet="0123456789", min_size=12, max_size=18), st.sampled_from(" -"))
def test_every_card_is_found_however_it_is_spaced(digits: str, space: str) -> None:
    body = "4" + digits[1:]
    check = next(d for d in "0123456789" if luhn(body + d))
    number = body + check
    spaced = space.join(number[at : at + 4] for at in range(0, len(number), 4))

    assert found("card", f"pay {number} today") == [number]
    assert found("card", f"pay {spaced} today") == [spaced]


@given(st.text())
def test_no_text_breaks_a_rule_and_every_span_lies_within(text: str) -> None:
    for finder in FINDERS.values():
        assert all(0 <= start < end <= len(text) for start, end in finder(text))
