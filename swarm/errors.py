"""Errors that a user can cause, each with the exit code the command line ends with.

A message says the rule, the value that broke it and the fix, in one line:
`group_size must be >= 2, got 1; set rollouts.group_size`.
"""


class SwarmError(Exception):
    """Base of every error that ends a command in one line instead of a traceback."""

    exit_code = 1


class ConfigError(SwarmError):
    """A configuration file, override or combination of settings is not valid."""

    exit_code = 3


class IdentityError(SwarmError):
    """The identity is missing, damaged, readable by others, or in use by another process."""

    exit_code = 4


class PolicyError(SwarmError):
    """The base model, its tokenizer or its adapter cannot be loaded or does not fit."""

    exit_code = 5


class TaskError(SwarmError):
    """A task source cannot be built, or no source is left that works."""

    exit_code = 6


class NetworkError(SwarmError):
    """The network layer cannot start, or no peer can be reached where one is needed."""

    exit_code = 7


class CheckpointError(SwarmError):
    """No checkpoint is usable, or it belongs to another base, adapter shape or swarm."""

    exit_code = 8


class NodeNotRunningError(SwarmError):
    """A command needs a running node and found none."""

    exit_code = 9


class MemoryBudgetError(SwarmError):
    """The longest sequence does not fit into the memory of the device."""

    exit_code = 10


class TrainingError(SwarmError):
    """Training broke an invariant: the adapter did not move, or the engine samples stale weights."""

    exit_code = 11


class RequestError(NetworkError):
    """A request to one peer failed: unreachable, too slow, refused, oversize or damaged. Never fatal to a node."""
