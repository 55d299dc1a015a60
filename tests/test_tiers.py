from tests.tiers import summary


def test_what_was_skipped_is_one_line_with_the_way_to_run_it() -> None:
    assert summary(["slow (`make test-all`)", "node is missing", "slow (`make test-all`)"]) == (
        "skipped 3: 2 slow (`make test-all`); 1 node is missing"
    )
