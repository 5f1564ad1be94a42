"""Warns, from the metrics of the last rounds, that a run goes wrong, before it is lost.

    row of a round ─▶ window of 48 rows ─▶ one check per problem ─▶ text: what is seen, what it means, what to change

A check compares the newest 8 rows with the older ones, or the newest evaluation with the best one. A problem is logged once,
and again only after 8 rows without it.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist, fmean, median, stdev
from typing import Any

logger = logging.getLogger(__name__)

_WINDOW_ROWS = 48
_RECENT_ROWS = 8
_SPIKE_ROWS = 5
_FEW_ROWS = 4
COLUMNS = (
    "rollout/reward_mean", "train/entropy", "train/ess_fraction", "train/kl", "train/grad_norm",
    "train/clip_fraction", "train/skip_reason", "rollout/groups", "rollout/failed_tasks", "train/engine_kl",
)  # fmt: skip
"""What is read of a row."""

_AT_START = {"rollout/reward_mean": 8, "train/entropy": 1}
"""{column: number of its first values in the run}, whose mean stays in every row of the window as "COLUMN at the start"."""

_HELD_OUT = ("reward", "best", "best round", "error", "evaluations")
"""The newest evaluation, the best one, the standard error of their difference if the policy were the same, and how many there
were; in every row of the window as "held out NAME"."""

_FALSE_ALARMS = 0.01
"""Of `held_out_falling`, over n² at the n-th evaluation."""

Rows = Sequence[Mapping[str, Any]]


class HealthWatch:
    """Keeps the last metrics rows of a run and checks them. It belongs to the compute thread."""

    def __init__(self) -> None:
        self._rows: deque[dict[str, Any]] = deque(maxlen=_WINDOW_ROWS)
        self._quiet_rows: dict[str, int] = {}
        """Number of rows since each problem was last seen, for problems of the last 8 rows."""
        self._found: dict[str, str] = {}
        """{check: text} after the newest row."""
        self._first: dict[str, list[float]] = {name: [] for name in _AT_START}
        """First values of the run, by column."""
        self._held_out: dict[str, Any] = {}
        """`_HELD_OUT`, what it was `measured_on`, and the rewards of the best evaluation by source."""

    def evaluated(self, evaluation: Mapping[str, Any], rewards: Mapping[str, Sequence[float]]) -> None:
        """Take in an evaluation on held-out tasks, with which the next rows are checked.

        `evaluation`: its `evaluation_row`; `rewards`: of its answers, by source, in the order of the tasks.
        """
        mean, measured_on, before = evaluation["accuracy_mean"], evaluation["measured_on"], self._held_out
        if not measured_on:
            return
        best = {"best": mean, "best round": evaluation["round"], "best rewards": dict(rewards)}
        count = 1
        if before.get("measured_on") == measured_on:
            count += before["evaluations"]
            if before["best"] > mean:
                best = {name: before[name] for name in best}
        error = _error_of_difference(best["best rewards"], rewards)
        self._held_out = best | {"reward": mean, "error": error, "measured_on": measured_on, "evaluations": count}

    def observe(self, row: Mapping[str, Any]) -> list[str]:
        """Warnings that hold after this round's row; those of a new episode are logged."""
        begun = self.begun(row)
        for name in begun:
            logger.warning("round %s: %s", row.get("round", "?"), self._found[name])
        return list(self._found.values())

    def begun(self, row: Mapping[str, Any]) -> list[str]:
        """Take in the row of a round. Returns the names of the checks whose problem was not there in the last 8 rows."""
        kept = {name: _finite(row.get(name)) for name in COLUMNS}
        for name, first in self._first.items():
            value = kept[name]
            if len(first) < _AT_START[name] and value is not None and math.isfinite(value):
                first.append(value)
            kept[f"{name} at the start"] = fmean(first) if len(first) == _AT_START[name] else None
        kept |= {f"held out {name}": self._held_out.get(name) for name in _HELD_OUT}
        self._rows.append(kept)
        found = {name: text for name, check in CHECKS.items() if (text := check(self._rows))}
        begun = [name for name in found if name not in self._quiet_rows]
        aged = {name: quiet + 1 for name, quiet in self._quiet_rows.items() if quiet + 1 < _RECENT_ROWS}
        self._quiet_rows = aged | dict.fromkeys(found, 0)
        self._found = found
        return begun

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs, for JSON."""
        return {
            "rows": list(self._rows),
            "quiet_rows": dict(self._quiet_rows),
            "first": {name: list(values) for name, values in self._first.items()},
            "held_out": dict(self._held_out) or None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        columns = (
            *COLUMNS,
            *(f"{name} at the start" for name in _AT_START),
            *(f"held out {name}" for name in _HELD_OUT),
        )
        self._rows = deque(({name: row.get(name) for name in columns} for row in state["rows"]), maxlen=_WINDOW_ROWS)
        self._quiet_rows = dict(state["quiet_rows"])
        first = state.get("first", {})  # not in what 0.1.0 wrote
        self._first = {name: list(first.get(name, ())) for name in _AT_START}
        held_out: dict[str, Any] = dict(state.get("held_out") or {})
        # the first states that had it lack these two
        is_whole = held_out.get("best rewards") and held_out.get("evaluations")
        self._held_out = held_out if is_whole else {}


def _finite(value: Any) -> Any:
    """None for a number that JSON, and so a checkpoint, cannot hold: a skipped step has such a norm."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _error_of_difference(best: Mapping[str, Sequence[float]], now: Mapping[str, Sequence[float]]) -> float:
    """Standard error of the difference of the means over sources, if it is 0: as in McNemar's test, by tasks that differ."""
    shares = [
        sum((one - other) ** 2 for one, other in zip(best[source], rewards, strict=False)) / len(rewards) ** 2
        for source, rewards in now.items()
        if rewards and source in best
    ]
    return math.sqrt(sum(shares)) / max(1, len(shares))


def entropy_collapse(rows: Rows) -> str:
    """Entropy halved within the window, or is nearly 0 and a quarter of what the run began with, and reward did not rise.

    Some bases begin with hundredths of a nat per token, as most tokens of a long answer are certain.
    """
    older, recent = _medians(rows, "train/entropy")
    reward = _medians(rows, "rollout/reward_mean")[1]
    at_start = _at_start(rows, "train/entropy")
    is_low = recent < 0.5 * older or (recent < min(0.05, 0.25 * at_start) and reward < 0.9)
    if not is_low or _reward_has_risen(rows):
        return ""
    before = at_start if math.isnan(older) else older
    return (
        f"entropy is {recent:.2g} nats per token, after {before:.2g}, and reward has not risen: the policy writes the same "
        "answer again and again and soon finds nothing new; lower training.lr, raise training.clip_high or "
        "rollouts.temperature, or set training.kl_coef = 0.01"
    )


def entropy_growth(rows: Rows) -> str:
    """Entropy of the newest steps is twice that of the run's first ones, and reward is no higher than in the rounds before."""
    rows = list(rows)
    recent, at_start = _values(rows, "train/entropy")[-_FEW_ROWS:], _at_start(rows, "train/entropy")
    before, now = (_values(part, "rollout/reward_mean") for part in (rows[:-_FEW_ROWS], rows[-_FEW_ROWS:]))
    is_high = len(recent) == _FEW_ROWS and median(recent) > 2 * at_start
    if not is_high or not before or not now or fmean(now) > fmean(before) + 0.02:
        return ""
    return (
        f"entropy is {median(recent):.2g} nats per token, {at_start:.2g} at the start, and reward has not risen: answers become "
        "random, and reward is lost within a few rounds; lower training.lr or training.inner_epochs, or set "
        "training.kl_coef = 0.01, and go back to the best checkpoint (swarm run --from-best)"
    )


def few_effective_answers(rows: Rows) -> str:
    recent = _medians(rows, "train/ess_fraction")[1]
    if not recent < 0.5:
        return ""
    return (
        f"ESS/N is {recent:.2g}: few tokens carry each step, because the batch comes from policies far from this one or "
        "its answers are left out; lower sharing.max_age_s or sharing.swarm_groups, or training.lr, and keep "
        "training.lr_by_ess on"
    )


def kl_runaway(rows: Rows) -> str:
    """KL to the base grew by half a nat per token within the window, or is very large, and reward did not rise.

    A policy that has learned much still moves when its reward is already high, so the gain since the run's start counts, too.
    """
    values = _values(rows, "train/kl")  # not of every row
    older, recent = (median(values[:-3]), min(values[-3:])) if len(values) >= 5 else (math.nan, math.nan)
    is_far = recent - older > 0.5 or recent > 2.0
    if not is_far or _reward_has_risen(rows) or _reward_since_start(rows) > 0.1:
        return ""
    return (
        f"KL to the base is {recent:.2g} nats per token, after {older:.2g}, and reward has not risen: the policy leaves what "
        "the base knows and gains nothing; set training.kl_coef = 0.01 or more, or lower training.lr"
    )


def grad_norm_spike(rows: Rows) -> str:
    """Three and a half times the usual norm, twice within five rounds: once is chance, and clipped."""
    values = _values(rows, "train/grad_norm")
    older, recent = values[:-_SPIKE_ROWS], values[-_SPIKE_ROWS:]
    usual = median(older) if len(older) >= 4 else math.nan
    spikes = [value for value in recent if value > 3.5 * usual > 0]
    if len(spikes) < 2:
        return ""
    return (
        f"gradient norm is {spikes[-1]:.2g}, usually {usual:.2g}: a few answers pull hard, which often comes just before a "
        "collapse; lower training.max_grad_norm or training.lr"
    )


def reward_falling(rows: Rows) -> str:
    """Reward fell by more than .05 and three standard errors."""
    older, recent = _split(rows, "rollout/reward_mean")
    if min(len(older), len(recent)) < _RECENT_ROWS:
        return ""
    fall = fmean(older) - fmean(recent)
    if fall <= max(0.05, 3 * math.hypot(_standard_error(older), _standard_error(recent))):
        return ""
    return (
        f"mean reward fell from {fmean(older):.2g} to {fmean(recent):.2g}: the latest steps do harm; lower training.lr, "
        "and go back to the best checkpoint (swarm run --from-best) if it does not recover"
    )


def held_out_falling(rows: Rows) -> str:
    """Reward on held-out tasks is below the best of earlier evaluations by more than .05 and more than chance explains.

    The best of n evaluations is partly chance, so the newest one must differ by more the more there are: by what chance gives two
    of them in 1 of 100 n² cases. Of simulated runs of 200 evaluations of 45 to 192 tasks, whose policy stays as it is, at most
    2.5 in 100 are warned of. Sampled reward may rise meanwhile, where tasks that are easy to the policy are chosen more often.
    """
    known = {name: value for name in _HELD_OUT if (value := rows[-1].get(f"held out {name}")) is not None}
    if len(known) < len(_HELD_OUT):
        return ""
    now, best, best_round, error, num_evaluations = (known[name] for name in _HELD_OUT)
    num_errors = -NormalDist().inv_cdf(_FALSE_ALARMS / num_evaluations**2)
    if best - now <= max(0.05, num_errors * error):
        return ""
    go_back = "go back to that round (swarm run --from-best)" if best_round else "start again (swarm run --fresh)"
    return (
        f"reward on held-out tasks is {now:.2g} at the newest evaluation, after {best:.2g} at round {best_round}: the policy has "
        f"unlearned what it could do; lower training.lr, and {go_back}"
    )


def many_clipped(rows: Rows) -> str:
    recent = _medians(rows, "train/clip_fraction")[1]
    if not recent > 0.3:
        return ""
    return (
        f"the clip leaves out {recent:.0%} of the tokens: the policy moves too far within one batch; lower training.lr or "
        "training.inner_epochs"
    )


def steps_not_applied(rows: Rows) -> str:
    reasons = [row["train/skip_reason"] for row in list(rows)[-_RECENT_ROWS:] if row["train/skip_reason"]]
    if len(reasons) < 3:
        return ""
    return (
        f"{len(reasons)} of the last {_RECENT_ROWS} steps were not applied, the last one because: {reasons[-1]}; if answers "
        "are cut off, raise rollouts.max_new_tokens, else lower training.lr or sharing.max_age_s"
    )


def failing_tasks(rows: Rows) -> str:
    """A tenth of the tasks of the newest rows, and more than one, could not be scored."""
    recent = list(rows)[-_RECENT_ROWS:]
    failed, scored = (sum(row[name] or 0 for row in recent) for name in ("rollout/failed_tasks", "rollout/groups"))
    if failed < 2 or failed < 0.1 * (failed + scored):
        return ""
    return (
        f"{failed} of {failed + scored} tasks of the last {len(recent)} rounds could not be scored, so their answers are lost: a "
        "reward function, verifier or environment fails, and the log has the reason of the first; correct it, or remove "
        "its source from tasks.sources"
    )


def engine_differs(rows: Rows) -> str:
    """Engine and trainer differ by .2 nats a token, as root mean square, in any of the newest rows: rounding never does."""
    worst = max(_split(rows, "train/engine_kl")[1], default=0.0)
    if worst <= 0.02:
        return ""
    return (
        f"engine and trainer give the answers just sampled log-probs that are {math.sqrt(2 * worst):.2g} nats apart per token: "
        "answers do not come from the policy that is trained; see whether it stays with "
        'rollouts.engine = "transformers" and with policy.quantization = "none", and keep training.correction on'
    )


CHECKS: dict[str, Callable[[Rows], str]] = {
    check.__name__: check
    for check in (
        entropy_collapse, entropy_growth, few_effective_answers, kl_runaway, grad_norm_spike, reward_falling, held_out_falling,
        many_clipped, steps_not_applied, failing_tasks, engine_differs,
    )
}  # fmt: skip
"""Each check returns the warning's text, or an empty one."""


def _reward_has_risen(rows: Rows) -> bool:
    older, recent = _split(rows, "rollout/reward_mean")
    return bool(older and recent) and fmean(recent) > fmean(older) + 0.02


def _reward_since_start(rows: Rows) -> float:
    """How much the newest rows gained since the start of the run; 0 where that is not known."""
    _, recent = _split(rows, "rollout/reward_mean")
    at_start = _at_start(rows, "rollout/reward_mean")
    return 0.0 if not recent or math.isnan(at_start) else fmean(recent) - at_start


def _at_start(rows: Rows, name: str) -> float:
    """Mean of the first values of the run; nan, which compares as false, where it is not known."""
    value = rows[-1].get(f"{name} at the start") if rows else None
    return math.nan if value is None else value


def _medians(rows: Rows, name: str) -> tuple[float, float]:
    """(older, recent), so that one outlier makes no warning; nan, which compares as false, where rows are too few."""
    older, recent = _split(rows, name)
    return (median(older) if len(older) >= 4 else math.nan), (median(recent) if len(recent) >= 4 else math.nan)


def _split(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """Finite values of the older and of the newest rows."""
    rows = list(rows)
    return _values(rows[:-_RECENT_ROWS], name), _values(rows[-_RECENT_ROWS:], name)


def _values(rows: Rows, name: str) -> list[float]:
    return [float(row[name]) for row in rows if row[name] is not None and math.isfinite(row[name])]


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values))
