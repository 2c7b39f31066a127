"""The analytical cost model, which predicts the time of a config before anything is compiled."""
