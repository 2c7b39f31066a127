"""The analytical model: what a config is expected to take, before anything is compiled."""
