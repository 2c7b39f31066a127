"""The nouns: problems, configs, targets, trials, records and what else the stages hand to each other."""
