from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from onlinerl.serving.config import SpoolConfig
from onlinerl.serving.interaction.events import Record
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.spool import shipper as shipper_module
from onlinerl.serving.spool.log_writer import MemoryWriter, Published
from onlinerl.serving.spool.queue import Spool
from onlinerl.serving.spool.shipper import Shipper
from tests.waiting import until

CONFIG = SpoolConfig(topic_poll_s=0.02, ship_batch=3)


class Line:
    """Spool, shipper and log."""

    def __init__(self, folder: Path, *, incarnation: int = 1) -> None:
        self.metrics = GatewayMetrics(CollectorRegistry())
        self.log = MemoryWriter()
        self.log.incarnation = incarnation
        self.spool = Spool(folder, CONFIG, metrics=self.metrics)
        self.shipper = Shipper(
            self.spool, connect=self.log.connect, config=CONFIG, metrics=self.metrics
        )
        self.shipper.start()

    def put(self, *numbers: int) -> None:
        for number in numbers:
            self.spool.put(Record(topic="t", key=f"k{number}", value=b"x"))

    @property
    def shipped(self) -> list[str]:
        return [record.key for record in self.log.records]

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def close(self, *, drain_s: float = 5) -> None:
        self.shipper.close(drain_s=drain_s)
        self.spool.close(timeout_s=5)


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    monkeypatch.setattr(shipper_module, "_MIN_BACKOFF_S", 0.01)
    monkeypatch.setattr(shipper_module, "_MAX_BACKOFF_S", 0.02)
    line = Line(tmp_path)
    yield line
    line.close(drain_s=0)


def keys(*numbers: int) -> list[str]:
    return [f"k{number}" for number in numbers]


def test_events_arrive_in_order(line: Line) -> None:
    line.put(*range(10))
    until(lambda: line.spool.is_drained)

    assert line.shipped == keys(*range(10))
    assert line.count("onlinerl_gateway_events_shipped_total") == 10


def test_events_wait_while_the_log_is_away(line: Line) -> None:
    line.put(1)
    until(lambda: line.spool.is_drained)
    line.log.away = True
    line.put(2, 3)
    until(lambda: line.shipper.fault is not None)
    away = line.shipped
    line.log.away = False
    until(lambda: line.spool.is_drained)

    assert away == keys(1)
    assert line.shipped == keys(1, 2, 3)
    assert line.shipper.fault is None


def test_a_log_that_comes_back_empty_gets_everything_again(line: Line) -> None:
    line.put(1, 2)
    until(lambda: line.spool.is_drained)
    line.log.come_back_empty()
    until(lambda: line.shipped == keys(1, 2))
    line.put(3)
    until(lambda: line.shipped == keys(1, 2, 3))

    assert line.count("onlinerl_gateway_spool_rewinds_total") == 1


def test_a_log_that_is_lost_between_append_and_acknowledgement_gets_the_batch_again(
    line: Line,
) -> None:
    line.put(1)
    until(lambda: line.spool.is_drained)
    publish = line.log.publish

    def lossy(records: list[Record]) -> Published:
        line.log.publish = publish  # type: ignore[method-assign]
        published = publish(records)
        line.log.come_back_empty()
        return published

    line.log.publish = lossy  # type: ignore[method-assign, assignment]
    line.put(2)
    until(lambda: line.shipped == keys(1, 2))

    assert line.spool.topic_ids == line.log.topic_ids()


def test_a_log_that_was_exchanged_while_the_gateway_was_down_gets_everything(
    tmp_path: Path,
) -> None:
    first = Line(tmp_path)
    first.put(1, 2)
    until(lambda: first.spool.is_drained)
    first.close()
    second = Line(tmp_path, incarnation=7)
    until(lambda: second.shipped == keys(1, 2))
    second.close()


def test_a_new_process_ships_nothing_twice(tmp_path: Path) -> None:
    first = Line(tmp_path)
    first.put(1, 2)
    until(lambda: first.spool.is_drained)
    first.close()
    second = Line(tmp_path)
    second.put(3)
    until(lambda: second.shipped == keys(3))
    second.close()


def test_a_refused_record_does_not_stop_the_others(line: Line) -> None:
    line.log.refuses = lambda record: record.key == "k2"
    line.put(1, 2, 3)
    until(lambda: line.spool.is_drained)

    assert line.shipped == keys(1, 3)
    assert line.count("onlinerl_gateway_events_lost_total", reason="refused_by_log") == 1


def test_an_unexpected_fault_ends_nothing(line: Line) -> None:
    faults = [RuntimeError("a bug")]
    publish = line.log.publish

    def failing(records: list[Record]) -> Published:
        if faults:
            raise faults.pop()
        return publish(records)

    line.log.publish = failing  # type: ignore[method-assign, assignment]
    line.put(1)
    until(lambda: line.shipped == keys(1))


def test_closing_ships_what_is_spooled(tmp_path: Path) -> None:
    line = Line(tmp_path)
    until(lambda: line.shipper.fault is None)
    line.put(*range(50))
    line.close()

    assert line.shipped == keys(*range(50))
    assert line.log.num_closed == line.log.num_connects


def test_a_fault_in_forgetting_users_ends_nothing(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [RuntimeError("a bug")] * 3

    def failing() -> None:
        if faults:
            raise faults.pop()

    monkeypatch.setattr(line.spool, "handle_forget_requests", failing)
    until(lambda: not faults)
    line.put(1)
    until(lambda: line.shipped == keys(1))
