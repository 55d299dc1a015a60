import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onlinerl.rollout_store.holdout import is_heldout, is_heldout_sql


def test_the_first_eight_digits_of_the_hash_decide() -> None:
    # md5("a") = 0cc175b9..., 0x0cc175b9 / 2**32 = 0.0498...
    assert is_heldout("a", fraction=0.05)
    assert not is_heldout("a", fraction=0.0498)


def test_the_fractions_zero_and_one() -> None:
    assert not any(is_heldout(str(each), fraction=0.0) for each in range(100))
    assert all(is_heldout(str(each), fraction=1.0) for each in range(100))


def test_the_share_is_about_the_fraction() -> None:
    share = sum(is_heldout(str(each), fraction=0.15) for each in range(10_000)) / 10_000

    assert share == pytest.approx(0.15, abs=0.015)


@settings(deadline=None)
@given(
    sessions=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"))),
    fraction=st.floats(0, 1),
)
def test_sql_and_python_agree(sessions: list[str], fraction: float) -> None:
    with duckdb.connect() as connection:
        rows = connection.execute(
            f"SELECT s, {is_heldout_sql('s', fraction=fraction)} FROM (SELECT unnest(?) AS s)",
            [sessions],
        ).fetchall()

    assert all(held == is_heldout(session, fraction=fraction) for session, held in rows)
