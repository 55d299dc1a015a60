"""The topics of the event log: creates them, and tells apart topics of the same name.

A topic that is created again, e.g. by a broker that lost its disk, counts offsets from 0 under the
same name but has another topic id. So an offset is always stored together with the topic id.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from onlinerl.errors import ServiceUnavailable
from onlinerl.rollout_store.config import BrokerConfig
from onlinerl.rollout_store.schema import FEEDBACK_TOPIC, INTERACTIONS_TOPIC

logger = logging.getLogger(__name__)

ALL_TOPICS = (INTERACTIONS_TOPIC, FEEDBACK_TOPIC)

MAX_MESSAGE_BYTES = 8 * 1024**2
"""Largest record of a topic that is created here. The default of brokers, 1 MiB, is too small for
answers with many choices."""


TABLE_OF: Mapping[str, Literal["interactions", "feedback"]] = {
    INTERACTIONS_TOPIC: "interactions",
    FEEDBACK_TOPIC: "feedback",
}
"""The table that is filled from each topic."""


@dataclass(frozen=True)
class TopicIdPartition:
    """A partition of one topic, as identified by its topic id."""

    topic: str
    topic_id: str
    partition: int

    @property
    def app_id(self) -> str:
        """Key under which the table stores the next offset, in the same commit as the rows."""
        return f"onlinerl/{self.topic}/{self.topic_id}/{self.partition}"


@dataclass(frozen=True)
class Topic:
    """A topic, as identified by its topic id."""

    name: str
    topic_id: str
    partitions: tuple[int, ...]


class TopicAdmin:
    """An admin connection for topics; close it after use, or use it as a context manager.

    Args:
        broker: Where the brokers are, and how topics are created.

    Raises:
        ServiceUnavailable: from every method but `close`, when no broker answers in time.
    """

    def __init__(self, broker: BrokerConfig) -> None:
        # kafka-python takes 0.1 s to import and is not needed to read a configuration.
        from kafka.admin import KafkaAdminClient

        timeout_ms = int(broker.request_timeout_s * 1000)
        self._broker = broker
        require_listener(broker)
        with broker_errors(f"reach a broker at {broker.bootstrap}"):
            self._client = KafkaAdminClient(
                bootstrap_servers=broker.addresses,
                client_id="onlinerl-topics",
                request_timeout_ms=timeout_ms,
                bootstrap_timeout_ms=timeout_ms,
                reconnect_backoff_max_ms=1000,
            )

    def describe(self, names: Iterable[str] = ALL_TOPICS) -> dict[str, Topic]:
        """The existing topics among `names`, by name."""
        with broker_errors("describe topics"):
            answers = self._client.describe_topics(list(names))
        return {
            answer["name"]: Topic(
                answer["name"],
                str(answer["topic_id"]),
                tuple(sorted(part["partition_index"] for part in answer["partitions"])),
            )
            for answer in answers
            if answer["error_code"] == 0 and answer["partitions"]
        }

    def ensure(self, names: Iterable[str] = ALL_TOPICS) -> dict[str, Topic]:
        """Create missing topics and describe all of them; several processes may do so at once.

        A broker may confirm a creation before it can describe the topic, so this waits for that.
        """
        wanted = tuple(names)
        for name in sorted(set(wanted) - set(self.describe(wanted))):
            self._create(name)
        deadline = time.monotonic() + self._broker.request_timeout_s
        while absent := sorted(set(wanted) - set(topics := self.describe(wanted))):
            if time.monotonic() > deadline:
                raise ServiceUnavailable(f"the broker has no topic {', '.join(absent)} yet")
            time.sleep(0.05)
        return topics

    def close(self) -> None:
        """Disconnect; never raises, even if the broker is gone."""
        from kafka.errors import KafkaError

        with contextlib.suppress(KafkaError, OSError):
            self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _create(self, name: str) -> None:
        from kafka.admin import NewTopic
        from kafka.errors import TopicAlreadyExistsError

        topic = NewTopic(
            name,
            self._broker.partitions,
            self._broker.replication,
            topic_configs={"max.message.bytes": str(MAX_MESSAGE_BYTES)},
        )
        timeout_ms = int(self._broker.request_timeout_s * 1000)
        with broker_errors(f"create topic {name}"), contextlib.suppress(TopicAlreadyExistsError):
            self._client.create_topics([topic], timeout_ms=timeout_ms)
            logger.info("topic created", extra={"topic": name})


def ensure_topics(broker: BrokerConfig, names: Iterable[str] = ALL_TOPICS) -> dict[str, Topic]:
    """Create missing topics and describe all of them, over a new connection; see `TopicAdmin`."""
    with TopicAdmin(broker) as admin:
        return admin.ensure(names)


def require_listener(broker: BrokerConfig) -> None:
    """Fail immediately if no broker accepts a connection.

    Without this check kafka-python would try until its timeout, leave its sockets open, and back
    off for longer than the broker needs to come back.

    Raises:
        ServiceUnavailable: no broker listens; the message names the addresses.
    """
    for address in broker.addresses:
        host, _, port = address.rpartition(":")
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host.strip("[]"), int(port)), broker.request_timeout_s),
        ):
            return
    raise ServiceUnavailable(f"cannot reach a broker at {broker.bootstrap}: nothing listens there")


@contextlib.contextmanager
def broker_errors(attempt: str) -> Iterator[None]:
    """Raise errors of kafka-python as `ServiceUnavailable`, which callers retry.

    Args:
        attempt: What the block does, to complete the sentence "cannot ...".
    """
    from kafka.errors import KafkaError, TopicAlreadyExistsError

    try:
        yield
    except TopicAlreadyExistsError:
        raise
    except (KafkaError, OSError) as error:
        raise ServiceUnavailable(f"cannot {attempt}: {error!r}") from error
