"""How far the spool was shipped, and to which incarnation of the topics; stored in a file."""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

from onlinerl.process.files import replace_file
from onlinerl.serving.spool.segment_files import Position

logger = logging.getLogger(__name__)

_NAME = "cursor.json"


@dataclass(frozen=True)
class Cursor:
    """Everything before `position` was acknowledged by the topics with the ids `topic_ids`."""

    position: Position
    topic_ids: dict[str, str] = field(default_factory=dict)


def load_cursor(folder: Path) -> Cursor | None:
    """The stored cursor; None when there is none or it cannot be read."""
    path = folder / _NAME
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        position = Position(int(stored["segment"]), int(stored["offset"]))
        return Cursor(position, {str(k): str(v) for k, v in stored["topic_ids"].items()})
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        # Everything is then shipped again, which is safe: ingest stores each event once.
        logger.error("the spool's cursor cannot be read", extra={"path": str(path)})
        return None


def store_cursor(folder: Path, cursor: Cursor) -> None:
    """Replace the stored cursor in one step.

    Raises:
        OSError: when the disk does not take it; the stored cursor is as before.
    """
    position = cursor.position
    content = {
        "segment": position.segment,
        "offset": position.offset,
        "topic_ids": cursor.topic_ids,
    }
    replace_file(folder / _NAME, json.dumps(content))
