"""Exit codes of the training process, by which the schedule knows the outcome of a cycle."""

EXIT_FAILED, EXIT_NOTHING_TO_DO, EXIT_LEASE_HELD = 1, 3, 4
