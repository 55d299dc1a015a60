import re

from onlinerl.rollout_store.reference import tables_page
from onlinerl.rollout_store.reference.view_columns import VIEW_COLUMNS
from onlinerl.rollout_store.views.connection import VIEWS
from tests.reference import DOCS

PAGE = DOCS / "tables.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == tables_page.tables_page(), (
        "run: python -m onlinerl.rollout_store.reference.tables_page docs/tables.md"
    )


def test_every_view_and_no_other_is_on_the_page() -> None:
    titles = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "## "]

    assert titles == [f"## `{view}`" for view in VIEWS]


def test_every_description_belongs_to_an_existing_column() -> None:
    page = PAGE.read_text(encoding="utf-8")

    for remarks in VIEW_COLUMNS.values():
        for column, remark in remarks.items():
            assert re.search(rf"\| `{column}` \| `[^|]*` \| {re.escape(remark)} \|", page)
