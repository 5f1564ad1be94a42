"""`swarm report`: one file about one node or several, whole without anything else, and text of others as text."""

import html
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import ConfigError, NodeNotRunningError
from swarm.observability.metrics import MetricsLog
from swarm.report.node_history import NodeHistory
from swarm.report.run_report import write_report
from swarm.report.summary import last_words
from swarm.report.svg_curves import Curve, smooth, svg_curves, ticks
from tests.unit.fake_node import end_row, evaluation_row
from tests.unit.page_factory import merge_entries, round_row, status

HOSTILE = "<script>alert(1)</script>\u202e\x1b[2J\"'&"


class Tags(HTMLParser):
    """Which there are, with all their attributes, and whether they close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes += attrs
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def node_folder(folder: Path, num_rounds: int, **told: Any) -> Path:
    folder.mkdir(parents=True)
    rng = random.Random(num_rounds)
    rows = [evaluation_row(0, "start", 0.25)]
    rows += [round_row(n, rng, **merge_entries(n, "12D3KooWOther", n // 10)) for n in range(1, num_rounds + 1)]
    rows += [evaluation_row(num_rounds, "end", 0.625), end_row(num_rounds)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "status.json").write_text(json.dumps(status(3, rows[-3], **told)))
    (folder / "config.toml").write_text('[swarm]\nname = "tëst"\n')
    return folder


def test_a_nodes_report_has_curves_tables_and_configuration_and_needs_nothing_else(tmp_path: Path) -> None:
    folder = node_folder(tmp_path / "node", 60)
    assert write_report([folder], tmp_path / "report.html") == 1
    text = (tmp_path / "report.html").read_text()
    tags = Tags(text)
    assert not tags.open and "script" not in tags.seen and "link" not in tags.seen and "img" not in tags.seen
    assert not [name for name, _ in tags.attributes if name in ("src", "href") or name.startswith("on")]
    assert "default-src 'none'" in text and text.count("<svg") >= 5
    for told in (
        "brave-otter-3f",
        "0.625",
        "max_rounds",
        "its claimed reward is not the one",
        "tëst",
        "Peers of node",
        "nobody 3",
    ):
        assert told in text, told


def test_a_testbeds_report_has_one_line_per_node(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        node_folder(
            tmp_path / "testbed" / f"node-{number}", 10 * number, peer_id=f"12D{number}", peer_name=f"name-{number}"
        )
    assert write_report([tmp_path / "testbed"], tmp_path / "report.html") == 3
    text = (tmp_path / "report.html").read_text()
    assert text.count("<path class='line") == 3 * text.count("<svg")
    assert all(f"node-{number} (name-{number})" in text for number in (1, 2, 3))


def test_nodes_of_two_swarms_in_one_folder_are_two_runs(tmp_path: Path) -> None:
    for name, swarm in (("a", "sums"), ("b", "sums"), ("c", "games")):
        folder = node_folder(tmp_path / "runs" / name, 10)
        (folder / "config.toml").write_text(f'[swarm]\nname = "{swarm}"\n')
    assert write_report([tmp_path / "runs"], tmp_path / "report.html") == 3
    told = text_of(tmp_path / "report.html")
    assert "2 nodes trained for" in told and "Node runs, swarm games" in told
    assert "runs, swarm sums/a" in told and "The best node is" not in told.split("swarm games")[-1]


def text_of(path: Path) -> str:
    """Its words, as a person sees them."""
    return html.unescape(re.sub(r"<[^>]*>", " ", path.read_text()))


def test_a_run_is_told_as_a_story_with_its_figures(tmp_path: Path) -> None:
    folder = node_folder(tmp_path / "node", 60)
    (folder / "metrics.jsonl").open("a").write(json.dumps(round_row(58, random.Random(0))) + "\n")  # after a crash
    write_report([folder], tmp_path / "report.html")
    told = text_of(tmp_path / "report.html")
    assert "held-out tasks, which nobody trains on, " not in told  # the evaluation after round 60 is undone
    assert "3 rounds had to be done again after a restart" in told
    assert "on 406 own groups and 348 of others, 46% of all" in told
    assert "did not end in order so far" in told
    assert "turned 2,720 away, 1,624 of them as replay: already known; harmless" in told
    whole = node_folder(tmp_path / "whole", 60)
    write_report([whole], tmp_path / "report.html")
    assert "went from 0.25 to 0.62; at least half of that was there at the evaluation after round 60" in text_of(
        tmp_path / "report.html"
    )


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ({"a": [0.0, 0.2, 0.4, 0.8]}, "earned 0.10 in the first 2 rounds and 0.60 in the last 2."),
        ({"a": [0.0, 0.2, 0.8]}, "earned 0.00 in the first round and 0.80 in the last."),
        ({"a": [0.25] * 10 + [0.75] * 10}, "earned 0.25 in the first 10 rounds and 0.75 in the last 10."),
        (
            {"a": [0.0, 0.4], "b": [0.2] * 15 + [0.8] * 15},
            "earned 0.10 in the first 1 to 10 rounds and 0.60 in the last 1 to 10.",
        ),
    ],
)
def test_the_first_and_the_last_rounds_of_a_story_do_not_overlap(
    tmp_path: Path, nodes: dict[str, list[float]], told: str
) -> None:
    for name, rewards in nodes.items():
        folder = node_folder(tmp_path / "run" / name, 1)
        rows = [round_row(n, random.Random(1)) | {"rollout/reward_mean": one} for n, one in enumerate(rewards, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report([tmp_path / "run"], tmp_path / "report.html")
    assert told in text_of(tmp_path / "report.html")


def test_a_history_begins_in_the_file_before_the_present_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    read, line_bytes = NodeHistory(path), len(json.dumps({"kind": "round", "round": 10})) + 1
    log = MetricsLog(path, max_bytes=10 * line_bytes)
    for number in range(10, 45):
        log.write({"kind": "round", "round": number})
        read.refresh()
        rounds = [row["round"] for row in read.rounds]
        assert rounds == list(range(rounds[0], number + 1)), "no round is lost or read twice where a new file is begun"
        assert rounds[0] == read.first_round == max(10, 10 * (number // 10 - 1)) and read.num_undone == 0
    bounded = NodeHistory(path, max_bytes=12 * line_bytes + 1)
    bounded.refresh()
    assert [row["round"] for row in bounded.rounds] == list(range(33, 45)), "the bound is that of both files together"


def test_a_report_that_lacks_the_first_rounds_says_so(tmp_path: Path) -> None:
    folder = node_folder(tmp_path / "lab", 20)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl.1").write_text("".join(lines[:8]))
    (folder / "metrics.jsonl").write_text("".join(lines[8:]))
    write_report([folder], tmp_path / "report.html")
    assert "The report covers" not in (tmp_path / "report.html").read_text()
    (folder / "metrics.jsonl.1").unlink()
    write_report([folder], tmp_path / "report.html")
    first = next(row["round"] for row in map(json.loads, lines[8:]) if row["kind"] == "round")
    assert f"The report covers lab from round {first} on" in (tmp_path / "report.html").read_text()


def test_a_night_in_which_a_node_stood_still_is_told(tmp_path: Path) -> None:
    folder = node_folder(tmp_path / "mine", 40)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["kind"] == "round":  # one a minute; three hours are missing after round 20
            row["time_s"] = 1_800_000_000 + 60 * row["round"] + (10_800 if row["round"] > 20 else 0)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report([folder], tmp_path / "report.html")
    assert "No round of mine ended for 3 h, until 2027-01-15 11:21 UTC." in text_of(tmp_path / "report.html")
    write_report([node_folder(tmp_path / "steady", 40)], tmp_path / "steady.html")
    assert "No round of" not in text_of(tmp_path / "steady.html")


def test_two_runs_stand_beside_each_other(tmp_path: Path) -> None:
    for name, rounds, accuracy, more in (("a", 30, 0.5, ""), ("b", 60, 0.75, "[training]\nlr = 0.01\n")):
        folder = node_folder(tmp_path / name / "run", rounds)
        rows = (folder / "metrics.jsonl").read_text().replace('"accuracy_mean": 0.625', f'"accuracy_mean": {accuracy}')
        (folder / "metrics.jsonl").write_text(rows)
        (folder / "config.toml").write_text(f'[swarm]\nname = "same"\n{more}')
    assert write_report([tmp_path / "a" / "run", tmp_path / "b" / "run"], tmp_path / "both.html") == 2
    told = " ".join(text_of(tmp_path / "both.html").split())
    assert "On held-out tasks b/run ends with 0.75, 0.25 higher than a/run with 0.50." in told
    assert "What a/run ends with, b/run had by the evaluation after round 60." in told
    assert "Settings that differ setting a/run b/run training.lr not set 0.01" in told
    assert "held-out reward, last 0.500 0.750 +0.250" in told and "rounds 30 60 +30" in told
    page = (tmp_path / "both.html").read_text()
    tags = Tags(page)
    assert not tags.open and "script" not in tags.seen
    assert page.count("<path class='line") == 2 * page.count("<svg")


def test_nodes_that_were_evaluated_after_other_rounds_count_with_their_last_evaluation(tmp_path: Path) -> None:
    for name, evaluations in (("a", {0: 0.2, 10: 0.4, 20: 0.6}), ("b", {0: 0.0, 5: 0.8})):
        folder = node_folder(tmp_path / "bed" / name, 20)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows = [row for row in rows if row["kind"] == "round"]
        for place, (number, value) in enumerate(evaluations.items()):
            rows.insert(number + place, evaluation_row(number, "interval" if number else "start", value))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report([tmp_path / "bed"], tmp_path / "report.html")
    told = text_of(tmp_path / "report.html")
    assert "went from 0.10 to 0.70; at least half of that was there at the evaluation after round 5." in told
    assert "None of them ended in order so far." in told
    assert "The best node is b with 0.80, the last a with 0.60." in told


def test_more_runs_than_a_page_can_hold_are_refused(tmp_path: Path) -> None:
    folders = [node_folder(tmp_path / str(number), 2) for number in range(9)]
    with pytest.raises(ConfigError, match="at most 8 runs, got 9"):
        write_report(folders, tmp_path / "report.html")


def test_text_of_others_stays_text(tmp_path: Path) -> None:
    peer = {"peer_id": HOSTILE, "name": HOSTILE, "lineage": HOSTILE, "weight": HOSTILE, "reward_mean": math.nan}
    folder = node_folder(tmp_path / "node", 5, peers=[peer, 7], peer_name=HOSTILE)
    (folder / "config.toml").write_text(HOSTILE)
    rows = round_row(6, random.Random(0), **merge_entries(6, HOSTILE, 3))
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(rows | {"exchange/rejected": {HOSTILE: 3}}) + "\n")
    write_report([folder], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    tags = Tags(text)
    assert "script" not in tags.seen and not tags.open
    assert "\u202e" not in text and "\x1b" not in text


def test_damaged_and_missing_files_cost_only_what_they_held(tmp_path: Path) -> None:
    folder = node_folder(tmp_path / "node", 5)
    (folder / "status.json").write_text("{")
    (folder / "config.toml").unlink()
    write_report([folder], tmp_path / "report.html")
    assert "5 rounds in all" in (tmp_path / "report.html").read_text()
    (folder / "metrics.jsonl").write_text("")
    write_report([folder], tmp_path / "report.html")
    assert "No values." in (tmp_path / "report.html").read_text()


def test_a_folder_without_a_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(NodeNotRunningError, match=r"metrics\.jsonl"):
        write_report([tmp_path], tmp_path / "report.html")


def test_a_curve_is_described_and_drawn_to_scale() -> None:
    drawn = svg_curves("Reward", "mean", {"a": Curve([0, 10], [0.0, 1.0]), "b": Curve([0, 5, 10], [0.5, None, 0.5])})
    first, second = re.findall(r"<path class='line [^']*' d='([^']*)'", drawn)
    assert first == "M48.0 204.0L550.0 10.0"
    assert second.count("M") == 2  # a gap where there was no value
    assert "a: from 0 to 1 mean; b: from 0.5 to 0.5 mean" in drawn
    assert "No values" in svg_curves("Reward", "mean", {"a": Curve([], [])})


def test_ticks_are_round_and_within() -> None:
    assert ticks(0, 1, 4) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(0, 4200, 4) == [0, 1000, 2000, 3000, 4000]


def test_smoothing_is_the_mean_of_the_last_known_ones() -> None:
    assert smooth([1.0, 3.0, None, 5.0], 2) == [1.0, 2.0, None, 5.0]


@pytest.mark.parametrize(
    ("evaluations", "told"),
    [
        ([(0, 0.9, "a"), (2, 0.6, "a"), (3, 0.7, "a"), (4, 0.5, "a")], "0.70 ± 0.09 after round 3"),
        ([(0, 0.9, "a"), (2, 0.4, "a"), (4, 0.5, "a")], ""),  # nothing is saved before the first round
        ([(2, 0.6, "b"), (3, 0.7, ""), (4, 0.5, "a")], ""),  # on other tasks, and where a source could not be scored
        ([(2, 0.6, ""), (4, 0.5, "")], ""),
    ],
)
def test_the_last_words_name_a_round_that_did_better_than_the_last(
    tmp_path: Path, evaluations: list[tuple[int, float, str]], told: str
) -> None:
    rows = [round_row(number, random.Random(1)) for number in range(1, 5)]
    for number, reward, tasks in evaluations:
        row = evaluation_row(number, "interval", reward) | {"num_tasks": 25, "measured_on": tasks}
        rows.insert(next((i for i, one in enumerate(rows) if one["round"] > number), len(rows)), row)
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lines = [line for line in last_words(tmp_path) if "did best" in line]
    assert len(lines) == bool(told) and all(told in line and "--best" in line for line in lines)


def test_the_last_words_of_a_run_say_what_it_learned_and_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    folder.mkdir()
    assert last_words(folder) == []
    rewards = [0.0, 0.2, 0.4, 0.8]
    start, end = (
        evaluation_row(number, phase, 0.5) | {"num_tasks": 25} for number, phase in ((0, "start"), (4, "end"))
    )
    rng = random.Random(1)
    rounds = [round_row(number, rng) | {"rollout/reward_mean": reward} for number, reward in enumerate(rewards, 1)]
    rows = [start, *rounds, end, end_row(4)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    told = "\n".join(last_words(folder))
    assert "by round 4" in told and "reward 0.10 ± 0.10 → 0.60 ± 0.20, in the first and the last 2 of 4 rounds" in told
    assert "reward 0.50 ± 0.10 → 0.50 ± 0.10" in told
    assert f"swarm run '{folder}/config.toml'\n" in told and f"swarm export OUT --dir '{folder}'" in told
    assert f"swarm eval --dir '{folder}' --compare\n" in told, "a greedy number beside no other one means little"
    assert "did best" not in told, "no other round did better"
    assert f"swarm run '{folder}/config.toml'\n" in "\n".join(last_words(folder, 5))
    assert f"swarm run '{folder}/config.toml' --node.max_rounds 8\n" in "\n".join(last_words(folder, 4))
