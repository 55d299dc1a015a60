"""From the event log to the tables, exactly once."""
