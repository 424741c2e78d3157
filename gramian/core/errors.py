"""The one exception that gramian raises on purpose."""


class GramianError(RuntimeError):
    """Something the user can fix: the message is one line that names the field and what would be accepted instead."""
