"""What the compute thread does from a node's first round to its last.

    evaluate ─▶ ( run_round ─▶ metrics row ─▶ checkpoint ─▶ evaluate ─▶ rest ) … ─▶ last checkpoint ─▶ final merge ─▶ evaluate

A round itself is `Learner.run_round`. Checkpoints are written beside the rounds; only the last ones are waited for.
"""

import logging
import shlex
from collections.abc import Callable

from swarm.adapters.checkpoint import BestRound, CheckpointStore, CheckpointWriter
from swarm.config import Config
from swarm.errors import CheckpointError
from swarm.machine.node_folder import NodeFolder
from swarm.node.controls import NodeControls
from swarm.node.learner import Learner
from swarm.node.report import NodeReport
from swarm.node.watchdog import Watchdog
from swarm.observability.plain_text import counted
from swarm.policy.policy import Policy

logger = logging.getLogger(__name__)

_SHORTEST_LIMIT_S = 600.0
_LIMIT_ROUNDS = 20
"""A round counts as stuck after this many times the longest round so far."""
_FIRST_LIMIT_S = 1800.0
"""For work whose duration is not known yet: the first round, and evaluations."""
_CHECKPOINT_LIMIT_S = 300.0
_SAVE_SHARE = 0.05
"""Largest part of its time that training waits for checkpoints which only `checkpoint.interval_s` asks for."""
_BETWEEN_ROUNDS = "nothing: between two rounds, or paused"


class TrainingRun:
    """The run of one learner that has been built and resumed. `run` blocks its thread."""

    def __init__(
        self,
        config: Config,
        folder: NodeFolder,
        learner: Learner,
        *,
        report: NodeReport,
        clock: Callable[[], float],
        watchdog: Watchdog,
        controls: NodeControls,
    ) -> None:
        """`clock`: swarm time. `watchdog`: notes what the thread is doing, and how long that may take. `controls`: obeyed
        between two rounds.
        """
        self.learner = learner
        self._config = config
        self._folder = folder
        self._report = report
        self._clock = clock
        self._watchdog = watchdog
        self._controls = controls
        self._longest_round_s = 0.0
        self._saved_at_s = watchdog.awake_s()
        self._save_s = 0.0
        """Time that training waited for the last checkpoint: for the write before it, and for its copy."""
        self._saved_round: int | None = None
        """Round of the checkpoint that was begun last."""
        self._store = CheckpointStore(folder.checkpoints, config.checkpoint.keep)
        self._writer = CheckpointWriter(self._store, self._on_refusal)

    def run(self) -> None:
        """Train until a setting ends it or a stop is asked for. Raises what ended it otherwise."""
        with self._writer:
            self._run()

    def wait_for_write(self, timeout_s: float) -> None:
        """Wait for the checkpoint that is being written, at most `timeout_s`. For any thread."""
        self._writer.wait(timeout_s)

    def _run(self) -> None:
        learner = self.learner
        if learner.round == 0 and not self._controls.has_ended:
            self._warm_start()
            self._evaluate("start")
        self._report.phase = "learning"
        while not self._controls.has_ended and not self._why_done():
            self._begin(_BETWEEN_ROUNDS, None)
            self._controls.between_rounds(self._save)
            if not self._controls.has_ended:
                self._round()
        self._begin("writing the last checkpoint", _CHECKPOINT_LIMIT_S)
        if learner.round or not self._config.warm_start.steps:  # else it may have ended in the middle of its warm start
            self._save_and_wait()
        done = self._why_done()
        if done and not self._controls.has_ended:
            self._final_merge()
        if done and not self._controls.has_ended:
            self._evaluate("end")
        self._report.record({"kind": "end", "reason": done or "interrupted", "round": learner.round})
        place = shlex.quote(str(self._folder.path))
        logger.info("%s; `swarm report %s` tells what it has learned", self._end_told(done), place)
        self._report.phase = "ended"
        self._begin("nothing", None)

    def _warm_start(self) -> None:
        """Take the supervised steps before the first round. A node that ends in the middle takes all of them again."""
        start = self._config.warm_start
        if start.steps or start.adapter is not None or start.adapter_hub:
            self._report.phase = "warm start"
            self._begin("the warm start", None)
            self.learner.warm_start(lambda: self._controls.has_ended)

    def _round(self) -> None:
        learner = self.learner
        self._begin(f"round {learner.round + 1}", self._round_limit_s())
        began_s = self._watchdog.awake_s()
        row = learner.run_round()
        worked_s = self._watchdog.awake_s() - began_s
        self._longest_round_s = max(self._longest_round_s, worked_s)
        self._report.record(row)
        if self._checkpoint_is_due():
            self._save()
        interval = self._config.evaluation.interval_rounds
        if interval and learner.round % interval == 0 and not self._why_done():  # else the one at the end follows
            self._evaluate("interval")
            self._report.phase = "learning"
        self._rest(worked_s)

    def _checkpoint_is_due(self) -> bool:
        settings = self._config.checkpoint
        since_s = self._watchdog.awake_s() - self._saved_at_s
        is_late = 0 < settings.interval_s <= since_s and self._save_s <= _SAVE_SHARE * since_s
        return is_late or self.learner.round % settings.interval_rounds == 0

    def _save(self, on_saved: Callable[[int], None] | None = None) -> None:
        """Begin to write a checkpoint. During a run, a disk that refuses costs a checkpoint and not the node."""
        began_s = self._watchdog.awake_s()
        self._begin("waiting for the checkpoint before", _CHECKPOINT_LIMIT_S)
        self._writer.finish_earlier()  # first: two copies would take the memory twice
        self._begin("copying what a checkpoint holds", _CHECKPOINT_LIMIT_S)
        try:
            tensors, state = self.learner.state()
        except CheckpointError as error:
            self._on_refusal(self.learner.round, error)
        else:
            self._writer.save(self.learner.round, tensors, state, on_saved)
            self._saved_round = self.learner.round
        finally:
            self._saved_at_s = self._watchdog.awake_s()
            self._save_s = self._saved_at_s - began_s
            self._begin(_BETWEEN_ROUNDS, None)

    def _save_and_wait(self) -> None:
        """Write the last checkpoint. Raises CheckpointError where the disk refuses this one."""
        self._writer.finish_earlier()
        self.learner.save(self._writer)
        self._writer.finish()
        self._saved_round = self.learner.round

    def _on_refusal(self, round: int, error: CheckpointError) -> None:
        self._report.count_failed_step()
        logger.error("round %d was not saved: %s", round, error)

    def _why_done(self) -> str:
        """The setting that has ended training; empty while training goes on."""
        max_rounds, final_at = self._config.node.max_rounds, self._config.merging.final_at
        if max_rounds is not None and self.learner.round >= max_rounds:
            return "max_rounds"
        is_time_up = self.learner.merging is not None and self._config.merging.final and 0 < final_at <= self._clock()
        return "final_at" if is_time_up else ""

    def _end_told(self, done: str) -> str:
        """Why the run has ended, for people, and how it goes on where it has made all its rounds."""
        num_rounds, max_rounds = self.learner.round, self._config.node.max_rounds
        if done != "max_rounds":
            return (
                f"ended after round {num_rounds}, as merging.final_at says"
                if done
                else f"stopped after round {num_rounds}"
            )
        had = "" if num_rounds == max_rounds else f", {num_rounds} in all"
        go_on = self._folder.run_command(num_rounds, max_rounds)
        return f"this run has made its {counted(max_rounds or 0, 'round')} (node.max_rounds){had}; go on with `{go_on}`"

    def _final_merge(self) -> None:
        """Merge with all other nodes that have ended. The result is the last checkpoint."""
        if self.learner.merging is None or not self._config.merging.final:
            return
        self._report.phase = "merging"
        self._begin("waiting for the last merge", None)  # until a time that others know as well
        row = self.learner.merging.finish()
        if row is None or self._controls.has_ended:  # what was saved before stands, and is merged after a restart
            return
        self._report.record({"kind": "final_merge", "round": self.learner.round, **row})
        self._save_and_wait()
        if self._config.merging.final_export:
            from swarm.adapters.export import export_adapter, published_base
            from swarm.policy.lineage import hash_weights

            policy = self.learner.policy
            assert isinstance(policy, Policy), "the configuration refuses an export of what no machine holds whole"
            base_hash = hash_weights(policy.base_folder, self._folder.hash_cache)
            out = self._folder.final_adapters / f"round-{self.learner.round:06d}"
            base = published_base(policy.config.base, policy.config.revision, policy.base_folder)
            export_adapter(policy.model, policy.tokenizer, out, base_hash, base=base)

    def _evaluate(self, phase: str) -> None:
        if self._config.evaluation.tasks_per_source:
            self._report.phase = "evaluating"
            self._begin("an evaluation", max(_FIRST_LIMIT_S, self._round_limit_s()))
            row = self.learner.evaluate(phase)
            self._report.record(row)
            if self.learner.round and row["measured_on"]:
                self._keep_if_best(BestRound(self.learner.round, row["accuracy_mean"], row["measured_on"]))

    def _keep_if_best(self, now: BestRound) -> None:
        """Keep the checkpoint of this round if none did better in such an evaluation."""
        self._writer.finish_earlier()  # it may mark one
        best = self._store.best()
        is_earlier = best is not None and best.round != now.round  # else the final merge has changed what was marked
        if best and is_earlier and best.measured_on == now.measured_on and best.reward > now.reward:
            return
        if self._saved_round != now.round:
            self._save()
        if self._saved_round == now.round:  # else the disk refused, or stages did not give their state
            self._writer.mark_best(now)

    def _rest(self, worked_s: float) -> None:
        duty = self._config.node.duty_cycle
        if duty < 1:
            self._begin("resting", None)
            self._controls.wait_for_end(worked_s * (1 / duty - 1))

    def _round_limit_s(self) -> float:
        if not self._longest_round_s:
            return _FIRST_LIMIT_S
        return max(_SHORTEST_LIMIT_S, _LIMIT_ROUNDS * self._longest_round_s)

    def _begin(self, doing: str, limit_s: float | None) -> None:
        self._watchdog.mark("compute thread", doing, limit_s)
