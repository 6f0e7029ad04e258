"""The error for everything a user can cause."""


class DeepSSMError(Exception):
    """Says what was given, what was expected and what to do."""
