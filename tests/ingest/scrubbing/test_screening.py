"""Filtering rows before ingest stores them."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from onlinerl.errors import ConfigError
from onlinerl.ingest import metrics
from onlinerl.ingest.scrubbing.config import ScrubConfig, ScrubRule
from onlinerl.ingest.scrubbing.rows import RowScrubber
from onlinerl.ingest.scrubbing.screening import Screening, open_screening
from onlinerl.ingest.scrubbing.scrubber import make_scrubbers
from onlinerl.rollout_store.erasure.erased import ErasedSet, digest
from onlinerl.rollout_store.schema import ErasedRow
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import to_table
from tests.events import NOON, completion, feedback, feedback_row, interaction, interaction_rows
from tests.rollout_store.people import People

RULES = ScrubConfig(rules=(ScrubRule(name="email"),))


@pytest.fixture
def people(tmp_path: Path) -> People:
    return People(tmp_path)


def screening(people: People, *, config: ScrubConfig | None = None) -> Screening:
    scrubber = None
    if config is not None:
        scrubber = RowScrubber(
            config, scrubbers=make_scrubbers(config), bytes_of=lambda token_id: bytes([token_id])
        )
    return Screening(ErasedSet(people.store), scrubber=scrubber)


def erase(people: People, *, session: str) -> None:
    row = ErasedRow(
        erasure_id="e1",
        kind="session",
        digest=digest("session", tenant="acme", name=session),
        before_at=NOON,
        acted_at=NOON,
        ingest_date=NOON.date(),
    )
    people.store.append("erased", to_table([row]))


def test_an_erasure_holds_for_the_very_next_batch(people: People) -> None:
    screen = screening(people)
    rows = to_table(interaction_rows(interaction(session_id="s1")))
    assert screen("interactions", rows).num_rows == 1

    erase(people, session="s1")

    assert screen("interactions", rows).num_rows == 0
    assert metrics.ERASED.labels("interactions")._value.get() >= 1


def test_feedback_and_dead_letters_are_screened_too(people: People) -> None:
    erase(people, session="s1")
    people.breaks(json.dumps({"tenant": "acme", "session_id": "s1"}).encode())
    signal = to_table([feedback_row(feedback(session_id="s1"))])
    letters = people.store.dataset("dead_letters").to_table()

    screen = screening(people, config=RULES)

    assert screen("feedback", signal).num_rows == 0
    assert screen("dead_letters", letters).num_rows == 0


def test_what_is_kept_is_scrubbed(people: People) -> None:
    rows = to_table(interaction_rows(interaction(choices=[completion(list(b"ada@example.org"))])))

    kept = screening(people, config=RULES)("interactions", rows)

    assert kept["mask_spans"].to_pylist() == [[{"start": 0, "end": 15}]]


def test_dead_letters_are_kept_as_they_came(people: People) -> None:
    people.breaks(b"ada@example.org")
    letters = people.store.dataset("dead_letters").to_table()

    kept = screening(people, config=RULES)("dead_letters", letters)

    assert kept["payload"].to_pylist() == [b"ada@example.org"]


def test_no_tokenizer_is_loaded_while_scrubbing_is_off(people: People) -> None:
    assert open_screening(ScrubConfig(), people.store, base_model="/no/such/model")


def test_scrubbing_without_a_tokenizer_does_not_start(people: People, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no tokenizer\.json"):
        open_screening(RULES, people.store, base_model=str(tmp_path))


def test_a_store_without_the_table_has_erased_nobody(tmp_path: Path) -> None:
    erased = ErasedSet(DeltaStore(str(tmp_path)))
    erased.refresh()
    rows = to_table(interaction_rows(interaction(served_at=datetime.now(UTC))))

    assert erased.without("interactions", rows) is rows
