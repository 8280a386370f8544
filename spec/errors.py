"""The errors of the protocol core; `odb.errors` adds those of the loader to the same family."""


class ODBError(Exception):
    """Base of every error that odb raises on purpose."""


class ConfigError(ODBError, ValueError):
    """A setting is out of range or contradicts another one. The message says what to pass."""


class IllegalEventError(ODBError):
    """An event reached a rank in a phase that does not accept it; the state was left as it was."""


class EnvelopeError(ODBError):
    """A target outside `1 <= T <= samples held`: no alignment to it exists.

    No decision of the shipped protocol can cause this (promise: step-alignment). A changed target
    rule that leaves the safe envelope does.
    """
