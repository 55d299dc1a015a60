"""Whether a process that once took a lease is still the one that runs under its number."""

from pathlib import Path


def start_time(pid: int) -> str | None:
    """When the process started, in kernel ticks since boot; None when there is no such process.

    A number that was given to another process since has another start time. A zombie counts as
    gone: it does nothing any more.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses and may itself hold spaces and parentheses.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else fields[18]
