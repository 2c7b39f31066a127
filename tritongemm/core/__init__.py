"""The data types that the stages exchange: problems, configs, targets, trials, records and others."""
