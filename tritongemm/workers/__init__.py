"""Child processes that may die, and queues of work."""
