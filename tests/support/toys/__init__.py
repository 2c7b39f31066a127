"""A plug-in of each kind, as short as it can be: docs/plugins shows them, and tests/cpu/contracts runs them."""
