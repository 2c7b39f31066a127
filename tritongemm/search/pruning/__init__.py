"""Rules that drop configs, each with its reason."""
