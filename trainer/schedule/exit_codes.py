"""How the training process of the schedule tells its parent what came of a cycle."""

EXIT_FAILED, EXIT_NOTHING_TO_DO, EXIT_LEASE_HELD = 1, 3, 4
