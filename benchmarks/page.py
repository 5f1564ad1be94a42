"""A node's page in a headless Chromium: how soon it is there, and whether an hour of events makes it grow.

    python benchmarks/page.py            200 peers, 10,000 rounds of history, an hour of events as fast as the page takes them
    python benchmarks/page.py --quick    the same with ten minutes of events; under a minute

Real: the node's HTTP server and page, its metrics.jsonl, Chromium. Not real: the node; rows and status come from a generator.
An hour is 1,800 rounds of 2 s, each with its status and all its peers, which a node sends every 5 s only. Memory is the page's
JavaScript heap, its DOM and its buffers after a forced collection. The last line is one JSON object.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from swarm.dashboard import node_page
from tests.chromium import Chromium, find_chromium
from tests.unit.page_factory import ServedPage, merge_entries, round_row, serving, some_rollouts, status

_NUM_PEERS = 200
_NUM_ROUNDS = 10_000
_BATCH_ROUNDS = 16
"""Sent before the page is waited for: three events each, fewer than a client's queue holds."""
_READY = (
    f"document.querySelectorAll('#peers-table tbody tr').length === {_NUM_PEERS}"
    " && [...document.querySelectorAll('.lines path')].filter(line => line.getAttribute('d')).length === 4"
)


@dataclass(frozen=True, slots=True)
class Tab:
    """What the page holds at one moment, after a collection."""

    mib: float
    dom_nodes: int
    listeners: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ten minutes of events in place of an hour")
    num_events = 300 if parser.parse_args().quick else 1800
    if find_chromium() is None:
        sys.exit("this benchmark needs Chromium, found none; apt-get install chromium")
    node_page._PEERS_INTERVAL_S = 0.0
    with tempfile.TemporaryDirectory() as folder:
        write_history(Path(folder))
        with serving(Path(folder)) as node:
            show(node, _NUM_ROUNDS)
            some_rollouts(node.page)
            paints = [first_paint(node) for _ in range(3)]
            start, end = an_hour(node, num_events)
    print(
        f"first paint {[round(p, 2) for p, _ in paints]} s, curves and table there after {[round(r, 2) for _, r in paints]} s"
    )
    print(f"{num_events} rounds of events: {start} → {end}")
    result = {
        "first_paint_s": round(statistics.median(paint for paint, _ in paints), 3),
        "ready_s": round(statistics.median(ready for _, ready in paints), 3),
        "tab_mib_start": round(start.mib, 2),
        "tab_mib_end": round(end.mib, 2),
        "tab_growth_mib": round(end.mib - start.mib, 2),
        "dom_nodes_start": start.dom_nodes,
        "dom_nodes_end": end.dom_nodes,
        "events": 3 * num_events,
        "peers": _NUM_PEERS,
        "rounds": _NUM_ROUNDS,
    }
    print(json.dumps(result))


def write_history(folder: Path) -> None:
    rng = random.Random(0)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row_of(number, rng)) + "\n" for number in range(1, _NUM_ROUNDS))


def row_of(number: int, rng: random.Random) -> dict[str, Any]:
    return round_row(number, rng, **merge_entries(number, f"12D3KooWPeer{number // 20 % 40:08d}", number // 20))


def show(node: ServedPage, number: int) -> None:
    row = row_of(number, random.Random(number))
    node.show(row, status(_NUM_PEERS, row))


def first_paint(node: ServedPage) -> tuple[float, float]:
    """(first contentful paint, all curves and rows there), seconds since the navigation began, in a browser just started."""
    with Chromium() as browser:
        browser.open(node.url)
        browser.wait_for(_READY)
        ready_s = browser.run("performance.now()") / 1000
        paint_ms = browser.run("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        return paint_ms / 1000, ready_s


def an_hour(node: ServedPage, num_rounds: int) -> tuple[Tab, Tab]:
    """The tab before and after; it is warmed up by a minute first, as code that is compiled for the first time grows once."""
    with Chromium() as browser:
        browser.open(node.url)
        browser.wait_for(_READY)
        browser.run("location.hash = '#rollouts'")
        browser.wait_for("document.querySelectorAll('#groups details').length > 0")
        number = _NUM_ROUNDS
        moments: list[Tab] = []
        for count in (32, num_rounds):
            for done in range(0, count, _BATCH_ROUNDS):
                for _ in range(min(_BATCH_ROUNDS, count - done)):
                    number += 1
                    show(node, number)
                browser.wait_for(
                    f"document.querySelector('#tiles div:nth-child(2) dd').textContent.replace(',', '') === '{number}'"
                )
            moments.append(tab_of(browser))
        assert node.page._feed.num_dropped == 0, "the page was too slow for its events"
        return moments[0], moments[1]


def tab_of(browser: Chromium) -> Tab:
    for _ in range(3):  # what finalizers let go is collected by the next one
        browser.call("HeapProfiler.collectGarbage")
    heap, counters = browser.call("Runtime.getHeapUsage"), browser.call("Memory.getDOMCounters")
    num_bytes = heap["usedSize"] + heap.get("embedderHeapUsedSize", 0) + heap.get("backingStorageSize", 0)
    return Tab(num_bytes / 2**20, counters["nodes"], counters["jsEventListeners"])


if __name__ == "__main__":
    main()
