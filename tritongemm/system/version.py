"""The version of this package, which is the same in a clone and in an installation."""

VERSION = "0.1.0"
