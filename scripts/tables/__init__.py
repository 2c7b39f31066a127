"""Makes the tables over M that come along in the wheel."""
