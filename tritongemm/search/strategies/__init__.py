"""Search strategies: one file each, a class of `plugins.contracts.Strategy`."""
