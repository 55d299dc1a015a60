import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.rollout_store.policy_version import PolicyVersion


@given(st.text(min_size=1), st.integers(1, 2**63 - 1))
def test_text_and_value_name_each_other(policy: str, number: int) -> None:
    version = PolicyVersion(policy, number)

    assert PolicyVersion.parse(str(version)) == version
    assert PolicyVersion.find(str(version), policy=policy) == version


@given(st.text())
def test_a_parsed_version_is_written_back_unchanged(text: str) -> None:
    try:
        version = PolicyVersion.parse(text)
    except ValueError:
        return

    assert str(version) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "assistant",
        "assistant/",
        "/1",
        "a/0",
        "a/007",
        "a/-1",
        "a/1 ",
        "a/\N{ARABIC-INDIC DIGIT ONE}",
        "a/1/x",
        f"a/{2**63}",
        "a/" + "9" * 40,
    ],
)
def test_text_that_is_not_a_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a policy version"):
        PolicyVersion.parse(text)
    assert PolicyVersion.find(text, policy="a") is None


def test_another_policys_version_is_not_found() -> None:
    assert PolicyVersion.find("helper/3", policy="assistant") is None
    assert PolicyVersion.find("team/assistant/3", policy="assistant") is None
    assert PolicyVersion.find("team/assistant/3", policy="team/assistant") == PolicyVersion(
        "team/assistant", 3
    )


def test_versions_of_one_policy_are_ordered_by_number() -> None:
    assert PolicyVersion("a", 9) < PolicyVersion("a", 10)
