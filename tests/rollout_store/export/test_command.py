import json
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from onlinerl.cli import main
from onlinerl.errors import ConfigError, ServiceUnavailable
from onlinerl.rollout_store.config import MetricConfig, RewardsConfig
from onlinerl.rollout_store.export import command as export_module
from onlinerl.rollout_store.export.command import Exported, ExportRequest
from onlinerl.rollout_store.export.rows import Format
from onlinerl.rollout_store.export.text import messages_of, text_of
from onlinerl.rollout_store.schema import InteractionEvent, TokenSpan
from onlinerl.rollout_store.snapshots.named import create_snapshot
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.views.connection import connect
from tests.events import NOON, after, completion, feedback, interaction
from tests.rollout_store.views_of import Event, stored

export = partial(export_module.export, actor="me")

REWARDS = RewardsConfig(metrics=(MetricConfig(name="accepted"),))
PROMPT = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi ✓<|im_end|>\n"
OPEN = "<|im_start|>assistant\n"
ASKED = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi ✓"}]


def bytes_tokenizer() -> Tokenizer:
    """One token per byte, and the two markers of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


TOKENIZER = bytes_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def asked(interaction_id: str, *answers: str, **changes: Any) -> InteractionEvent:
    """One ChatML prompt and what was sampled, each answer with the end marker."""
    choices = [
        completion(ids(f"{answer}<|im_end|>"), choice_index=number)
        for number, answer in enumerate(answers)
    ]
    fields: dict[str, Any] = {
        "prompt_token_ids": ids(PROMPT + OPEN),
        "choices": choices,
        "session_id": f"s-{interaction_id}",
    }
    return interaction(interaction_id, **(fields | changes))


@pytest.fixture
def request_of(tmp_path: Path) -> Any:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))

    def make(format: Format, **changes: Any) -> ExportRequest:
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        return ExportRequest(
            **({"format": format, "out": out, "tokenizer": str(tmp_path)} | changes)
        )

    return make


def lines(request: ExportRequest) -> list[dict[str, Any]]:
    text = (request.out / "train.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def exported(
    folder: Path, request: ExportRequest, *events: Event, rewards: RewardsConfig = REWARDS
) -> list[dict[str, Any]]:
    export(stored(folder, events), request, rewards=rewards, now=after(60))
    return lines(request)


def only(row: Mapping[str, Any], *columns: str) -> dict[str, Any]:
    return {name: row[name] for name in columns}


def test_chat_rows_are_the_messages_in_the_tokens(tmp_path: Path, request_of: Any) -> None:
    follow_up = asked(
        "i2",
        "Bye",
        parent_id="i1",
        prefix_length=len(ids(PROMPT + OPEN + "Hello<|im_end|>")),
        prompt_token_ids=ids("\n<|im_start|>user\nThanks<|im_end|>\n" + OPEN),
        served_at=after(1),
    )

    first, second = exported(tmp_path, request_of("chat"), asked("i1", "Hello"), follow_up)
    assert first["messages"] == [*ASKED, {"role": "assistant", "content": "Hello"}]
    assert second["messages"] == [
        *first["messages"],
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Bye"},
    ]
    assert (first["consent"], first["origin"], first["interaction_id"]) == ("train", "served", "i1")


def test_prompts_without_chatml_are_left_out_of_chat_and_counted(
    tmp_path: Path, request_of: Any
) -> None:
    plain = asked("i1", "Hello", prompt_token_ids=ids("Say hello: "))
    store = stored(tmp_path, [plain, asked("i2", "Hello")])

    assert export(store, request_of("chat"), rewards=REWARDS) == Exported(
        num_rows=1, num_left_out=1
    )
    store, refused = stored(tmp_path / "2", [plain]), request_of("chat", out=tmp_path / "refused")
    for _ in range(2):  # nothing is left that a second attempt would stumble over
        with pytest.raises(ConfigError, match="none of 1 rows can be written as chat"):
            export(store, refused, rewards=REWARDS)
    assert not refused.out.exists()


@pytest.mark.parametrize(
    "prompt",
    [PROMPT, OPEN, "x" + PROMPT + OPEN, PROMPT + "x" + OPEN, "<|im_start|>user\nno end" + OPEN],
)
def test_messages_are_never_guessed(prompt: str) -> None:
    assert messages_of(PROMPT + OPEN) == ASKED
    assert messages_of(prompt) is None


def test_sft_rows_are_text_and_demonstrations_come_with_them(
    tmp_path: Path, request_of: Any
) -> None:
    shown = feedback("f1", value=None, demonstration="Welcome!")

    rows = exported(tmp_path, request_of("trl-sft"), asked("i1", "Hello"), shown)
    assert [only(row, "prompt", "completion", "origin") for row in rows] == [
        {"prompt": PROMPT + OPEN, "completion": "Hello<|im_end|>", "origin": "served"},
        {"prompt": PROMPT + OPEN, "completion": "Welcome!", "origin": "demonstration"},
    ]


def test_kto_rows_say_yes_above_the_boundary_and_no_below(tmp_path: Path, request_of: Any) -> None:
    events = [asked(f"i{n}", "Hello", served_at=after(n)) for n in range(4)]
    given = [feedback(f"f{n}", interaction_id=f"i{n}", value=v) for n, v in enumerate((1, 0, 0.5))]

    rows = exported(tmp_path, request_of("trl-kto", boundary=0.5), *events, *given)
    assert [only(row, "interaction_id", "label", "completion") for row in rows] == [
        {"interaction_id": "i0", "label": True, "completion": "Hello<|im_end|>"},
        {"interaction_id": "i1", "label": False, "completion": "Hello<|im_end|>"},
    ]


def test_dpo_rows_pair_the_best_with_the_worst_answer_and_with_a_demonstration(
    tmp_path: Path, request_of: Any
) -> None:
    events: list[Event] = [
        asked("i1", "a", "b", "c"),
        feedback("f1", choice_index=0, value=0.5),
        feedback("f2", choice_index=1, value=1.0),
        feedback("f3", choice_index=2, value=0.0),
        asked("i2", "a", "b", served_at=after(1)),
        feedback("f4", interaction_id="i2", value=1.0),
        asked("i3", "d", served_at=after(2)),
        feedback("f5", interaction_id="i3", value=None, demonstration="e"),
    ]

    rows = exported(tmp_path, request_of("trl-dpo"), *events)
    assert [only(row, "chosen", "rejected") for row in rows] == [
        {"chosen": "b<|im_end|>", "rejected": "c<|im_end|>"},
        {"chosen": "e", "rejected": "d<|im_end|>"},
    ]


def test_verl_rows_have_its_five_columns(tmp_path: Path, request_of: Any) -> None:
    (row,) = exported(tmp_path, request_of("verl"), asked("i1", "Hello"), feedback(value=0.25))

    assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert row["data_source"] == "onlinerl/assistant"
    assert row["prompt"] == ASKED
    assert row["reward_model"] == {"style": "rule", "ground_truth": "Hello"}
    assert only(row["extra_info"], "reward", "answer") == {"reward": 0.25, "answer": "Hello"}


def test_token_rows_are_segments_with_the_rewards_of_their_turns(
    tmp_path: Path, request_of: Any
) -> None:
    masked = completion([7, 8], mask_spans=[TokenSpan(start=1, end=2)])
    second = interaction(
        "i2", parent_id="i1", prefix_length=5, prompt_token_ids=[4], served_at=after(1)
    )
    events: list[Event] = [interaction(choices=[masked]), second, feedback(interaction_id="i2")]

    (row,) = exported(tmp_path, request_of("tokens", tokenizer=""), *events)
    assert row["input_ids"] == [1, 2, 3, 7, 0, 4, 7, 8]
    assert row["completion_mask"] == [0, 0, 0, 1, 0, 0, 1, 1]
    assert row["logprobs"] == [None, None, None, -0.5, None, None, -0.5, -0.5]
    assert [(s["interaction_id"], s["start"], s["end"], s["reward"]) for s in row["spans"]] == [
        ("i1", 3, 5, None),
        ("i2", 6, 8, 1.0),
    ]


def test_masked_tokens_never_become_text(tmp_path: Path, request_of: Any) -> None:
    secret = "Hi ✓"
    start = len(ids(PROMPT.partition(secret)[0]))
    hidden = [TokenSpan(start=start, end=start + len(ids(secret)))]
    answer = completion(ids("call 555 now<|im_end|>"), mask_spans=[TokenSpan(start=5, end=8)])
    event = asked("i1", prompt_mask_spans=hidden, choices=[answer])

    for format in ("chat", "trl-sft", "verl"):
        (row,) = exported(tmp_path / format, request_of(format), event, feedback())
        shown = json.dumps(row)
        assert "✓" not in str(row)
        assert "555" not in shown
        assert "call [masked] now" in shown


def test_each_run_of_masked_tokens_is_one_placeholder() -> None:
    assert text_of(TOKENIZER, ids("abcdef"), [1, 1, 0, 1, 0, 0]) == "[masked]c[masked]ef"


def test_rows_without_consent_to_train_need_a_flag_and_go_into_chat_only(
    tmp_path: Path, request_of: Any
) -> None:
    events = [
        asked("i1", "a"),
        asked("i2", "b", consent="log", served_at=after(1)),
        asked("i3", "c", consent="none", served_at=after(2)),
    ]
    store = stored(tmp_path, events)
    plain, flagged = request_of("chat"), request_of("chat", out=tmp_path / "log", include_log=True)
    export(store, plain, rewards=REWARDS)
    export(store, flagged, rewards=REWARDS)

    assert [row["interaction_id"] for row in lines(plain)] == ["i1"]
    assert [only(row, "interaction_id", "consent") for row in lines(flagged)] == [
        {"interaction_id": "i1", "consent": "train"},
        {"interaction_id": "i2", "consent": "log"},
    ]
    for format in ("trl-sft", "trl-kto", "trl-dpo", "verl", "tokens"):
        with pytest.raises(ConfigError, match="may not be learned from"):
            export(store, request_of(format, include_log=True), rewards=REWARDS)


def test_a_turn_after_one_without_consent_is_not_exported(tmp_path: Path, request_of: Any) -> None:
    private = interaction("i1", consent="log")
    child = interaction("i2", parent_id="i1", prefix_length=5, served_at=after(1))

    assert exported(tmp_path, request_of("trl-sft"), private, child) == []


def test_untrainable_rows_and_shadow_answers_are_not_exported(
    tmp_path: Path, request_of: Any
) -> None:
    events = [asked("i1", "a", trainable=False), asked("i2", "b", arm="shadow")]

    assert exported(tmp_path, request_of("trl-sft"), *events) == []


def test_a_window_a_policy_and_a_snapshot_choose_rows(tmp_path: Path, request_of: Any) -> None:
    events = [asked(f"i{n}", "a", served_at=NOON + timedelta(days=n)) for n in range(4)]
    store = stored(tmp_path, [*events, asked("j1", "b", policy="other")])
    create_snapshot(store, "then", actor="me", reason="", at=NOON)
    stored(tmp_path, [asked("k1", "c", served_at=NOON + timedelta(days=1))])
    day = timedelta(days=1)

    def found(**changes: Any) -> list[str]:
        request = request_of("trl-sft", **changes)
        export(store, request, rewards=REWARDS, now=NOON + day)
        return sorted(row["interaction_id"] for row in lines(request))

    assert found(since=NOON + day, until=NOON + 3 * day) == ["i1", "i2", "k1"]
    assert found(policy="other") == ["j1"]
    assert found(snapshot="then", since=NOON + day) == ["i1", "i2", "i3"]
    with pytest.raises(ConfigError, match="there is no snapshot 'now'"):
        found(snapshot="now")


def test_the_size_of_a_run_changes_nothing(
    tmp_path: Path, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = interaction("i0", served_at=NOON)
    turns = [
        interaction(
            f"i{n}",
            parent_id=f"i{n - 1}",
            prefix_length=5 + 3 * (n - 1),
            prompt_token_ids=[n],
            served_at=NOON + timedelta(days=n),
        )
        for n in range(1, 5)
    ]
    store = stored(tmp_path, [first, *turns, interaction("j", session_id="s9")])
    whole, parts = request_of("tokens"), request_of("tokens", out=tmp_path / "parts")
    export(store, whole, rewards=REWARDS)
    monkeypatch.setattr(export_module, "_ROWS_PER_RUN", 1)
    export(store, parts, rewards=REWARDS)

    assert lines(parts) == lines(whole)
    assert [row["segment_id"] for row in lines(whole)] == ["i0:0", "j:0"]


@pytest.mark.parametrize("format", ["chat", "trl-sft", "trl-kto", "trl-dpo", "verl", "tokens"])
def test_a_dataset_folder_loads_with_hugging_face_datasets(
    tmp_path: Path, request_of: Any, format: Format
) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    labels = [feedback("f1", choice_index=0), feedback("f2", choice_index=1, value=0.25)]
    events: list[Event] = [asked("i1", "a", "b"), *labels]
    request = request_of(format, layout="dataset")
    export(stored(tmp_path, [*events, asked("i2", "c")]), request, rewards=REWARDS)
    same = request_of(format, out=tmp_path / "lines")
    export(stored(tmp_path / "2", [*events, asked("i2", "c")]), same, rewards=REWARDS)

    loaded = datasets.load_dataset(str(request.out), cache_dir=str(tmp_path / "cache"))
    assert list(loaded) == ["train"]
    assert len(loaded["train"]) >= 1
    assert [dict(row) for row in loaded["train"]] == lines(same)
    assert not list(request.out.rglob("*.partial"))


def test_an_export_of_nothing_is_an_empty_dataset_with_columns(
    tmp_path: Path, request_of: Any
) -> None:
    request = request_of("trl-sft", layout="dataset", policy="nobody")
    done = export(stored(tmp_path, [asked("i1", "a")]), request, rewards=REWARDS)

    assert done == Exported(num_rows=0, num_left_out=0)
    assert (request.out / "data" / "train-00000.parquet").is_file()
    assert "data/train-*.parquet" in (request.out / "README.md").read_text()


def test_a_folder_that_holds_something_is_refused(tmp_path: Path, request_of: Any) -> None:
    request = request_of("trl-sft")
    request.out.mkdir()
    (request.out / "mine").touch()

    with pytest.raises(ConfigError, match="is not an empty folder"):
        export(stored(tmp_path, [asked("i1", "a")]), request, rewards=REWARDS)


@pytest.mark.parametrize("layout", ["jsonl", "dataset"])
@pytest.mark.parametrize("refused", ["export", "export.done"])
def test_an_export_without_its_audit_row_leaves_no_copy(
    tmp_path: Path, request_of: Any, monkeypatch: pytest.MonkeyPatch, layout: str, refused: str
) -> None:
    request = request_of("trl-sft", layout=layout)
    seen = {}

    def record(*_: object, action: str, **__: object) -> None:
        seen[action] = any(request.out.iterdir())
        if action == refused:
            raise ServiceUnavailable("cannot append to table audit")

    monkeypatch.setattr(export_module, "record_act", record)
    with pytest.raises(ServiceUnavailable, match="audit"):
        export(stored(tmp_path, [asked("i1", "a")]), request, rewards=REWARDS)
    assert not request.out.exists()
    assert not seen["export"]
    assert list(seen)[-1] == refused


def test_a_failed_export_leaves_nothing(
    tmp_path: Path, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(export_module, "_export_run", fail)
    for layout in ("jsonl", "dataset"):
        request = request_of("trl-sft", layout=layout)
        with pytest.raises(OSError, match="disk full"):
            export(stored(tmp_path / layout, [asked("i1", "a")]), request, rewards=REWARDS)
        assert not request.out.exists()


def test_a_failed_export_removes_only_its_own_files(
    tmp_path: Path, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = request_of("trl-sft"), request_of("trl-sft", out=tmp_path / "second")
    first.out.mkdir()
    store = stored(tmp_path, [asked("i1", "a")])

    def fail(*_: object, **__: object) -> None:
        (second.out / "mine").touch()
        raise OSError("disk full")

    second.out.mkdir()
    monkeypatch.setattr(export_module, "_export_run", fail)
    for request in (first, second):
        with pytest.raises(OSError, match="disk full"):
            export(store, request, rewards=REWARDS)
        (second.out / "mine").unlink()
    assert list(first.out.iterdir()) == list(second.out.iterdir()) == []


@pytest.mark.parametrize("tokenizer", ["", "/nowhere"])
def test_text_needs_a_tokenizer(tmp_path: Path, request_of: Any, tokenizer: str) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json .*--tokenizer"):
        export(
            stored(tmp_path, [asked("i1", "a")]),
            request_of("chat", tokenizer=tokenizer),
            rewards=REWARDS,
        )


def test_an_export_without_tables_is_refused(tmp_path: Path, request_of: Any) -> None:
    with pytest.raises(ConfigError, match="there are no tables"):
        export(DeltaStore(str(tmp_path / "none")), request_of("tokens"), rewards=REWARDS)


def test_the_command_prints_its_result_and_writes_audit_rows(
    tmp_path: Path, request_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[Event] = [
        asked("i1", "a"),
        feedback(value=0.75),
        asked("i2", "b"),
        feedback("f2", value=0.25),
    ]
    store = stored(tmp_path, events)
    request = request_of("trl-kto")
    config = tmp_path / "onlinerl.toml"
    config.write_text(
        f"[policy]\nbase_model = '{tmp_path}'\n[store]\nroot = '{store.root}'\n"
        "[rewards]\nclip = [0.0, 1.0]\nmetrics = [{ name = 'accepted' }]\n"
    )
    choices = ["--format", "trl-kto", "--out", str(request.out), "--actor", "me"]

    assert main(["export", "--config", str(config), *choices]) == 0
    assert f"1 rows in {request.out}" in capsys.readouterr().out
    # the boundary is the middle of the clip, 0.5: the last feedback on i1 is below it
    assert [row["label"] for row in lines(request)] == [False]
    with connect(store, rewards=REWARDS) as connection:
        begun, done = connection.execute(
            "SELECT actor, action, subject, detail FROM audit ORDER BY acted_at"
        ).fetchall()
    assert begun[:3] == ("me", "export", str(request.out))
    assert json.loads(begun[3])["format"] == "trl-kto"
    assert done[:3] == ("me", "export.done", str(request.out))
    assert json.loads(done[3])["num_rows"] == 1


def test_the_command_line_reaches_every_choice(tmp_path: Path) -> None:
    store = stored(tmp_path, [interaction("i1"), interaction("i2", served_at=after(5))])
    config = tmp_path / "onlinerl.toml"
    config.write_text(f"[policy]\nname = 'assistant'\n[store]\nroot = '{store.root}'\n")
    out = tmp_path / "out"
    window = ["--since", "2026-01-02T12:01", "--until", "2026-01-02T13:10+01:00"]
    choices = ["--format", "tokens", "--layout", "dataset", "--policy", "assistant"]

    assert main(["export", "--config", str(config), "--out", str(out), *choices, *window]) == 0
    table = parquet.read_table(out / "data" / "train-00000.parquet")
    assert table["segment_id"].to_pylist() == ["i2:0"]
    card = (out / "README.md").read_text()
    assert "served from 2026-01-02 12:01:00+00:00 until 2026-01-02 13:10:00+01:00" in card
