"""`docs/tables.md`, made from the schema and the views themselves.

`python -m onlinerl.rollout_store.tables_page > docs/tables.md`
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import BaseModel

from onlinerl.rollout_store.config import RewardsConfig
from onlinerl.rollout_store.schema import TABLES
from onlinerl.rollout_store.store import DeltaStore
from onlinerl.rollout_store.views import VIEWS, connect

_TITLE = """\
# Tables and views

Made by `python -m onlinerl.rollout_store.tables_page`; a test fails when it is out of date.

Tables are Delta Lake tables under `[store].root`, partitioned by `ingest_date`. Read them through
the views, `onlinerl query "SELECT …"`: a view has the same columns as its table, without rows that
were stored twice.
"""

_VIEWS_ABOUT = {
    "rewards": "One row per completion that has feedback of a configured metric, in `[rewards]`. "
    "What has no row is unlabelled, which is not a reward of 0. Feedback counts only on "
    "interactions and sessions of its own `tenant`.",
    "sessions": "One row per conversation or agent run.",
    "prompts": "The whole prompt of an interaction, with the tokens it shares with its parent. An "
    "interaction whose parent is not in the tables has no row.",
    "segments": "Training sequences. Interactions whose prompt is exactly the parent's prompt and "
    "completion plus something new are merged, if policy, session, temperature and logprob mode "
    "are the same. Every sampled token is in exactly one segment with mask 1. Only completions "
    "count that are `trainable` and whose own and all earlier interactions in the prompt have "
    "consent `train`.",
}

VIEW_COLUMNS = {
    "rewards": {
        "interaction_id": "The interaction.",
        "choice_index": "The completion of it.",
        "session_id": "Its session.",
        "tenant": "Its tenant.",
        "reward": "Clipped sum over metrics.",
        "num_feedback": "Signals that count.",
        "labelled_at": "When the newest of them was given.",
    },
    "sessions": {
        "session_id": "Unique within a tenant.",
        "tenant": "Whose session it is.",
        "num_interactions": "Requests.",
        "num_completions": "Answers; more than requests where one asked for several.",
        "num_tokens": "Sampled tokens.",
        "first_at": "First `served_at`.",
        "last_at": "Last `served_at`.",
        "num_labelled": "Completions that have a reward.",
        "reward": "Mean reward of those; null when there is none.",
    },
    "prompts": {
        "interaction_id": "The interaction.",
        "tenant": "Its tenant.",
        "full_prompt_token_ids": "Every token that was in the prompt, in order.",
    },
    "segments": {
        "segment_id": "First completion, `interaction_id:choice_index`; stays as it grows.",
        "session_id": "Session of all of it.",
        "tenant": "Tenant of all of it.",
        "policy": "Policy of all of it.",
        "temperature": "At which all of it was sampled.",
        "logprob_mode": "Of all its logprobs.",
        "token_ids": "Prompts and completions, as the last interaction saw them.",
        "logprobs": "Of the served distribution; null where `loss_mask` is 0.",
        "loss_mask": "1 where the policy sampled the token.",
        "spans": "Which tokens are whose, in order; `end` is exclusive.",
        "num_sampled": "Tokens with mask 1.",
    },
}


def tables_page() -> str:
    """The page as Markdown."""
    with TemporaryDirectory() as folder:
        store = DeltaStore(folder)
        with connect(store, rewards=RewardsConfig()) as connection:
            types = {
                view: connection.execute(
                    "SELECT column_name, data_type FROM duckdb_columns() "
                    "WHERE table_name = ? ORDER BY column_index",
                    [view],
                ).fetchall()
                for view in VIEWS
            }
    sections = [_TITLE]
    for view in VIEWS:
        sections.append("\n".join(_section(view, types[view])))
    return "\n".join(sections)


def _section(view: str, columns: list[tuple[str, str]]) -> Iterator[str]:
    row_type = TABLES.get(view)
    about = _VIEWS_ABOUT[view] if row_type is None else row_type.__doc__ or ""
    about = " ".join(about.split()).removeprefix(f"Table `{view}`: ")
    yield f"## `{view}`\n\n{about[0].upper()}{about[1:]}\n"
    yield "| column | type | |\n|---|---|---|"
    for name, data_type in columns:
        known = VIEW_COLUMNS[view][name] if row_type is None else _field_text(row_type, name)
        yield f"| `{name}` | `{data_type}` | {known} |"
    yield ""


def _field_text(row_type: type[BaseModel], name: str) -> str:
    return " ".join((row_type.model_fields[name].description or "").split())


if __name__ == "__main__":
    page = tables_page()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page, encoding="utf-8")
    else:
        sys.stdout.write(page)
