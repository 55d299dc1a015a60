from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onlinerl.rollout_store.schema import InteractionEvent, TokenSpan
from tests.events import after, completion, interaction
from tests.rollout_store.views_of import views_of

COLUMNS = "segment_id, token_ids, loss_mask, num_sampled"


def turn(number: int, **changes: Any) -> InteractionEvent:
    """Turn n of a session: root 1 2 3 -> 7 8, then each adds its own number and samples 7 8."""
    if number == 1:
        return interaction("i1", **changes)
    fields: dict[str, Any] = {
        "parent_id": f"i{number - 1}",
        "prefix_length": 5 + 3 * (number - 2),
        "prompt_token_ids": [number],
        "served_at": after(number),
    }
    return interaction(**({"interaction_id": f"i{number}"} | fields | changes))


def segments(folder: Path, *events: InteractionEvent) -> list[tuple[object, ...]]:
    connection = views_of(folder, *events)
    return connection.execute(f"SELECT {COLUMNS} FROM segments ORDER BY segment_id").fetchall()


def prompts(folder: Path, *events: InteractionEvent) -> dict[str, list[int]]:
    rows = views_of(folder, *events).execute(
        "SELECT interaction_id, full_prompt_token_ids FROM prompts"
    )
    return dict(rows.fetchall())


def test_a_lone_interaction_is_a_segment(tmp_path: Path) -> None:
    assert segments(tmp_path, turn(1)) == [("i1:0", [1, 2, 3, 7, 8], [0, 0, 0, 1, 1], 2)]


def test_turns_that_extend_each_other_are_one_segment(tmp_path: Path) -> None:
    tokens = [1, 2, 3, 7, 8, 2, 7, 8, 3, 7, 8]
    mask = [0, 0, 0, 1, 1, 0, 1, 1, 0, 1, 1]

    assert segments(tmp_path, turn(3), turn(1), turn(2)) == [("i1:0", tokens, mask, 6)]


def test_spans_and_logprobs_belong_to_the_right_tokens(tmp_path: Path) -> None:
    second = turn(2, choices=[completion([8, 9], logprobs=[-0.25, -1.0])])
    connection = views_of(tmp_path, turn(1), second)

    logprobs, spans = connection.execute("SELECT logprobs, spans FROM segments").fetchone() or ()
    assert logprobs == [None, None, None, -0.5, -0.5, None, -0.25, -1.0]
    assert spans == [
        {"interaction_id": "i1", "choice_index": 0, "start": 3, "end": 5},
        {"interaction_id": "i2", "choice_index": 0, "start": 6, "end": 8},
    ]


def test_a_second_child_starts_its_own_segment_with_the_past_as_prompt(tmp_path: Path) -> None:
    again = turn(2, interaction_id="j2", served_at=after(9), prompt_token_ids=[5])

    assert segments(tmp_path, turn(1), turn(2), again) == [
        ("i1:0", [1, 2, 3, 7, 8, 2, 7, 8], [0, 0, 0, 1, 1, 0, 1, 1], 4),
        ("j2:0", [1, 2, 3, 7, 8, 5, 7, 8], [0, 0, 0, 0, 0, 0, 1, 1], 2),
    ]


def test_a_prompt_that_keeps_only_part_of_the_past_starts_a_segment(tmp_path: Path) -> None:
    cut = turn(2, prefix_length=4)
    later = turn(3, prefix_length=7)

    assert segments(tmp_path, turn(1), cut, later) == [
        ("i1:0", [1, 2, 3, 7, 8], [0, 0, 0, 1, 1], 2),
        ("i2:0", [1, 2, 3, 7, 2, 7, 8, 3, 7, 8], [0, 0, 0, 0, 0, 1, 1, 0, 1, 1], 4),
    ]
    assert prompts(tmp_path / "2", turn(1), cut, later)["i3"] == [1, 2, 3, 7, 2, 7, 8, 3]


def test_each_choice_is_trained_once_and_one_of_them_is_continued(tmp_path: Path) -> None:
    two = interaction("i1", choices=[completion([7]), completion([8, 9], choice_index=1)])
    child = turn(2, parent_choice=1)

    assert segments(tmp_path, two, child) == [
        ("i1:0", [1, 2, 3, 7], [0, 0, 0, 1], 1),
        ("i1:1", [1, 2, 3, 8, 9, 2, 7, 8], [0, 0, 0, 1, 1, 0, 1, 1], 4),
    ]


@pytest.mark.parametrize(
    "changes",
    [{"policy": "other"}, {"sampling": {"temperature": 1.0}}, {"logprob_mode": "raw"}],
    ids=["policy", "temperature", "logprob mode"],
)
def test_a_segment_has_one_policy_and_one_way_of_sampling(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    assert [row[0] for row in segments(tmp_path, turn(1), turn(2, **changes))] == ["i1:0", "i2:0"]


def test_an_untrainable_turn_is_context_and_never_a_target(tmp_path: Path) -> None:
    bad = turn(2, trainable=False, untrainable_reason="x", choices=[completion(logprobs=[])])

    assert segments(tmp_path, turn(1), bad, turn(3)) == [
        ("i1:0", [1, 2, 3, 7, 8], [0, 0, 0, 1, 1], 2),
        ("i3:0", [1, 2, 3, 7, 8, 2, 7, 8, 3, 7, 8], [0] * 9 + [1, 1], 2),
    ]


@pytest.mark.parametrize("withheld", [1, 2])
def test_no_segment_contains_a_turn_without_consent(tmp_path: Path, withheld: int) -> None:
    turns = [turn(n, **({"consent": "log"} if n == withheld else {})) for n in (1, 2, 3)]

    assert len(segments(tmp_path, *turns)) == withheld - 1


def test_an_interaction_whose_parent_is_missing_has_no_prompt_and_no_segment(
    tmp_path: Path,
) -> None:
    assert segments(tmp_path / "1", turn(2), turn(3)) == []
    assert prompts(tmp_path / "2", turn(2), turn(3)) == {}


def test_a_parent_of_another_tenant_is_no_parent(tmp_path: Path) -> None:
    assert [row[0] for row in segments(tmp_path, turn(1), turn(2, tenant="globex"))] == ["i1:0"]


def test_a_cycle_of_parents_terminates(tmp_path: Path) -> None:
    circle = [turn(2, parent_id="i3"), turn(3), turn(4, parent_id="i4")]

    assert segments(tmp_path, *circle) == []


def test_an_empty_completion_is_no_segment(tmp_path: Path) -> None:
    assert segments(tmp_path, interaction(choices=[completion([])])) == []


def test_masked_tokens_stay_in_place_and_are_not_targets(tmp_path: Path) -> None:
    first = turn(1, choices=[completion([7, 8], mask_spans=[TokenSpan(start=1, end=2)])])
    second = turn(2, prompt_mask_spans=[TokenSpan(start=0, end=1)])
    connection = views_of(tmp_path, first, second)

    rows = connection.execute(
        "SELECT token_ids, loss_mask, masked, logprobs, num_sampled FROM segments"
    )
    assert rows.fetchall() == [
        (
            [1, 2, 3, 7, 8, 2, 7, 8],
            [0, 0, 0, 1, 0, 0, 1, 1],
            [0, 0, 0, 0, 1, 1, 0, 0],
            [None, None, None, -0.5, None, None, -0.5, -0.5],
            3,
        )
    ]
    masked = connection.execute("SELECT interaction_id, masked FROM prompts ORDER BY 1")
    assert masked.fetchall() == [("i1", [0, 0, 0]), ("i2", [0, 0, 0, 0, 1, 1])]


def test_a_completion_that_is_masked_whole_is_context(tmp_path: Path) -> None:
    spans = [TokenSpan(start=0, end=1), TokenSpan(start=1, end=2)]
    first = turn(1, choices=[completion([7, 8], mask_spans=spans)])

    assert segments(tmp_path / "1", first) == []
    assert segments(tmp_path / "2", first, turn(2)) == [
        ("i2:0", [1, 2, 3, 7, 8, 2, 7, 8], [0, 0, 0, 0, 0, 0, 1, 1], 2)
    ]


def test_a_masked_span_that_a_prefix_cuts_hides_only_the_remaining_tokens(tmp_path: Path) -> None:
    first = turn(1, choices=[completion([7, 8], mask_spans=[TokenSpan(start=0, end=2)])])
    cut = turn(2, prefix_length=4)

    rows = views_of(tmp_path, first, cut).execute("SELECT token_ids, masked FROM segments")
    assert rows.fetchall() == [([1, 2, 3, 7, 2, 7, 8], [0, 0, 0, 1, 0, 0, 0])]


@st.composite
def conversations(draw: st.DrawFn) -> list[InteractionEvent]:
    """A forest of interactions whose tokens are all different, with everything that may vary."""
    events: list[InteractionEvent] = []
    past: list[tuple[str, int, list[int]]] = []
    token = iter(range(10_000))
    for number in range(draw(st.integers(1, 7))):
        parent = draw(st.sampled_from([None, *past]))
        keep = 0 if parent is None else len(parent[2]) - draw(st.sampled_from([0, 0, 0, 1]))
        new = [next(token) for _ in range(draw(st.integers(1, 2)))]
        choices = [
            completion([next(token) for _ in range(draw(st.integers(0, 2)))], choice_index=c)
            for c in range(draw(st.integers(1, 2)))
        ]
        prompt = (parent[2][:keep] if parent else []) + new
        events.append(
            interaction(
                f"i{number}",
                parent_id=parent and parent[0],
                parent_choice=parent[1] if parent else 0,
                prefix_length=keep,
                prompt_token_ids=new,
                served_at=after(number),
                trainable=draw(st.sampled_from([True, True, True, False])),
                choices=choices,
            )
        )
        past += [(f"i{number}", c.choice_index, prompt + c.completion_token_ids) for c in choices]
    return events


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=conversations())
def test_every_trainable_token_is_sampled_exactly_once_after_its_true_prompt(
    tmp_path_factory: pytest.TempPathFactory, events: list[InteractionEvent]
) -> None:
    connection = views_of(tmp_path_factory.mktemp("tables"), *events)
    rows = connection.execute(
        "SELECT token_ids, loss_mask, logprobs, spans FROM segments"
    ).fetchall()
    prompt_of = dict(
        connection.execute("SELECT interaction_id, full_prompt_token_ids FROM prompts").fetchall()
    )

    wanted = sorted(
        t for e in events if e.trainable for c in e.choices for t in c.completion_token_ids
    )
    sampled: list[int] = []
    for tokens, mask, logprobs, spans in rows:
        assert len(tokens) == len(mask) == len(logprobs)
        assert [value is not None for value in logprobs] == [bool(bit) for bit in mask]
        assert sum(span["end"] - span["start"] for span in spans) == sum(mask)
        for span in spans:
            assert tokens[: span["start"]] == prompt_of[span["interaction_id"]]
            sampled += tokens[span["start"] : span["end"]]
    assert sorted(sampled) == wanted
