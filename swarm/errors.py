"""Errors that a user can cause, each with the exit code the command line ends with.

A message says the rule, the value that broke it and the fix, in one line:
`group_size must be >= 2, got 1; set rollouts.group_size`.
"""

from typing import Literal


class SwarmError(Exception):
    """Base of every error that ends a command in one line instead of a traceback."""

    exit_code = 1


class UnexpectedError(SwarmError):
    """What only a bug can cause; the message names the report of it."""

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


class ManifestError(SwarmError):
    """A swarm's manifest is malformed, not signed by its founder, of another founder, or not for this software."""

    exit_code = 12


class PreflightError(SwarmError):
    """This machine, as it is, cannot take part in the swarm; the findings say why."""

    exit_code = 13


RequestFailure = Literal["unreachable", "refused", "busy", "oversize", "damaged", "deadline", "cut"]
"""Why a request failed. busy: the peer has no place now, ask later. damaged: not the bytes that were announced."""


class DoctorError(SwarmError):
    """`swarm doctor` found a problem."""

    exit_code = 14


class MergeError(SwarmError):
    """Adapters cannot be merged: damaged or hostile bytes, another base, or layers that do not match.

    What a partner sent and cannot be used raises this and nothing else; it costs that merge, never the node.
    """

    exit_code = 15


SiloFault = Literal["malformed", "forged", "old", "unknown_epoch", "stranger", "missing", "two_rolls"]
"""What is wrong with something of a silo. unknown_epoch: sealed under a newer key than this node has, or a retired one.
two_rolls: the owner has signed two rolls of one version, or two keys of one epoch."""


class SiloError(SwarmError):
    """A silo's token, roll or message is malformed, forged, out of date or of another silo, or a node is no member.

    Whatever bytes a peer sends in place of those raise this and nothing else; `fault` says why, in one stable word.
    """

    exit_code = 17

    def __init__(self, message: str, fault: SiloFault = "missing") -> None:
        super().__init__(message)
        self.fault: SiloFault = fault


class RequestError(NetworkError):
    """A request to one peer failed; `reason` says how, in one stable word. Never fatal to a node."""

    def __init__(self, message: str, reason: RequestFailure = "unreachable") -> None:
        super().__init__(message)
        self.reason: RequestFailure = reason


class PipelineError(SwarmError):
    """A stage of a pipelined policy refused a command, or the pipeline cannot continue."""

    exit_code = 16


class StageLostError(PipelineError):
    """Stages of the pipeline no longer answer; the batch under way is dropped on all others unless it is `applied`."""

    def __init__(self, message: str, stages: tuple[int, ...], *, applied: bool = False) -> None:
        super().__init__(message)
        self.stages = stages
        self.applied = applied


class StageReplyError(PipelineError):
    """A stage answered what no honest stage answers: it is treated as lost, and gets no layers again in this run."""


class StageRefusedError(PipelineError):
    """A stage is there and does not carry out an order; it may carry out the next one."""


class StuckError(SwarmError):
    """A part of the node made no progress for long; the log and a crash report have its stack."""

    exit_code = 18


def error_of_exit_code(exit_code: int, message: str) -> SwarmError:
    """The error with which a command of this program ended; a SwarmError where no kind of error has that code."""
    kinds = [SwarmError]
    for kind in kinds:  # grows meanwhile
        kinds += kind.__subclasses__()
    return next((kind for kind in kinds if kind.exit_code == exit_code), SwarmError)(message)


WRONG_USAGE = 2
"""Of the command line."""
NEEDS_A_PERSON = frozenset(
    {
        WRONG_USAGE,
        *(
            error.exit_code
            for error in (
                ConfigError, IdentityError, PolicyError, TaskError, CheckpointError, MemoryBudgetError, TrainingError,
                ManifestError, PreflightError, SiloError,
            )
        ),
    }
)  # fmt: skip
"""Exit codes after which another start ends the same way, until somebody changes something. Supervisors stop there."""
