"""The search for configs: the space of a problem, its pruning, its ranking and its strategies."""
