"""The page of one node: its data, its events and its controls over HTTP.

NodeReport ─ rows, status ─┐                 ┌─ GET api/state, api/summary      all there is, once
Reader, Learner ─ groups ──┼─▶ [NodePage] ───┼─ GET api/rollouts, config, logs  what a reader asks for
NodeControls ◀─────────────┘                 ├─ GET api/events                  what changes
                                             └─ POST api/control/ACTION         with the token only
"""

import asyncio
import logging
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from swarm import __version__
from swarm.config import Config, Origin
from swarm.config.shareable import told_settings
from swarm.dashboard.feed import EventPlaces, EventResponse, Feed, Readings
from swarm.dashboard.recent_rollouts import KINDS, MAX_FIND_CHARS, RecentRollouts
from swarm.dashboard.series import Evaluations, MergeLog, Series
from swarm.dashboard.shown import WORDS, log_level, read_logs, shown
from swarm.dashboard.static_files import StaticFiles, is_token, make_token
from swarm.errors import NodeNotRunningError
from swarm.machine.node_folder import MAX_CONFIG_BYTES
from swarm.machine.safe_files import read_file
from swarm.node.controls import ACTIONS, NodeControls
from swarm.observability.metrics import last_rows
from swarm.observability.status_file import judge, read_status, shown_from

logger = logging.getLogger(__name__)

TOKEN_HEADER = "x-swarm-token"  # noqa: S105  the name of a header
_SUMMARY_POINTS = 100
_PEERS_INTERVAL_S = 5.0
MAX_ADVICE = 3
"""Lines on what is wrong, as an overview is told."""
_MAX_PAIRS = 64
"""Peers with whom something was exchanged, as an overview is told."""
_LOGS_KEPT_S = 1.0
_STATE_KEPT_S = 15.0
"""Of a node that has ended. Whoever asks for the same so soon again gets the same answer."""


class NodePage:
    """Of one run of one node; on its loop, except where it says so."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        controls: NodeControls,
        stages: Callable[[], list[dict[str, Any]]] = list,
        origin: Origin | None = None,
    ) -> None:
        """`folder`: the node's, with its history, in which the token is put. In a silo rollouts and settings are shown for that
        only.

        `stages`: where the policy is in stages, {stage, first_layer, end_layer, holder} of each. `origin`: where each setting
        comes from.
        """
        self.rollouts = RecentRollouts()
        self._stages = stages
        self._folder = folder
        self._controls = controls
        self._is_private = bool(config.swarm.silo_owner)
        self._swarm_name = "" if self._is_private else config.swarm.name
        self._merges_adapters = config.merging.enabled
        self._max_rounds = config.node.max_rounds
        self._feed = Feed()
        self._places = EventPlaces()
        self._files = StaticFiles()
        self._token = ""
        self._settings = told_settings(config, origin)
        self._series = Series()
        self._evaluations = Evaluations()
        self._merges = MergeLog()
        self._status: dict[str, Any] = {}
        self._peers: list[Any] = []
        self._peers_told_at = 0.0
        self._rollouts_told = 0
        self._readings = Readings()
        self._waiting: list[Mapping[str, Any]] | None = []
        """Rows that came before the history was read; None after that."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Make the token, and begin to read what earlier processes did. Without a token the page only shows."""
        self._loop = asyncio.get_running_loop()
        try:
            self._token = await asyncio.to_thread(make_token, self._folder)
        except OSError as error:
            logger.warning("the page cannot control this node, as its token was not written: %s", error)
        self._loading = asyncio.create_task(self._load())

    async def stop(self) -> None:
        """End all streams; before the server is stopped, which waits for them."""
        self._feed.close()
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)

    def phase(self, phase: str) -> str:
        """The phase as it is shown everywhere, with what is paused."""
        return self._controls.phase(phase)

    def show_row(self, row: Mapping[str, Any]) -> None:
        """A row of kind round or evaluation. From any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._take_row, {"time_s": time.time(), **row})

    def show_status(self, status: Mapping[str, Any]) -> None:
        """A NodeStatus as a dict, and the verdict on it, every few seconds."""
        public = {name: value for name, value in status.items() if name not in _NEVER_SHOWN}
        self._status = shown({**public, "stages": self._stages()})
        self._peers = shown(status.get("peers") or [])
        if self._feed.num_clients:
            self._feed.publish("status", {"status": self._status, "controls": self._controls.state()})
            self._tell_peers()
            self._tell_rollouts()

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/", self._get_page),
            Route("/api/state", self._get_state),
            Route("/api/series", self._get_series),
            Route("/api/summary", self._get_summary),
            Route("/api/rollouts", self._get_rollouts),
            Route("/api/config", self._get_config),
            Route("/api/logs", self._get_logs),
            Route("/api/events", self._get_events),
            Route("/api/control/{action}", self._control, methods=["POST"]),
            *self._files.routes(),
        ]

    def state(self) -> dict[str, Any]:
        """Everything but the rollouts."""
        return {
            **state_of(self._status, self._peers, (self._series, self._evaluations, self._merges)),
            "event_id": self._feed.last_id,
            "is_loading": self._waiting is not None,
            "is_private": self._is_private,
            "swarm": self._swarm_name,
            "merges_adapters": self._merges_adapters,
            "max_rounds": self._max_rounds,
            "controls": self._controls.state(),
            "rollouts": self.rollouts.last_number,
        }

    def summary(self) -> dict[str, Any]:
        """What an overview of many nodes shows of this one."""
        return summary_of({**self._status, "peers": self._peers}, self._series, self._evaluations)

    async def _load(self) -> None:
        """Earlier rounds, then those that came meanwhile."""
        try:
            history = await asyncio.to_thread(read_history, self._folder)
        except OSError as error:
            logger.warning("the page begins without earlier rounds: %s", error)
            history = Series(), Evaluations(), MergeLog()
        waiting, self._waiting = self._waiting or [], None
        self._series, self._evaluations, self._merges = history
        for row in waiting:
            self._take_row(row)
        self._feed.publish("reset", {})

    def _take_row(self, row: Mapping[str, Any]) -> None:
        if self._waiting is not None:
            self._waiting.append(row)
            return
        if row["kind"] == "evaluation":
            self._evaluations.add(row)
            self._feed.publish("evaluations", {"evaluations": self._evaluations.points()})
            return
        _undo(self._evaluations, row)
        self._series.add(row)
        merge = self._merges.add(row, row["time_s"])
        event: dict[str, Any] = {"point": self._series.last_point()}
        if merge is not None:
            event["merge"] = shown(merge)
        self._feed.publish("round", event)

    def _tell_peers(self) -> None:
        if time.monotonic() - self._peers_told_at >= _PEERS_INTERVAL_S:
            self._peers_told_at = time.monotonic()
            self._feed.publish("peers", {"peers": self._peers})

    def _tell_rollouts(self) -> None:
        number = self.rollouts.last_number
        if number != self._rollouts_told:
            self._rollouts_told = number
            self._feed.publish("rollouts", {"number": number})

    def _has_token(self, request: Request) -> bool:
        return bool(self._token) and is_token(request.headers.get(TOKEN_HEADER, ""), self._token)

    async def _get_page(self, request: Request) -> Response:
        return self._files.page("node.html")

    async def _get_state(self, request: Request) -> Response:
        return JSONResponse(self.state())

    async def _get_series(self, request: Request) -> Response:
        asked = range_query(request)
        return JSONResponse(self._series.part(*asked.values())) if asked else _no_range()

    async def _get_summary(self, request: Request) -> Response:
        return JSONResponse(self.summary())

    def _may_read(self, request: Request) -> bool:
        """Whether who asks may see what is private in a silo."""
        return not self._is_private or self._has_token(request)

    async def _get_config(self, request: Request) -> Response:
        if not self._may_read(request):
            return JSONResponse({"error": "in a silo settings are shown for the token only"}, status_code=401)
        return JSONResponse({"settings": shown(self._settings)})

    async def _get_rollouts(self, request: Request) -> Response:
        if not self._may_read(request):
            return JSONResponse({"error": "in a silo rollouts are shown for the token only"}, status_code=401)
        asked = rollout_query(request)
        key = ("rollouts", *asked.values(), self.rollouts.last_number)
        return await self._readings.answer(key, lambda: shown(self.rollouts.page(**asked)))

    async def _get_logs(self, request: Request) -> Response:
        if not self._may_read(request):
            return JSONResponse({"error": "in a silo logs are shown for the token only"}, status_code=401)
        return await logs_answer(self._readings, self._folder, request, is_whole=self._has_token(request))

    async def _get_events(self, request: Request) -> Response:
        last_id = request.headers.get("last-event-id") or request.query_params.get("after")
        return EventResponse(self._feed.stream(last_id), self._places)

    async def _control(self, request: Request) -> Response:
        """Acts, and tells all pages. The body, if any, is never read."""
        if not self._has_token(request):
            return JSONResponse({"error": "the page's token is missing or wrong"}, status_code=401)
        action = request.path_params["action"]
        if action not in ACTIONS:
            return JSONResponse({"error": f"no such control; there are {', '.join(ACTIONS)}"}, status_code=404)
        self._controls.act(action)
        controls = self._controls.state()
        self._feed.publish("controls", {"controls": controls})
        return JSONResponse({"controls": controls})


History = tuple[Series, Evaluations, MergeLog]


def state_of(status: Mapping[str, Any], peers: Sequence[Any], history: History) -> dict[str, Any]:
    """What the page of a node shows, whether it runs or has ended."""
    series, evaluations, merges = history
    return {
        "version": __version__,
        "now_s": time.time(),
        "status": status,
        "peers": peers,
        "series": series.points(),
        "evaluations": evaluations.points(),
        "merges": shown(merges.newest_first()),
        "reasons": {reason.value: words for reason, words in WORDS.items()},
    }


def summary_of(status: Mapping[str, Any], series: Series, evaluations: Evaluations) -> dict[str, Any]:
    """What an overview shows of a node. `status`: as in its status file."""
    row = status.get("last_round", {})
    return {
        "version": __version__,
        "name": status.get("peer_name", ""),
        "peer_id": status.get("peer_id", ""),
        "phase": status.get("phase", "starting"),
        "verdict": status.get("verdict", ""),
        "why": status.get("why", ""),
        "advice": (status.get("contribution") or {}).get("advice", [])[:MAX_ADVICE],
        "round": status.get("round", 0),
        "started_at": status.get("started_at"),
        "reward": row.get("rollout/reward_mean"),
        "tokens_per_s": row.get("rollout/tokens_per_s"),
        "peers": row.get("network/peers"),
        "own_groups": row.get("train/own_groups_total"),
        "swarm_groups": row.get("train/swarm_groups_total"),
        "merges": row.get("merge/merges_total"),
        "curve": series.rewards(_SUMMARY_POINTS),
        "held_out": evaluations.means(_SUMMARY_POINTS),
        "exchange": _pairs(status.get("peers") or []),
    }


def read_history(folder: Path) -> History:
    """What metrics.jsonl of a node's folder says. Takes a while. Raises OSError."""
    series, evaluations, merges = Series(), Evaluations(), MergeLog()
    for row in last_rows(folder / "metrics.jsonl"):
        if row.get("kind") == "round":
            _undo(evaluations, row)
            series.add(row)
            merges.add(row, row.get("time_s", 0.0))
        elif row.get("kind") == "evaluation":
            evaluations.add(row)
    return series, evaluations, merges


_MAX_HISTORIES = 4
_NEVER_SHOWN = ("peers", "pid", "failure")
"""Of a status, as it is: peers are shown by themselves."""


class EndedNodes:
    """The pages of nodes that do not run, from the files in their folders."""

    def __init__(self) -> None:
        self._readings = Readings()
        self._histories: dict[Path, tuple[float, History]] = {}
        """Of the folders that were asked for last, and when their metrics were written."""

    async def answer(self, folder: Path, what: str, request: Request) -> Response | None:
        """None where a node that has ended has no such thing, such as rollouts, which were in its memory."""
        try:
            if what == "state":
                key = ("state", folder, time.monotonic() // _STATE_KEPT_S)
                return await self._readings.answer(key, lambda: self._state(folder))
            if what == "series":
                asked = range_query(request)
                if not asked:
                    return _no_range()
                key = ("series", folder, *asked.values(), time.monotonic() // _STATE_KEPT_S)
                return await self._readings.answer(key, lambda: self._history(folder)[0].part(*asked.values()))
            if what == "logs":
                settings = await asyncio.to_thread(folder_settings, folder)
                if not settings or _is_of_silo(settings):
                    told = "the logs of a node of a silo are shown by `swarm logs` only, or on its own page"
                    return JSONResponse({"error": told}, status_code=401)
                return await logs_answer(self._readings, folder, request)
        except (OSError, NodeNotRunningError):
            return JSONResponse({"error": "the files of the node cannot be read"}, status_code=503)
        return None

    def _state(self, folder: Path) -> dict[str, Any]:
        status, settings = read_status(folder / "status.json"), folder_settings(folder)
        verdict = judge(status, time.time())
        public = {name: value for name, value in asdict(status).items() if name not in _NEVER_SHOWN}
        with shown_from(folder / "status.json"):
            return {
                **state_of(
                    shown({**public, "verdict": verdict.word.value, "why": verdict.why}),
                    shown(status.peers),
                    self._history(folder),
                ),
                "is_ended": True,
                "is_private": _is_of_silo(settings),
            }

    def _history(self, folder: Path) -> History:
        path = folder / "metrics.jsonl"
        written_at = path.stat().st_mtime if path.exists() else 0.0
        kept_at, history = self._histories.pop(folder, (-1.0, None))
        if history is None or kept_at != written_at:
            history = read_history(folder)
        while len(self._histories) >= _MAX_HISTORIES:
            del self._histories[next(iter(self._histories))]
        self._histories[folder] = (written_at, history)
        return history


def folder_settings(folder: Path) -> dict[str, Any]:
    """Those of the configuration in a node's folder, which may be somebody else's; empty where they cannot be read."""
    try:
        return tomllib.loads(read_file(folder / "config.toml", MAX_CONFIG_BYTES).decode())
    except (OSError, ValueError, RecursionError):
        return {}


def _is_of_silo(settings: Mapping[str, Any]) -> bool:
    section = settings.get("swarm")
    return bool(section.get("silo_owner")) if isinstance(section, dict) else False


def _pairs(peers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the node took from each peer, and each peer from it, the most first."""
    pairs = [
        {
            "peer_id": str(peer.get("peer_id", "")),
            "groups_admitted": peer.get("groups_admitted") or 0,
            "bodies_taken": peer.get("bodies_taken") or 0,
        }
        for peer in peers
    ]
    pairs = [pair for pair in pairs if pair["groups_admitted"] or pair["bodies_taken"]]
    return sorted(pairs, key=lambda pair: -(pair["groups_admitted"] + pair["bodies_taken"]))[:_MAX_PAIRS]


async def logs_answer(readings: Readings, folder: Path, request: Request, is_whole: bool = False) -> Response:
    """The newest lines of the logs in a node's folder that the request wants; without what not everybody may see."""
    asked = log_query(request)
    key = ("logs", folder, *asked.values(), is_whole, time.monotonic() // _LOGS_KEPT_S)
    try:
        return await readings.answer(key, lambda: read_logs(folder, **asked, is_whole=is_whole))
    except OSError:
        return JSONResponse({"error": "the logs cannot be read; `swarm logs` says why"}, status_code=503)


_MAX_PLACE = 1e12


def range_query(request: Request) -> dict[str, Any]:
    """{"x", "from", "to"} of a request for a part of the curves; empty for a range that cannot be."""
    asked = request.query_params
    try:
        kind, first, last = asked["x"], float(asked["from"]), float(asked["to"])
    except (KeyError, ValueError):
        return {}
    is_range = kind in ("round", "time") and 0 <= first < last <= _MAX_PLACE  # NaN fails
    return {"x": kind, "from": first, "to": last} if is_range else {}


def _no_range() -> Response:
    told = "x must be round or time, and 0 <= from < to <= 1e12, in rounds or seconds; such as ?x=round&from=0&to=99"
    return JSONResponse({"error": told}, status_code=400)


def log_query(request: Request) -> dict[str, str]:
    """{"level", "find"} of a request for logs; what cannot be is read as nothing."""
    asked = request.query_params
    return {"level": log_level(asked.get("level", "")), "find": asked.get("find", "")[:MAX_FIND_CHARS]}


def rollout_query(request: Request) -> dict[str, Any]:
    """{"kind", "find", "page"} of a request for rollouts; what cannot be is read as nothing."""
    asked = request.query_params
    kind, page = asked.get("kind", ""), asked.get("page", "")
    is_page = page.isascii() and page.isdigit() and len(page) < 6
    find = asked.get("find", "")[:MAX_FIND_CHARS]
    return {"kind": kind if kind in KINDS else "", "find": find, "page": int(page) if is_page else 0}


def _undo(evaluations: Evaluations, row: Mapping[str, Any]) -> None:
    if isinstance(number := row.get("round"), int):
        evaluations.undo(number)
