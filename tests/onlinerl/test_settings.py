"""A TOML file becomes settings, or an error that names what to change."""

from pathlib import Path

import pytest

from onlinerl.errors import ConfigError
from onlinerl.settings import load

MINIMAL = '[policy]\nbase_model = "models/base"\n'


def write(tmp_path: Path, text: str = MINIMAL) -> Path:
    path = tmp_path / "onlinerl.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_absent_keys_take_their_defaults(tmp_path: Path) -> None:
    settings = load(write(tmp_path))

    assert settings.gateway.host == "127.0.0.1"
    assert settings.gateway.api_keys == ()
    assert settings.store_root == str(tmp_path / ".onlinerl" / "store")
    assert settings.weights_root == tmp_path / ".onlinerl" / "weights" / "assistant"


def test_relative_paths_start_at_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "base").mkdir(parents=True)
    path = write(tmp_path)
    monkeypatch.chdir("/")

    assert load(path).policy.base_model == str(tmp_path / "models" / "base")


def test_every_path_starts_at_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts").mkdir()
    text = """
[store]
root = "parts/store"
[gateway]
tokenizer = "parts/tokenizer"
keys_file = "parts/keys.json"
spool.dir = "parts/spool"
responses.path = "../responses.sqlite"
tls = { cert = "parts/a.pem", key = "parts/b.pem", client_ca = "parts/c.pem" }
[deploy]
gates.perplexity.reference = "parts/reference.txt"
[scrub]
presidio.model = "parts/model"
"""
    path = write(tmp_path, MINIMAL + text)
    monkeypatch.chdir("/")
    settings, parts = load(path), tmp_path / "parts"

    assert settings.store_root == str(parts / "store")
    gateway = settings.gateway
    assert gateway.tokenizer == str(parts / "tokenizer")
    assert gateway.keys_file == str(parts / "keys.json")
    assert gateway.spool.dir == str(parts / "spool")
    assert gateway.responses.path == str(tmp_path.parent / "responses.sqlite")
    assert gateway.tls.cert == str(parts / "a.pem")
    assert gateway.tls.key == str(parts / "b.pem")
    assert gateway.tls.client_ca == str(parts / "c.pem")
    assert settings.deploy.gates.perplexity.reference == parts / "reference.txt"
    assert settings.scrub.presidio.model == str(parts / "model")
    assert load(path, ["store.root=s3://bucket/store"]).store_root == "s3://bucket/store"


def test_a_link_to_a_secret_is_kept_until_the_secret_is_read(tmp_path: Path) -> None:
    (tmp_path / "keys.json").symlink_to(tmp_path / "of-monday.json")
    path = write(tmp_path, MINIMAL + '[gateway]\nkeys_file = "keys.json"\n')

    assert load(path).gateway.keys_file == str(tmp_path / "keys.json")


def test_a_relative_draft_model_starts_at_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small").mkdir()
    speculative = '[engine.speculative]\nmethod = "draft_model"\ndraft_model = "%s"\n'
    local = write(tmp_path, MINIMAL + speculative % "small")
    monkeypatch.chdir("/")
    from_folder = load(local).engine.speculative.draft_model
    from_hub = load(write(tmp_path, MINIMAL + speculative % "someone/small"))

    assert from_folder == str(tmp_path / "small")
    assert from_hub.engine.speculative.draft_model == "someone/small"
    assert load(write(tmp_path)).engine.speculative.draft_model == ""


def test_a_hub_id_is_not_taken_for_a_path(tmp_path: Path) -> None:
    path = write(tmp_path, '[policy]\nbase_model = "someone/a-model"\n')

    assert load(path).policy.base_model == "someone/a-model"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.learning_rate=3e-6", 3e-6),
        ("trainer.trainable=model.layers", "model.layers"),
        ('trainer.filters=["veto"]', ("veto",)),
    ],
)
def test_overrides_win_over_the_file(tmp_path: Path, override: str, expected: object) -> None:
    settings = load(write(tmp_path), [override])

    name = override.partition("=")[0].removeprefix("trainer.")
    assert getattr(settings.trainer, name) == expected


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        (MINIMAL + "[doorway]\nport = 1\n", [], "doorway: unknown key"),
        (MINIMAL + "[gateway]\nport = 70000\n", [], "gateway.port = 70000"),
        (MINIMAL + "[gateway\n", [], "not valid TOML"),
        ("data_dir = 'x'\n", [], "policy: missing"),
        (MINIMAL, ["trainer.learning_rate"], "section.key=value"),
        (MINIMAL, ["policy.base_model.deep=1"], "base_model is a value"),
        (MINIMAL + "[gateway]\nport = 8001\n", [], "engine.port and gateway.port are both 8001"),
    ],
    ids=["unknown", "range", "syntax", "missing", "no value", "no section", "same port"],
)
def test_an_error_names_the_key_and_its_value(
    tmp_path: Path, text: str, overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load(write(tmp_path, text), overrides)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no configuration file"):
        load(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path)


def test_an_error_never_repeats_a_value_that_may_be_a_secret(tmp_path: Path) -> None:
    pasted = '[[gateway.api_keys]]\nname = "x"\nsha256 = "orl-the-key-itself"\n'
    options = '[store]\nstorage_options = { aws_secret_access_key = "s3cret" }\n'
    ports = "[gateway]\nport = 8001\n"

    for text in (MINIMAL + pasted, MINIMAL + options + ports):
        with pytest.raises(ConfigError) as caught:
            load(write(tmp_path, text))
        assert "the-key-itself" not in str(caught.value)
        assert "s3cret" not in str(caught.value)


def test_the_embedded_broker_needs_a_port_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.port and broker\.bootstrap are both 9092"):
        load(write(tmp_path, MINIMAL + "[gateway]\nport = 9092\n"))
