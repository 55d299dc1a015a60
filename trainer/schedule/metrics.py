"""What the schedule reports to Prometheus."""

from prometheus_client import Counter, Gauge

CYCLES = Counter(
    "onlinerl_trainer_cycles",
    "Training processes that ended, by outcome: registered, failed, stopped, nothing_to_do, "
    "lease_held.",
    ["outcome"],
)
TICK = Gauge("onlinerl_trainer_last_tick_timestamp_seconds", "When it last looked, UTC.")
TICK_FAULTS = Counter(
    "onlinerl_trainer_tick_faults",
    "Looks that failed: the registry or the tables did not answer, or an unexpected error.",
)
DUE_IN = Gauge(
    "onlinerl_trainer_due_in_seconds", "Seconds until the next cycle is due; 0 when due."
)
CYCLE_SECONDS = Gauge("onlinerl_trainer_last_cycle_seconds", "How long the last cycle took.")
