"""What the schedule tells Prometheus."""

from prometheus_client import Counter, Gauge

CYCLES = Counter(
    "onlinerl_trainer_cycles",
    "Training processes that ended, by outcome: registered, failed, stopped, nothing_to_do, "
    "lease_held.",
    ["outcome"],
)
TICK = Gauge("onlinerl_trainer_last_tick_timestamp_seconds", "When it last looked, UTC.")
DUE_IN = Gauge(
    "onlinerl_trainer_due_in_seconds", "Seconds until the next cycle is due; 0 when due."
)
CYCLE_SECONDS = Gauge("onlinerl_trainer_last_cycle_seconds", "How long the last cycle took.")
