"""Orders of scale factors in memory beside rows and groups: one file each."""
