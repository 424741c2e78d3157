"""The version of gramian, in one place."""

VERSION = "0.1.0"
