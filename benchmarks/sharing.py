"""What joining a swarm of eight equals is worth to a member, beside silos and beside one trainer that samples for all.

    python benchmarks/sharing.py           five seeds, every arm with its best learning rate: `swarm experiment sharing`, hours
    python benchmarks/sharing.py --quick   two seeds, one learning rate, shorter runs: under ten minutes on two cores

`speedup_tokens_8` is how many times as many own tokens the silo samples until it first reaches the held-out reward that it ends
with, as a member needs that trains on all groups of the others; `share_of_oracle_8` is that over what one trainer reaches that
samples the groups of all eight from its one policy. `speedup_seconds_8` is the same by processor time, with answers of four
tokens, where training costs more than sampling. The last line of the output is one JSON object.
"""

import argparse
import json
import tempfile
from pathlib import Path

from swarm.experiments.cells import CellStore, compute
from swarm.experiments.sharing.arms import ARMS, ORACLE, SILO
from swarm.experiments.sharing.figures import figures, summarize, table
from swarm.experiments.sharing.plan import SharingPlan, tuned_factors

_MEMBER = "8/all, shaped"  # with the correction that nodes have
_QUICK_LR = 1.4
"""The best of silo and oracle on the tuning seed."""


def main() -> None:
    """Compute the cells, print the table, print the figures."""
    parser = argparse.ArgumentParser(description="What joining a swarm of eight is worth.")
    parser.add_argument("--quick", action="store_true", help="two seeds, one learning rate, shorter runs")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time, one thread each")
    parser.add_argument("--dir", type=Path, help="keep the cells here, and go on with those that are there")
    options = parser.parse_args()
    arms = tuple(ARMS[name] for name in (SILO, _MEMBER, ORACLE))
    plan = SharingPlan(arms, (0, 1, 2, 3, 4))
    if options.quick:
        plan = SharingPlan(arms, (0, 1), lr_factors=(_QUICK_LR,))
    with tempfile.TemporaryDirectory() as folder:
        store = CellStore((options.dir or Path(folder)) / "cells")
        tuned = tuned_factors(plan, lambda cells: compute(cells, store, options.workers, print))
        results = compute(plan.reported_cells(tuned), store, options.workers, print)
    print(table(summarize(results)).markdown())
    member = figures(results)[_MEMBER]
    print(
        json.dumps(
            {
                "speedup_tokens_8": member["speedup_tokens"]["mean"],
                "share_of_oracle_8": member["share_of_oracle"]["mean"],
                "speedup_seconds_8": member["speedup_seconds"]["mean"],
                "speedup_clock_8": member["speedup_clock"]["mean"],
                "seeds_missed": member["seeds_missed"],
            }
        )
    )


if __name__ == "__main__":
    main()
