"""The testbed on processes that only look like nodes: starting, showing, stopping, summing up, comparing."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from swarm.config import REASONING_TASKS, load
from swarm.config.policy import BUNDLED_REASONING
from swarm.errors import ConfigError, SwarmError
from swarm.machine import tethered
from swarm.machine.node_folder import set_aside
from swarm.report.live_table import NodeView, sparkline
from swarm.report.node_history import MAX_REASONS, MAX_ROW_BYTES, NodeHistory
from swarm.report.plot import plot_testbed, running_minutes
from swarm.report.summary import conclusion, exchange_table, learning_table, source_table, summarize
from swarm.testbeds.comparison import ARMS, ArmResult, Comparison, comparison_table, plot_comparison
from swarm.testbeds.profiles import MERGING, NodePlan, PlanRequest, final_merge_time, plan_nodes
from swarm.testbeds.testbed import LOCK_FILE, NodeProcess, exclusive, stop_all, why_none_shared
from swarm.testbeds.testbed import Testbed as LocalSwarm
from tests.unit.fake_node import end_row, evaluation_row, round_row

FAKE_NODE = Path(__file__).with_name("fake_node.py")
PNG = b"\x89PNG\r\n"


def fake_command(endings: dict[str, str], joined: dict[str, str | None] | None = None) -> Callable[..., list[str]]:
    """Command lines of fake nodes, `done` where none is named; notes the address that each one joins through."""

    def command_of(plan: NodePlan, address: str | None) -> list[str]:
        if joined is not None:
            joined[plan.name] = address
        rounds = str(plan.config.node.max_rounds)
        return [sys.executable, str(FAKE_NODE), str(plan.folder), rounds, endings.get(plan.name, "done")]

    return command_of


def console() -> Console:
    return Console(file=io.StringIO(), width=80)


def printed(target: Console, *what: object) -> str:
    if what:
        target.print(*what)
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def wait_until(is_true: Callable[[], object], deadline_s: float = 20.0) -> None:
    until = time.monotonic() + deadline_s
    while not is_true():
        assert time.monotonic() < until, "deadline"
        time.sleep(0.02)  # between two looks at another process


def history(folder: Path, *rows: Mapping[str, object]) -> NodeHistory:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = NodeHistory(path)
    read.refresh()
    return read


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


class TestProfiles:
    def test_four_nodes_differ_in_batch_speed_and_rank(self, tmp_path: Path) -> None:
        configs = [plan.config for plan in plan_nodes(tmp_path, PlanRequest(num_rounds=100))]
        assert [c.rollouts.groups_per_round for c in configs] == [8, 12, 8, 8]
        assert [c.node.duty_cycle for c in configs] == [1.0, 1.0, 0.5, 1.0]
        assert [c.policy.lora.rank for c in configs] == [16, 16, 16, 8]
        assert [c.node.max_rounds for c in configs] == [100, 100, 50, 100]
        assert len({c.node.dir for c in configs}) == len({c.node.seed for c in configs}) == 4

    def test_overrides_win_over_profiles_and_profiles_over_files(self, tmp_path: Path) -> None:
        file = tmp_path / "all.toml"
        file.write_text("[policy.lora]\nrank = 4\n[training]\nlr = 0.5\n")
        request = PlanRequest(configs=[file], overrides={"node.duty_cycle": "0.25"})
        configs = [plan.config for plan in plan_nodes(tmp_path / "run", request)]
        assert [c.policy.lora.rank for c in configs] == [4, 4, 4, 8]
        assert {c.training.lr for c in configs} == {0.5}
        assert {c.node.duty_cycle for c in configs} == {0.25}

    def test_written_config_is_what_was_planned(self, tmp_path: Path) -> None:
        plan = plan_nodes(tmp_path / "it's here", PlanRequest(num_nodes=6))[5]
        plan.write()
        assert load([plan.config_path]) == plan.config
        assert plan.label == "large batch"

    def test_a_node_started_by_hand_is_in_the_same_swarm(self, tmp_path: Path) -> None:
        (plan,) = plan_nodes(tmp_path, PlanRequest(num_nodes=1))
        by_hand = load([Path("node_configs/testbed.toml")])
        assert by_hand.swarm_id == plan.config.swarm_id
        assert by_hand.tasks == plan.config.tasks

    def test_the_reasoning_policy_comes_with_its_tasks(self, tmp_path: Path) -> None:
        request = PlanRequest(num_nodes=1, overrides={"policy.base": BUNDLED_REASONING})
        (plan,) = plan_nodes(tmp_path, request)
        assert plan.config.tasks.sources == REASONING_TASKS
        plan.write()
        assert load([plan.config_path]) == plan.config

    def test_folder_of_a_node_cannot_be_overridden(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="set --dir"):
            plan_nodes(tmp_path, PlanRequest(overrides={"node.dir": "elsewhere"}))


class TestHistory:
    def test_rows_that_a_restart_undid_are_dropped(self, tmp_path: Path) -> None:
        read = history(
            tmp_path, evaluation_row(0, "start", 0.1), round_row(1, 0.1), round_row(2, 0.2),
            evaluation_row(2, "interval", 0.9), round_row(3, 0.3), round_row(2, 0.5),
        )  # fmt: skip
        assert read.rewards == [0.1, 0.5]
        assert [row["phase"] for row in read.evaluations] == ["start"]

    def test_counters_of_several_processes_add_up(self, tmp_path: Path) -> None:
        read = history(tmp_path, round_row(5, 0), round_row(7, 0), *(round_row(7 + n, 0) | counts(n) for n in (1, 2)))
        assert read.totals["exchange/bytes_sent"] == 70 + 20
        assert read.rejected == {"replay": 7 + 2}

    def test_line_that_is_still_being_written_is_read_later(self, tmp_path: Path) -> None:
        read = history(tmp_path, round_row(1, 0.1))
        line = json.dumps(round_row(2, 0.2)) + "\n"
        with (tmp_path / "metrics.jsonl").open("a") as log:
            log.write(line[:50])
            log.flush()
            read.refresh()
            assert read.round == 1
            log.write(line[50:])
        read.refresh()
        assert read.rewards == [0.1, 0.2]

    def test_damaged_line_costs_that_row_only(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text(json.dumps(round_row(1, 0.1)) + '\n{"kind": \n' + json.dumps(round_row(2, 0.2)) + "\n")
        read = NodeHistory(path)
        read.refresh()
        assert read.rewards == [0.1, 0.2]

    def test_shortened_file_is_read_anew(self, tmp_path: Path) -> None:
        read = history(tmp_path, round_row(1, 0.1), round_row(2, 0.2))
        (tmp_path / "metrics.jsonl").write_text(json.dumps(round_row(1, 0.7)) + "\n")
        read.refresh()
        assert read.rewards == [0.7]

    @pytest.mark.parametrize("kind", ["round", "evaluation"])
    def test_time_is_linear_in_rows_whatever_they_say(self, kind: str, tmp_path: Path) -> None:
        num_rows = 15_000
        row = {"kind": kind, "phase": "interval", "accuracy_mean": 0.5, "accuracy": {}, "rollout/reward_mean": 0.5}
        numbers = [*range(num_rows), *[num_rows] * num_rows]  # each of the latter half undoes the one before it
        started = time.process_time()
        read = history(tmp_path, *(row | {"round": number} for number in numbers))
        assert len(read.rounds if kind == "round" else read.evaluations) == num_rows + 1
        assert time.process_time() - started < 10, (
            "a second or less, and minutes where every row copied those before it"
        )

    def test_of_rows_by_others_only_what_is_used_is_kept(self, tmp_path: Path) -> None:
        odd = {f"odd/{number}": [[]] * 9 for number in range(20)}
        reasons = {"exchange/rejected": {"replay": 2} | dict.fromkeys(map(str, range(2 * MAX_REASONS)), 1)}
        infinite = round_row(4, 0.4, **{"exchange/bytes_sent": math.inf})
        long = round_row(5, 0.5, more="x" * MAX_ROW_BYTES)
        read = history(
            tmp_path, round_row(1, 0.1) | odd | {"merge/partner": [[]]}, round_row(2, 0.2) | reasons | odd,
            {**round_row(3, 0.3), "round": "3"}, {**round_row(3, 0.3), "round": math.nan}, infinite, long,
            evaluation_row(2, "interval", 0.5) | odd, evaluation_row(2, "once more", 0.5),
            evaluation_row(3, "interval", 0.75), {"kind": "end"},
        )  # fmt: skip
        assert [row["round"] for row in read.rounds] == [1, 2]
        assert read.rounds[0] == {
            key: value for key, value in round_row(1, 0.1).items() if key.startswith(("round", "rollout/", "time"))
        }
        assert read.last_round["odd/0"] == [[]] * 9, "the last one tells all"
        assert [row.get("accuracy") for row in read.evaluations] == [None, {"gcd": 0.75}]
        assert len(read.rejected) == MAX_REASONS
        assert read.totals["exchange/bytes_sent"] == 20

    def test_of_a_long_file_the_end_is_read_and_then_what_is_added(self, tmp_path: Path) -> None:
        path, lines = tmp_path / "metrics.jsonl", [json.dumps(round_row(n, 0.5)) + "\n" for n in range(10, 60)]
        path.write_text("".join(lines[:49]))
        read = NodeHistory(path, max_bytes=sum(map(len, lines[38:49])) - 1)  # its first row lacks a byte
        read.refresh()
        assert [row["round"] for row in read.rounds] == [*range(49, 59)]
        path.write_text("".join(lines))
        read.refresh()
        assert read.round == 59

    def test_missing_file_is_an_empty_history(self, tmp_path: Path) -> None:
        read = NodeHistory(tmp_path / "none.jsonl")
        read.refresh()
        assert (read.round, read.rewards, read.end) == (0, [], None)


def counts(number: int) -> dict[str, object]:
    """Counters of a new process after `number` rounds."""
    row = round_row(number, 0.0)
    return {key: value for key, value in row.items() if key.startswith("exchange/")}


class TestProcesses:
    def test_no_process_outlives_a_killed_testbed(self, tmp_path: Path) -> None:
        """The parent is killed with SIGKILL and can clean up nothing."""
        sleeper = [sys.executable, str(FAKE_NODE), str(tmp_path), "1", "wait"]
        script = (
            "import os, subprocess, sys\nfrom swarm.machine import tethered\n"
            f"subprocess.Popen(tethered.command(os.getpid(), {sleeper!r}), start_new_session=True).wait()"
        )
        parent = subprocess.Popen([sys.executable, "-c", script])
        wait_until((tmp_path / "metrics.jsonl").exists)
        pid = json.loads((tmp_path / "status.json").read_text())["pid"]
        assert not is_gone(pid)
        parent.kill()
        parent.wait()
        wait_until(lambda: is_gone(pid))

    def test_command_whose_parent_is_gone_does_not_start(self) -> None:
        ended = subprocess.run(tethered.command(1, [sys.executable, "-c", "print('started')"]), capture_output=True)
        assert (ended.returncode, ended.stdout) == (1, b"")

    def test_stubborn_node_and_its_daemon_are_killed_after_the_grace(self, tmp_path: Path) -> None:
        node = NodeProcess(tmp_path, [sys.executable, str(FAKE_NODE), str(tmp_path), "1", "stubborn"])
        wait_until((tmp_path / "metrics.jsonl").exists)
        daemon_pid = int((tmp_path / "daemon.pid").read_text())
        started = time.monotonic()
        stop_all([node], grace_s=0.3)
        assert time.monotonic() - started < 3
        assert node.exit_code == -signal.SIGKILL
        assert node.cause_of_death() == "killed by SIGKILL"
        wait_until(lambda: is_gone(daemon_pid))

    def test_addresses_of_an_earlier_process_are_not_believed(self, tmp_path: Path) -> None:
        status = {"peer_id": "x", "peer_name": "x", "pid": 1, "started_at": 0, "phase": "learning", "addresses": ["/a"]}
        (tmp_path / "status.json").write_text(json.dumps(status))
        node = NodeProcess(tmp_path, [sys.executable, "-c", "pass"])
        assert node.addresses == ()
        stop_all([node])


class TestTestbed:
    def test_all_nodes_run_to_their_end_through_the_first(self, tmp_path: Path) -> None:
        joined: dict[str, str | None] = {}
        plans = plan_nodes(tmp_path, PlanRequest(num_rounds=4))
        views = LocalSwarm(plans, console(), fake_command({"node-1": "meet"}, joined)).run("test")
        assert [view.state for view in views] == ["done"] * 4
        assert [view.history.round for view in views] == [4, 4, 2, 4]
        assert joined["node-1"] is None
        assert len({joined[f"node-{n}"] for n in (2, 3, 4)}) == 1
        assert str(joined["node-2"]).startswith("/ip4/127.0.0.1/tcp/")

    def test_node_that_dies_is_told_with_its_cause_and_stops_nobody(self, tmp_path: Path) -> None:
        target, joined = console(), dict[str, str | None]()
        plans = plan_nodes(tmp_path, PlanRequest(num_rounds=4))
        views = LocalSwarm(plans, target, fake_command({"node-1": "crash", "node-2": "meet"}, joined)).run("test")
        cause = "error: policy.base must exist, got nothing; set policy.base"
        assert [view.state for view in views] == [cause, "done", "done", "done"]
        assert f"node-1 ended: {cause}" in printed(target)
        assert joined["node-2"] is None, "the next node takes the place of the first"
        assert joined["node-3"] is not None

    def test_time_limit_ends_what_still_runs(self, tmp_path: Path) -> None:
        plans = plan_nodes(tmp_path, PlanRequest(num_rounds=4, num_nodes=2))
        views = LocalSwarm(plans, console(), fake_command({"node-2": "wait"})).run("test", max_minutes=0.01)
        assert views[0].state == "done"
        assert views[1].state != "done"

    def test_complete_run_is_shown_without_starting_anything(self, tmp_path: Path) -> None:
        plans = plan_nodes(tmp_path, PlanRequest(num_rounds=4, num_nodes=2))
        LocalSwarm(plans, console(), fake_command({})).run("test")
        joined: dict[str, str | None] = {}
        views = LocalSwarm(plans, console(), fake_command({}, joined)).run("test")
        assert [view.state for view in views] == ["done", "done"]
        assert joined == {}

    def test_silos_start_without_waiting_for_an_address(self, tmp_path: Path) -> None:
        joined: dict[str, str | None] = {}
        off = {"network.backend": "off", "sharing.swarm_groups": "0"}
        plans = plan_nodes(tmp_path, PlanRequest(num_rounds=2, num_nodes=2, overrides=off))
        LocalSwarm(plans, console(), fake_command({}, joined)).run("test")
        assert joined == {"node-1": None, "node-2": None}

    def test_ctrl_c_leaves_no_process(self, tmp_path: Path) -> None:
        """A testbed process of its own, interrupted as a terminal would."""
        script = (
            "import io, sys\nfrom pathlib import Path\nfrom rich.console import Console\n"
            "from swarm.testbeds.profiles import PlanRequest, plan_nodes\nfrom swarm.testbeds.testbed import Testbed\n"
            "from tests.unit.test_testbed import fake_command\n"
            f"plans = plan_nodes(Path({str(tmp_path)!r}), PlanRequest(num_nodes=2))\n"
            "Testbed(plans, Console(file=io.StringIO()), fake_command({'node-1': 'wait', 'node-2': 'wait'})).run('test')"
        )
        environment = os.environ | {"PYTHONPATH": str(FAKE_NODE.parents[2])}
        process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL, env=environment)
        folders = [tmp_path / "node-1", tmp_path / "node-2"]
        wait_until(lambda: all((folder / "metrics.jsonl").exists() for folder in folders))
        pids = [json.loads((folder / "status.json").read_text())["pid"] for folder in folders]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
        assert all(is_gone(pid) for pid in pids)

    def test_two_testbeds_in_one_folder_are_refused(self, tmp_path: Path) -> None:
        with exclusive(tmp_path), pytest.raises(ConfigError, match="--dir"), exclusive(tmp_path):
            pass

    def test_fresh_start_keeps_the_earlier_run(self, tmp_path: Path) -> None:
        for number in (1, 2):
            (tmp_path / "summary.json").write_text(str(number))
            assert set_aside(tmp_path, {LOCK_FILE}) == tmp_path / f"previous-00{number}"
        assert (tmp_path / "previous-001" / "summary.json").read_text() == "1"
        assert set_aside(tmp_path, {LOCK_FILE}) is None


class TestSummary:
    @pytest.fixture
    def view(self, tmp_path: Path) -> NodeView:
        rows = [evaluation_row(0, "start", 0.25), *(round_row(n, n / 40) for n in range(1, 21))]
        read = history(
            tmp_path, *rows, evaluation_row(10, "interval", 0.5), evaluation_row(20, "end", 0.75), end_row(20)
        )
        return NodeView("node-1", "plain [i]", 20, "done", read)

    def test_summary_holds_what_the_rows_say(self, view: NodeView) -> None:
        node = summarize(view)
        assert node.reward_start == pytest.approx(5.5 / 40)  # rounds 1 to 10
        assert node.reward_end == pytest.approx(15.5 / 40)  # rounds 11 to 20
        assert node.cumulative_reward == pytest.approx(210 / 40)
        assert (node.held_out_start, node.held_out_end, node.held_out_end_round) == (0.25, 0.75, 20)
        assert (node.own_groups, node.swarm_groups, node.rejected) == (80, 60, {"replay": 20})
        assert (node.bytes_sent, node.bytes_received, node.tokens_per_s) == (200, 400, 200.0)

    def test_tables_fit_a_terminal_of_eighty_columns(self, view: NodeView) -> None:
        nodes = [summarize(view)] * 4
        told = printed(console(), learning_table(nodes), source_table(nodes), exchange_table(nodes))
        assert max(map(len, told.splitlines())) <= 80
        assert all(part in told for part in ("plain [i]", "0.25 → 0.75", "80 + 60", "20 replay", "gcd"))
        assert "…" not in told
        assert "merges" not in told
        assert conclusion(nodes).endswith("0.25 before, 0.75 after")

    def test_merges_are_told_where_nodes_merge(self, tmp_path: Path) -> None:
        rows = [round_row(n, 0.5, **{"merge/merges_total": n, "merge/solo_steps_total": 2}) for n in range(1, 4)]
        rows.append({"kind": "final_merge", "round": 3, "final/places": 4})
        node = summarize(NodeView("node-1", "plain", 3, "done", history(tmp_path, *rows)))
        assert (node.merges, node.solo_steps, node.final_places) == (3, 2, 4)
        told = printed(console(), exchange_table([node] * 2))
        assert "merges" in told and "3 + 2" in told and "final" in told
        assert max(map(len, told.splitlines())) <= 80

    def test_training_that_ends_by_the_clock_leaves_time_for_a_final_merge(self) -> None:
        settings, minutes = final_merge_time(5, now=1_000_000.0)
        final_at = float(settings["merging.final_at"])
        assert final_at % float(MERGING["merging.final_interval_s"]) == 0
        assert 300 <= final_at - 1_000_000 <= 330 and 60 * minutes > final_at - 1_000_000 + 60

    def test_many_nodes_share_a_column(self, view: NodeView) -> None:
        told = printed(console(), source_table([summarize(view)] * 9))
        assert "all nodes" in told
        assert "0.25 → 0.75" in told

    def test_node_that_never_learned_is_summed_up_too(self, tmp_path: Path) -> None:
        node = summarize(NodeView("node-1", "plain", 5, "dead", history(tmp_path)))
        assert (node.rounds, node.reward_end, node.tokens_per_s) == (0, None, 0.0)
        assert "? → ?" in printed(console(), learning_table([node]))
        assert "no node" in conclusion([node])

    def test_plot_is_a_png(self, view: NodeView, tmp_path: Path) -> None:
        plot_testbed([view], tmp_path / "progress.png")
        assert (tmp_path / "progress.png").read_bytes().startswith(PNG)

    @pytest.mark.parametrize(
        ("second_starts_s", "swarm_groups", "overrides", "told"),
        [
            (
                60.0,
                0,
                {},
                "no node learned from another: node-1 had made its last round before node-2 made its first; give more",
            ),
            (60.0, 5, {}, ""),
            (5.0, 0, {}, ""),  # they met, so something else is wrong
            (60.0, 0, {"sharing.swarm_groups": "0"}, ""),
        ],
    )
    def test_nodes_that_never_met_are_told(
        self, tmp_path: Path, second_starts_s: float, swarm_groups: int, overrides: dict[str, str], told: str
    ) -> None:
        plans = plan_nodes(tmp_path, PlanRequest(num_nodes=2, num_rounds=15, overrides=overrides))
        views = []
        for plan, start_s in zip(plans, (0.0, second_starts_s), strict=True):
            plan.folder.mkdir()
            rows = [
                round_row(n, 0.5, **{"time_s": start_s + n, "train/swarm_groups_total": swarm_groups}) for n in (1, 15)
            ]
            views.append(NodeView(plan.name, plan.label, 15, "done", history(plan.folder, *rows)))
        assert why_none_shared(plans, views).startswith(told) and bool(told) == bool(why_none_shared(plans, views))
        assert not why_none_shared(plans[:1], views[:1])

    def test_pauses_between_two_runs_are_left_out_of_the_plot(self) -> None:
        assert running_minutes([60.0, 30.0, 3600.0, 3630.0]) == {30.0: 0.0, 60.0: 0.5, 3600.0: 0.5, 3630.0: 1.0}
        assert running_minutes([]) == {}

    def test_sparkline_shows_means_of_equal_shares(self) -> None:
        assert sparkline([0.0, 0.0, 1.0, 1.0], width=2) == "▁█"
        assert sparkline([0.5]) == "▅"
        assert sparkline([]) == ""


class TestComparison:
    REQUEST = PlanRequest(num_rounds=4, num_nodes=2)

    def test_all_arms_run_with_each_seed_and_finished_ones_are_kept(self, tmp_path: Path) -> None:
        results = Comparison(tmp_path, self.REQUEST, console(), fake_command({})).run([0, 1])
        assert [(r.seed, r.arm) for r in results] == [(seed, arm) for seed in (0, 1) for arm in ARMS]
        # rewards of 4 rounds: 1/8 + 2/8 + 3/8 + 4/8 on each of two nodes
        assert {r.cumulative_reward for r in results} == {2.5}
        assert results[0].reward_by_round == [0.125, 0.25, 0.375, 0.5]
        joined: dict[str, str | None] = {}
        again = Comparison(tmp_path, self.REQUEST, console(), fake_command({}, joined)).run([0, 1])
        assert again == results
        assert joined == {}

    def test_result_of_other_settings_is_not_reused(self, tmp_path: Path) -> None:
        Comparison(tmp_path, self.REQUEST, console(), fake_command({})).run([0])
        longer = PlanRequest(num_rounds=6, num_nodes=2)
        joined: dict[str, str | None] = {}
        Comparison(tmp_path, longer, console(), fake_command({}, joined)).run([0])
        assert set(joined) == {"node-1", "node-2"}

    def test_arms_differ_in_sharing_alone_and_share_identities(self, tmp_path: Path) -> None:
        seen: list[tuple[str, NodePlan, bytes]] = []

        def command_of(plan: NodePlan, address: str | None) -> list[str]:
            key = plan.folder / "identity.key"
            if not key.exists():
                key.write_bytes(f"{plan.name}".encode())
                key.chmod(0o600)
            seen.append((plan.folder.parent.name, plan, key.read_bytes()))
            return fake_command({})(plan, address)

        Comparison(tmp_path, self.REQUEST, console(), command_of).run([3])
        (_, sharing, key), (_, silo, same_key) = seen[0], seen[2]
        assert key == same_key == b"node-1"
        assert (silo.folder / "identity.key").stat().st_mode & 0o777 == 0o600
        assert (sharing.config.sharing.own_groups, sharing.config.sharing.swarm_groups) == (4, 4)
        assert (silo.config.sharing.own_groups, silo.config.sharing.swarm_groups) == (8, 0)
        same = {"rollouts", "training", "policy", "tasks", "evaluation"}
        assert sharing.config.model_dump(include=same) == silo.config.model_dump(include=same)
        assert sharing.config.node.seed == silo.config.node.seed == 3000

    def test_arm_with_a_failed_node_is_no_result(self, tmp_path: Path) -> None:
        with pytest.raises(SwarmError, match=r"node-2: error: policy\.base"):
            Comparison(tmp_path, self.REQUEST, console(), fake_command({"node-2": "crash"})).run([0])
        assert not (tmp_path / "seed-0" / "sharing" / "result.json").exists()

    def test_table_and_plot_show_mean_spread_and_paired_difference(self, tmp_path: Path) -> None:
        results = [arm("sharing", 0, 110.0, 0.6), arm("silos", 0, 100.0, 0.5)]
        results += [arm("sharing", 1, 130.0, 0.7), arm("silos", 1, 100.0, 0.6)]
        results += [arm("sharing-added", seed, 90.0, 0.5) for seed in (0, 1)]
        told = printed(console(), comparison_table(results))
        assert "120.0 ± 14.1" in told
        assert "+20.0 ± 14.1" in told
        assert "+0.100 ± 0.000" in told
        assert "-10.0 ± 0.0" in told
        plot_comparison(results, tmp_path / "comparison.png")
        assert (tmp_path / "comparison.png").read_bytes().startswith(PNG)


def arm(name: str, seed: int, cumulative: float, end: float) -> ArmResult:
    return ArmResult(name, seed, "d", cumulative, 0.4, end, {"gcd": end}, [0.1, 0.2, 0.3], 5, 60.0)
