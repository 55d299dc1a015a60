"""Scrubbing: mapping text to tokens, and masking, changing or dropping rows."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer

from onlinerl.errors import ConfigError, DependencyMissing
from onlinerl.ingest.scrubbing import tokens as scrub_tokens
from onlinerl.ingest.scrubbing.config import Action, PresidioConfig, ScrubConfig, ScrubRule
from onlinerl.ingest.scrubbing.presidio import PresidioScrubber, open_analyzer
from onlinerl.ingest.scrubbing.rows import RowScrubber
from onlinerl.ingest.scrubbing.scrubber import (
    RuleScrubber,
    Scrubber,
    make_scrubbers,
    merge_spans,
    replace_spans,
)
from onlinerl.ingest.scrubbing.tokens import TokenBytesOf, TokenText, open_token_bytes
from onlinerl.rollout_store.schema import TokenSpan
from onlinerl.rollout_store.tables.rows import to_table
from tests.events import completion, feedback, feedback_row, interaction, interaction_rows


def letters(token_id: int) -> bytes:
    """A tokenizer with one byte per token."""
    return bytes([token_id])


def ids(text: str) -> list[int]:
    return list(text.encode())


def rule(name: str = "email", action: Action = "mask_span", pattern: str = "") -> ScrubRule:
    return ScrubRule(name=name, action=action, pattern=pattern)


def scrubber(*rules: ScrubRule) -> RowScrubber:
    config = ScrubConfig(rules=rules)
    return RowScrubber(config, scrubbers=make_scrubbers(config), bytes_of=letters)


def one_row(prompt: str, answer: str) -> pa.Table:
    event = interaction(prompt_token_ids=ids(prompt), choices=[completion(ids(answer))])
    return to_table(interaction_rows(event))


def test_a_span_of_text_becomes_a_span_of_tokens() -> None:
    """Tokens of 2, 3 and 1 bytes; the span 'llo' starts inside the first and ends in the second."""
    pieces = [b"he", b"llo", b"!"]
    text = TokenText([0, 1, 2], bytes_of=pieces.__getitem__)

    assert text.text == "hello!"
    assert text.tokens_of([(2, 5)]) == [(1, 2)]
    assert text.tokens_of([(1, 5)]) == [(0, 2)]
    assert text.tokens_of([(5, 6)]) == [(2, 3)]
    assert text.tokens_of([(0, 1), (5, 6)]) == [(0, 1), (2, 3)]
    assert text.tokens_of([]) == []


def test_a_character_in_two_tokens_takes_both() -> None:
    pieces = [b"a", b"\xe2\x82", b"\xac", b"b"]
    text = TokenText(range(4), bytes_of=pieces.__getitem__)

    assert text.text == "a€b"
    assert text.tokens_of([(1, 2)]) == [(1, 3)]


def test_tokens_without_bytes_belong_to_no_span() -> None:
    pieces = [b"", b"a", b"", b"b", b""]
    text = TokenText(range(5), bytes_of=pieces.__getitem__)

    assert text.tokens_of([(0, 1)]) == [(1, 2)]
    assert text.tokens_of([(1, 2)]) == [(3, 4)]


def test_half_a_character_is_one_of_its_own() -> None:
    pieces = [b"\xac", b"x", b"\xe2"]
    text = TokenText(range(3), bytes_of=pieces.__getitem__)

    assert text.tokens_of([(1, 2)]) == [(1, 2)]


CHARACTERS = st.text(alphabet="aé€🎉漢\u0301 ", max_size=12)


@given(st.data())
def test_what_is_not_masked_reveals_no_character_of_a_span(data: st.DataObject) -> None:
    before, secret, after = (data.draw(CHARACTERS) for _ in range(3))
    whole = (before + secret + after).encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=10)) | {0, len(whole)})
    pieces = [whole[a:b] for a, b in pairwise(cuts)] or [b""]
    text = TokenText(range(len(pieces)), bytes_of=pieces.__getitem__)

    spans = text.tokens_of([(len(before), len(before) + len(secret))])

    masked = {n for start, end in spans for n in range(start, end)}
    shown = b"".join(piece for n, piece in enumerate(pieces) if n not in masked)
    first, last = len(before.encode()), len((before + secret).encode())
    at = 0
    for number, piece in enumerate(pieces):
        touches = at < last and at + len(piece) > first and piece != b""
        assert (number in masked) == (touches and first < last)
        at += len(piece)
    assert len(shown) <= len(whole) - (last - first)


@given(st.data())
def test_many_spans_become_what_each_of_them_alone_is(data: st.DataObject) -> None:
    whole = data.draw(st.lists(st.sampled_from([b"a", "é".encode(), "🎉".encode(), b"\xff"])))
    joined = b"".join(whole)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(joined)))) | {0, len(joined)})
    pieces = [joined[a:b] for a, b in pairwise(cuts)]
    text = TokenText(range(len(pieces)), bytes_of=pieces.__getitem__)
    places = st.integers(0, len(text.text))
    spans = data.draw(st.lists(st.tuples(places, places)))

    def tokens_of(span: tuple[int, int]) -> set[int]:
        start, end = (len(text.text[:at].encode("utf-8", "surrogateescape")) for at in span)
        return {n for n, at in enumerate(cuts[:-1]) if at < end and cuts[n + 1] > start < end}

    found = text.tokens_of(spans)
    assert {n for a, b in found for n in range(a, b)} == set().union(*map(tokens_of, spans))
    assert found == merge_spans(found)


def test_text_is_measured_once_however_many_findings_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[int] = []

    def num_bytes(text: str) -> int:
        measured.append(len(text))
        return len(text.encode())

    monkeypatch.setattr(scrub_tokens, "_num_bytes", num_bytes)
    text = TokenText(ids("é 漢 " * 50), bytes_of=letters)

    text.tokens_of([(at, at + 1) for at in range(0, 200, 2)])

    assert sum(measured) <= 200


@pytest.fixture(scope="module")
def real(smollm2_dir: Path) -> tuple[Tokenizer, TokenBytesOf]:
    """A byte-level tokenizer, and the bytes of its tokens."""
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    return tokenizer, open_token_bytes(str(smollm2_dir))


@given(CHARACTERS, CHARACTERS)
def test_with_a_real_tokenizer_a_masked_address_cannot_be_decoded(
    real: tuple[Tokenizer, TokenBytesOf], before: str, after: str
) -> None:
    tokenizer, bytes_of = real
    secret = "jürgen.漢@example.org"
    token_ids = tokenizer.encode(f"{before} {secret} {after}").ids
    text = TokenText(token_ids, bytes_of=bytes_of)
    assert text.text == f"{before} {secret} {after}"

    findings = RuleScrubber([rule()]).find(text.text)
    spans = text.tokens_of((each.start, each.end) for each in findings)

    masked = {n for start, end in spans for n in range(start, end)}
    shown = tokenizer.decode([t for n, t in enumerate(token_ids) if n not in masked])
    assert "example" not in shown
    assert "rgen" not in shown


def test_masks_lie_where_the_finding_is_and_tokens_stay(tmp_path: Path) -> None:
    rows = one_row("I am ada@example.org.", "Hi ada@example.org")

    done = scrubber(rule()).scrub("interactions", rows)

    (row,) = done.rows.to_pylist()
    assert row["prompt_mask_spans"] == [{"start": 5, "end": 20}]
    assert row["mask_spans"] == [{"start": 3, "end": 18}]
    assert row["prompt_token_ids"] == ids("I am ada@example.org.")
    assert done.findings == {("email", "mask_span"): 2}
    assert done.rows.schema == rows.schema
    assert done.num_dropped == 0


def test_masks_that_were_there_are_joined() -> None:
    event = interaction(
        prompt_token_ids=ids("ada@example.org and more"),
        prompt_mask_spans=[TokenSpan(start=10, end=17), TokenSpan(start=20, end=22)],
    )

    done = scrubber(rule()).scrub("interactions", to_table(interaction_rows(event)))

    assert done.rows["prompt_mask_spans"].to_pylist() == [
        [{"start": 0, "end": 17}, {"start": 20, "end": 22}]
    ]


def test_rows_without_a_finding_are_the_same_rows() -> None:
    rows = one_row("nothing", "here")

    done = scrubber(rule()).scrub("interactions", rows)

    assert done.rows is rows
    assert done.rows["mask_spans"].to_pylist() == [None]


def test_drop_stores_no_row_and_keep_only_counts() -> None:
    rows = pa.concat_tables([one_row("from 10.0.0.1", "ok"), one_row("a@example.org", "ok")])

    done = scrubber(rule("ip", "drop"), rule("email", "keep")).scrub("interactions", rows)

    (row,) = done.rows.to_pylist()
    assert row["prompt_token_ids"] == ids("a@example.org")
    assert row["prompt_mask_spans"] is None
    assert done.findings == {("ip", "drop"): 1, ("email", "keep"): 1}
    assert done.num_dropped == 1


def test_one_choice_can_go_and_the_other_stay() -> None:
    event = interaction(
        choices=[
            completion(ids("10.0.0.1"), choice_index=0),
            completion(ids("fine"), choice_index=1),
        ]
    )

    done = scrubber(rule("ip", "drop")).scrub("interactions", to_table(interaction_rows(event)))

    assert done.rows["choice_index"].to_pylist() == [1]


def test_text_of_feedback_gets_a_marker() -> None:
    event = feedback(
        comment="I am ada@example.org, or +49 170 1234567",
        demonstration="write to ada@example.org",
        tags={"from": "ada@example.org", "to": "bob"},
    )
    rows = to_table([feedback_row(event)])

    done = scrubber(rule("email"), rule("phone")).scrub("feedback", rows)

    (row,) = done.rows.to_pylist()
    assert row["comment"] == "I am [removed], or [removed]"
    assert row["demonstration"] == "write to [removed]"
    assert row["tags"] == [("from", "[removed]"), ("to", "bob")]
    assert done.rows.schema == rows.schema


def test_feedback_without_text_is_left_alone() -> None:
    rows = to_table([feedback_row(feedback())])

    assert scrubber(rule()).scrub("feedback", rows).rows is rows


def test_a_part_of_a_table_is_scrubbed_like_a_whole_one() -> None:
    """A slice of a table shares its buffers with rows outside the slice."""
    rows = pa.concat_tables([one_row("aaaa", "bb"), one_row("x a@example.org", "cc")]).slice(1)

    done = scrubber(rule()).scrub("interactions", rows)

    assert done.rows["prompt_mask_spans"].to_pylist() == [[{"start": 2, "end": 15}]]


def test_a_rule_of_one_s_own_needs_only_a_pattern() -> None:
    rows = one_row("order AB-1234 shipped", "ok")

    done = scrubber(rule("order", pattern=r"\b[A-Z]{2}-\d{4}\b")).scrub("interactions", rows)

    assert done.rows["prompt_mask_spans"].to_pylist() == [[{"start": 6, "end": 13}]]


def test_an_empty_match_is_no_finding() -> None:
    assert RuleScrubber([rule("any", pattern="x*")]).find("abc") == []


def test_spans_are_merged_and_replaced_once() -> None:
    assert merge_spans([(4, 6), (0, 2), (1, 4)]) == [(0, 6)]
    assert merge_spans([(0, 1), (2, 3)]) == [(0, 1), (2, 3)]
    assert replace_spans("abcdef", [(1, 2), (1, 4)], marker="*") == "a*ef"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rules": [{"name": "e-mail"}]}, "'e-mail' has no pattern and is none of email, phone"),
        ({"rules": [{"name": "x", "pattern": "("}]}, "is not a regular expression"),
        ({"rules": [{"name": "ip"}, {"name": "ip"}]}, "scrub.rules names ip more than once"),
        ({"rules": [{"name": "ip", "action": "hide"}]}, "Input should be"),
    ],
)
def test_a_wrong_rule_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ScrubConfig.model_validate(values)


def test_scrubbing_is_off_until_something_is_looked_for() -> None:
    assert not ScrubConfig().is_on
    assert ScrubConfig(rules=(rule(),)).is_on
    assert ScrubConfig(presidio=PresidioConfig(entities=("PERSON",))).is_on
    assert make_scrubbers(ScrubConfig()) == []


def test_a_model_without_a_tokenizer_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs the tokenizer of policy\.base_model"):
        open_token_bytes(str(tmp_path))


@dataclass
class Person:
    start: int
    end: int
    entity_type: str = "PERSON"
    score: float = 0.9


class MemoryAnalyzer:
    """Finds one name; refuses the texts that spaCy refuses."""

    def analyze(
        self, text: str, language: str, *, entities: list[str], score_threshold: float
    ) -> Sequence[Person]:
        assert (language, entities, score_threshold) == ("en", ["PERSON"], 0.5)
        text.encode()  # an error where a character is cut in half
        assert len(text) <= 1_000_000
        return [Person(*found.span()) for found in re.finditer("Ada", text)]


def test_presidio_is_one_more_scrubber() -> None:
    config = PresidioConfig(entities=("PERSON",))
    named: Scrubber = PresidioScrubber(MemoryAnalyzer(), config=config)
    rows = RowScrubber(ScrubConfig(presidio=config), scrubbers=[named], bytes_of=letters)

    done = rows.scrub("interactions", one_row("I am Ada, hello", "Ada who?"))

    assert done.rows["prompt_mask_spans"].to_pylist() == [[{"start": 5, "end": 8}]]
    assert done.findings[("presidio.PERSON", "mask_span")] == 2


def test_presidio_is_not_shown_half_a_character() -> None:
    config = PresidioConfig(entities=("PERSON",))
    named: Scrubber = PresidioScrubber(MemoryAnalyzer(), config=config)
    rows = RowScrubber(ScrubConfig(presidio=config), scrubbers=[named], bytes_of=letters)
    cut_off = completion([*b"Hi Ada ", *"漢".encode()[:2]])

    done = rows.scrub("interactions", to_table(interaction_rows(interaction(choices=[cut_off]))))

    assert done.rows["mask_spans"].to_pylist() == [[{"start": 3, "end": 6}]]


def test_presidio_is_shown_a_long_text_in_pieces_and_every_name_is_found_once() -> None:
    named = PresidioScrubber(MemoryAnalyzer(), config=PresidioConfig(entities=("PERSON",)))

    found = named.find("Ada, " * 210_000)

    spans = sorted((each.start, each.end) for each in found)
    assert spans == [(at, at + 3) for at in range(0, 1_050_000, 5)]


def test_presidio_without_its_extra_names_the_extra() -> None:
    with pytest.raises(DependencyMissing, match=r"onlinerl\[presidio\]"):
        open_analyzer(PresidioConfig(entities=("PERSON",)))
