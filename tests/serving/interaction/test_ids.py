from uuid import UUID

from onlinerl.serving.interaction.ids import uuid7


def test_ids_are_version_7_and_sort_by_time() -> None:
    ids = [uuid7(unix_ms=ms) for ms in (1, 2, 1_800_000_000_000)]

    assert all((UUID(item).version, UUID(item).variant[:12]) == (7, "specified in") for item in ids)
    assert ids == sorted(ids)
    assert UUID(ids[2]).int >> 80 == 1_800_000_000_000


def test_ids_of_one_millisecond_differ() -> None:
    assert len({uuid7(unix_ms=1) for _ in range(1000)}) == 1000
