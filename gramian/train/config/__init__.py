"""The configuration of a run: typed sections, read from TOML."""
