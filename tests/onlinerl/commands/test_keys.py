"""`onlinerl keys` adds, lists and revokes; the key itself is printed once and stored nowhere."""

import re
from pathlib import Path

import pytest

from onlinerl.cli import main
from onlinerl.commands.keys import key_hash
from onlinerl.serving.access.key_file import load_keys
from onlinerl.settings import load


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "onlinerl.toml"
    path.write_text(
        'data_dir = "data"\npolicy = { base_model = "m" }\n[[gateway.api_keys]]\n'
        f'name = "fixed"\nsha256 = "{"a" * 64}"\n'
    )
    return path


def run_keys(config: Path, *arguments: str) -> int:
    return main(["keys", arguments[0], "--config", str(config), *arguments[1:]])


def test_a_key_is_printed_once_and_only_its_hash_is_stored(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--tenant", "shop", "--consent", "train", "--policy", "assistant")
    assert run_keys(config, "add", "shop", *arguments, "--tokens-per-minute", "9000") == 0
    printed = capsys.readouterr()
    key = printed.err.strip().rpartition(" ")[2]
    (entry,) = load_keys(config.parent / "data" / "keys.json")

    assert re.fullmatch(r"orl-[\w-]{43}", key)
    assert (entry.name, entry.tenant, entry.consent) == ("shop", "shop", "train")
    assert (entry.policies, entry.limits.tokens_per_minute) == (("assistant",), 9000)
    assert entry.sha256 == key_hash(key)
    files = [path.read_text() for path in config.parent.rglob("*") if path.is_file()]
    assert not any(key in text for text in [*files, printed.out])


@pytest.mark.parametrize("name", ['Shop "A"', "C:\\new", "läden 😀", "a'b"])
def test_the_printed_toml_of_a_new_key_is_valid_configuration(
    config: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["keys", "new", name, "--tenant", "shop", "--consent", "train"]) == 0
    printed = capsys.readouterr()
    with config.open("a", encoding="utf-8") as file:
        file.write(printed.out)

    _, entry = load(config).gateway.api_keys
    assert (entry.name, entry.tenant, entry.consent) == (name, "shop", "train")
    assert entry.sha256 == key_hash(printed.err.strip().rpartition(" ")[2])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("shop", "--tenant", "Shop"), "tenant = 'Shop'"),
        (("a\nb",), "name = 'a\\nb'"),
        (("a\x7fb",), "name = 'a\\x7fb'"),
        (("",), "name = ''"),
        (("\udcff",), "name = "),
    ],
)
def test_a_new_key_with_an_invalid_name_or_tenant_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert main(["keys", "new", *arguments]) == 1
    printed = capsys.readouterr()
    assert words in printed.err
    assert "orl-" not in printed.err
    assert printed.out == ""


def test_the_list_has_the_keys_of_all_sources_but_never_the_key_itself(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONLINERL_API_KEYS", f'[{{"name": "env", "sha256": "{"b" * 64}"}}]')
    run_keys(config, "add", "shop")
    key = capsys.readouterr().err.strip().rpartition(" ")[2]
    assert run_keys(config, "list") == 0
    lines = capsys.readouterr().out.splitlines()

    assert [line.split()[0] for line in lines] == ["name", "fixed", "shop", "env"]
    assert key_hash(key)[:12] in lines[2]
    assert not any(key in line or key_hash(key) in line for line in lines)


def test_a_revoked_key_is_removed_from_the_file(config: Path) -> None:
    run_keys(config, "add", "shop")
    assert run_keys(config, "revoke", "shop") == 0

    assert load_keys(config.parent / "data" / "keys.json") == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("add", "fixed"), "already"),
        (("add", "shop", "--tenant", "No Tenant"), "tenant = 'No Tenant'"),
        (("add", "a\nb"), "name = 'a\\nb'"),
        (("add", "shop", "--requests-per-minute", "0"), "requests_per_minute = 0"),
        (("revoke", "nobody"), "no key 'nobody'"),
        (("revoke", "fixed"), "stands in the configuration"),
    ],
)
def test_an_impossible_change_is_refused_with_a_message(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert run_keys(config, *arguments) == 1
    assert words in capsys.readouterr().err
    assert load_keys(config.parent / "data" / "keys.json") == ()


def test_the_same_name_twice_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [run_keys(config, "add", "shop"), run_keys(config, "add", "shop")] == [0, 1]
    assert "already" in capsys.readouterr().err
    assert len(load_keys(config.parent / "data" / "keys.json")) == 1


def test_the_path_of_the_keys_file_does_not_depend_on_the_current_folder(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    run_keys(config, "add", "shop", "--set", "gateway.keys_file=secrets/keys.json")

    assert (tmp_path / "secrets" / "keys.json").exists()
