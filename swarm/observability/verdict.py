"""In one word and one line: is this node contributing to its swarm?

status.json, the clock ─▶ judge ─▶ contributing · learning alone · paused · starting · stalled · not running
"""

from dataclasses import dataclass
from enum import StrEnum

from swarm.observability.status_file import SILENT_AFTER_S, NodeStatus
from swarm.observability.units import for_how_long

_TAKEN_LATELY_S = 600.0
_GONE_AFTER_S = 60.0
"""Connections are closed and opened again all the time; for so long none is nothing."""
_ROUNDS_UNTAKEN = 10
_LONGEST_ROUND_S = 600.0
_LONGEST_ROUNDS = 20


class Word(StrEnum):
    """Of a verdict."""

    contributing = "contributing"
    """Other nodes fetch what it shares."""
    learning_alone = "learning alone"
    paused = "paused"
    """By a person, on the node's page."""
    starting = "starting"
    serving = "serving"
    """A stage of a crew, or a bootstrap peer."""
    stalled = "stalled"
    not_running = "not running"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a person wants to know first."""

    word: Word
    why: str
    """A line in plain words. It may hold names, which are harmless, and nothing else of peers."""


def judge(status: NodeStatus, now: float) -> Verdict:
    """`now`: seconds since the epoch."""
    if not status.is_alive:
        return Verdict(Word.not_running, _how_it_ended(status, now))
    if stalled := _why_stalled(status, now):
        return Verdict(Word.stalled, stalled)
    if status.phase == "serving":
        return Verdict(Word.serving, "it works for others and trains nothing of its own")
    if status.phase == "starting" or (status.phase == "evaluating" and not status.last_round):
        doing = "loading the policy" if status.phase == "starting" else "evaluating it before the first round"
        return Verdict(Word.starting, f"{doing}, for {for_how_long(now - status.started_at)}")
    if "paused" in status.phase:
        what = "training and sharing wait" if status.phase == "paused" else status.phase
        return Verdict(Word.paused, f"{what} until somebody resumes on its page: swarm dashboard DIR")
    return _part_in_swarm(status, now)


def _how_it_ended(status: NodeStatus, now: float) -> str:
    ago = f", {for_how_long(now - status.written_at)} ago" if status.written_at else ""
    if status.phase == "ended":
        return f"it ended after round {status.round}{ago}"
    return f"process {status.pid} ended without a word after round {status.round}{ago}"


def _why_stalled(status: NodeStatus, now: float) -> str:
    """Empty where it is not."""
    if status.stuck:
        return status.stuck[0]
    silent_s = now - status.written_at
    if status.written_at and silent_s > SILENT_AFTER_S and status.phase != "starting":  # which writes nothing meanwhile
        return f"process {status.pid} has not written its state for {for_how_long(silent_s)}: it is blocked or frozen"
    if status.phase != "learning" or not status.last_round_at:
        return ""
    patience_s = max(_LONGEST_ROUND_S, _LONGEST_ROUNDS * _round_s(status))
    quiet_s = now - status.last_round_at
    return f"no round has ended for {for_how_long(quiet_s)}" if quiet_s > patience_s else ""


def _part_in_swarm(status: NodeStatus, now: float) -> Verdict:
    facts = status.contribution
    taken_at = facts.get("last_taken_at")
    patience_s = max(_TAKEN_LATELY_S, _ROUNDS_UNTAKEN * _round_s(status))
    if taken_at is not None and now - taken_at <= patience_s:
        taken = f"{name_of(status, facts['last_taken_by'])} took rollouts of ours {for_how_long(now - taken_at)} ago"
        if status.num_connected != 0 or now - taken_at <= _GONE_AFTER_S:
            return Verdict(Word.contributing, taken)
        return Verdict(Word.learning_alone, f"no peer is connected any more; {taken}")
    return Verdict(Word.learning_alone, _why_alone(status, taken_at, now))


def _why_alone(status: NodeStatus, taken_at: float | None, now: float) -> str:
    if status.num_connected is None:
        return "its network is off"
    if taken_at is not None:
        return f"nobody has taken rollouts of ours for {for_how_long(now - taken_at)}"
    if status.num_connected == 0:
        return "no peer is connected"
    if not status.last_round.get("exchange/records_published", 0):
        return "nothing was shared yet"
    return "nobody has taken rollouts of ours yet"


def name_of(status: NodeStatus, peer_id: str | None) -> str:
    """As in the list of peers; else the end of the peer id."""
    names = (peer["name"] for peer in status.peers if peer["peer_id"] == peer_id)
    return next(names, f"…{peer_id[-8:]}" if peer_id else "somebody")


def _round_s(status: NodeStatus) -> float:
    return float(status.last_round.get("time/round_s", 0.0))
