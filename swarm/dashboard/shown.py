"""What the page may show: values made safe for strict JSON, lines of logs, and a sentence for every reason of a rejection.

Numbers are finite, and text has no control characters that could hide, colour or reverse it.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.config.shareable import HIDDEN
from swarm.observability.logging_setup import LEVELS, LogRecord, last_records, logs_of_runs
from swarm.observability.plain_text import plain
from swarm.records.rejection import Rejection

WORDS: dict[Rejection, str] = {
    Rejection.OVERSIZE: "larger than the protocol allows",
    Rejection.MALFORMED: "not in the form that the protocol requires",
    Rejection.VERSION: "from a node with another version of the protocol",
    Rejection.FOREIGN_SWARM: "made for another swarm",
    Rejection.OWN_RECORD: "has this node's own name but came from elsewhere",
    Rejection.BAD_SIGNATURE: "the signature is wrong: the record was forged or changed on the way",
    Rejection.WRONG_SLOT: "stored under another author's name",
    Rejection.EXPIRED: "it had expired when it arrived",
    Rejection.CLOCK_SKEW: "dated in the future: the clock of its author or of this node is wrong",
    Rejection.REPLAY: "already known; harmless",
    Rejection.RATE: "its author sent more than the rate limit allows",
    Rejection.UNKNOWN_TASK: "its tasks are not set up on this node, or another version of swarm scores them by other rules",
    Rejection.HELD_OUT_TASK: "its tasks are reserved for evaluation",
    Rejection.BANNED: "its author made false claims and is ignored for some time",
    Rejection.UNAVAILABLE: "no peer that has the body answered",
    Rejection.WRONG_HASH: "the body is not the announced one: its hash differs",
    Rejection.HEADER_MISMATCH: "its content is not what was announced",
    Rejection.TOKENS: "its tokens do not decode to the answer, or do not exist",
    Rejection.TOO_LONG: "its answers are longer than this node accepts; nobody's fault",
    Rejection.LOGPROBS: "impossible probabilities",
    Rejection.TASK_MISMATCH: "its prompt is not that of the task; often its author has another version of the task",
    Rejection.TASK_FAILED: "its task could not be checked on this node; not its author's fault",
    Rejection.TOO_SLOW: "checking its author's answers takes too long",
    Rejection.STRANGERS_BUSY: "no time was left to check strangers' answers; it is tried again later",
    Rejection.FORGED_EPISODE: "its environment replied otherwise than this node's does",
    Rejection.REWARD_MISMATCH: "its claimed reward is not the one that this node computed",
    Rejection.COPIED: "copied from another author",
    Rejection.STALE: "from an outdated policy version; nobody's fault",
    Rejection.NO_SIGNAL: "all its answers have the same reward, so there is nothing to learn; nobody's fault",
}


MAX_CHARS = 4000
_MAX_DEPTH = 8


def shown(value: Any, depth: int = 0) -> Any:
    """Converts `value` for strict JSON: NaN and infinity become None, text is plain and cut, other types become a name."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, str):
        return shown_text(value, MAX_CHARS)
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return {shown_text(str(key), 200): shown(entry, depth + 1) for key, entry in value.items()}
    if depth < _MAX_DEPTH and isinstance(value, list | tuple):
        return [shown(entry, depth + 1) for entry in value]
    return type(value).__name__


def shown_text(text: str, max_chars: int) -> str:
    """At most so many characters of it, line ends and tabs kept, other control and invisible characters written out."""
    cut = plain(text[:max_chars], keep="\n\t")
    return f"{cut} … ({len(text)} characters)" if len(text) > max_chars else cut


MAX_LOG_RECORDS = 300
MAX_LOG_BYTES = 256 << 10
"""That are read of the end of one log file, and of the part before its rotation."""
MAX_LOG_RUNS = 3
"""Runs of a node whose logs are read."""
_MAX_LINE = 2000
_PLACES = (
    re.compile(r"/(?:ip4|ip6|ip6zone|dns|dns4|dns6|dnsaddr|unix)/[^\s,;'\"()\[\]]+"),
    re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s,;'\"()<>]+"),
    re.compile(r"(?<=['\"])~?(?:[A-Za-z]:)?[/\\][^'\"\n]*(?=['\"])"),
    re.compile(r"(?<![\w…<])(?:~|\.{1,2}|[A-Za-z]:)?[/\\][^\s,;:'\"()\[\]]+"),
    re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.]*\d)"),
    re.compile(r"(?<![\w:])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])"),
    re.compile(r"\b[\w.+-]{1,64}@[\w.-]+"),
    re.compile(
        r"(?i)(?:token|password|passwd|secret|api[_-]?key|authorization)['\"]?\s{0,3}[=:]\s{0,3}(?:(?:bearer|basic) )?\S+"
    ),
    re.compile(r"\b(?:hf|sk|ghp|gho|glpat|xox[abp]|wandb)[_-][A-Za-z0-9_-]{8,}"),
    re.compile(r"(?<![\w-])(?!12D3Koo|Qm)(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{33,}(?![\w-])"),
)
"""Addresses, folders, and what looks like a secret. A time of day is none of them."""
_CLOCK = re.compile(r"\d\d?:\d\d(?::\d\d)?")


def without_places(text: str, folder: str = "") -> str:
    """`text` of a log without what says where things are, or may be a secret; nor where the folder of that name is."""
    own = [re.compile(rf"(?<![^\s'\"()])[^\s'\"()]*/{re.escape(folder)}\b[^\s,;:'\"()]*")] if folder else []
    for pattern in (*own, *_PLACES):
        text = pattern.sub(lambda found: found[0] if _CLOCK.fullmatch(found[0]) else HIDDEN, text)
    return text


def read_logs(folder: Path, level: str = "", find: str = "", is_whole: bool = False) -> dict[str, Any]:
    """The newest records of a node's last runs, oldest first: {"records": [{"time", "level", "logger", "message"}…], "is_whole"}.

    `find`: text that a record must have. Only where `is_whole` the records are as they were written. Otherwise addresses,
    folders and possible secrets are hidden, and of a traceback there is the last line only. Raises OSError.
    """
    wanted, name, found = find.casefold(), folder.resolve().name, list[dict[str, str]]()
    for log in logs_of_runs(folder / "logs")[: -MAX_LOG_RUNS - 1 : -1]:
        records, _ = last_records(log, MAX_LOG_BYTES, level.upper() if level else "DEBUG", MAX_LOG_BYTES)
        for record in reversed(records):
            told = _told(record, None if is_whole else name)
            if wanted in f"{told['level']} {told['logger']} {told['message']}".casefold():
                found.append(told)
                if len(found) == MAX_LOG_RECORDS:
                    return {"records": found[::-1], "is_whole": is_whole}
    return {"records": found[::-1], "is_whole": is_whole}


def log_level(text: str) -> str:
    """A level that logs are asked for; what is none is read as all."""
    return text if text.upper() in LEVELS else ""


def _told(record: LogRecord, folder: str | None) -> dict[str, str]:
    """As it is shown; with the name of the node's folder only what everybody may see."""
    message = record.message
    if folder is not None:
        first, *more = message.split("\n")
        kept = [first, *([f"  {len(more)} lines, the last one: {more[-1].strip()}"] if more else [])]
        message = without_places("\n".join(line[:_MAX_LINE] for line in kept), folder)
    told = {"time": record.time, "level": record.level, "logger": record.logger, "message": message}
    return {name: shown_text(text, MAX_CHARS) for name, text in told.items()}
