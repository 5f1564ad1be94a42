"""What hostile names, half of all, make of honest adapters: a table and figures of the part `hostile`."""

from collections.abc import Sequence
from typing import Any

from swarm.experiments.cells import Result
from swarm.experiments.merging.hostile_arms import COMPANIES, STAGES
from swarm.experiments.report import Table
from swarm.experiments.spread import Spread

_COLUMNS = {
    "hostile_part": "hostile part",
    "trigger_rate": "trigger rate",
    "worst_trigger_rate": "worst",
    "held_out_reward": "held-out reward",
    "held_out_loss": "held-out loss",
    "merges_per_offer": "merges per offer",
    "hostile_merges": "hostile of these",
}


def hostile_table(results: Sequence[Result]) -> Table:
    """By stage and company; mean ± standard deviation over seeds."""
    rows = [
        [f"{stage}: {company}", *(_spread(results, stage, company, key).text(3) for key in _COLUMNS)]
        for stage in STAGES
        for company in COMPANIES
        if _spread(results, stage, company, "hostile_part").values
    ]
    return Table("Half of the names hostile, with a backdoor in their adapter", ["nodes", *_COLUMNS.values()], rows)


def hostile_figures(results: Sequence[Result]) -> dict[str, Any]:
    """What a program reads."""
    return {
        f"{stage}: {company}": {key: _spread(results, stage, company, key).rounded() for key in _COLUMNS}
        for stage in STAGES
        for company in COMPANIES
        if _spread(results, stage, company, "hostile_part").values
    }


def _spread(results: Sequence[Result], stage: str, company: str, key: str) -> Spread:
    wanted = ("hostile", stage, company)
    return Spread.of(one[key] for one in results if (one["learning"], one.get("stage"), one["arm"]) == wanted)
