"""Tools that watch a node: they get what happens, hold up nothing, and end nothing."""

import base64
import gzip
import json
import shutil
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import yaml
from huggingface_hub import constants, get_session

from swarm.adapters.checkpoint import CheckpointStore
from swarm.adapters.export import BaseName
from swarm.config import Config, load
from swarm.errors import ConfigError, NetworkError
from swarm.integrations.hub import FIRST_PAUSE_S, LONGEST_PAUSE_S, HubPush, ModelRepository
from swarm.integrations.model_card import model_card, trained_facts
from swarm.integrations.open_sinks import open_sinks
from swarm.integrations.sink import QueuedSink, scalars
from swarm.machine.hub_requests import ANSWER_TIMEOUT_S, bound_hub_requests
from swarm.machine.node_folder import NodeFolder
from swarm.observability.metrics import read_rows
from swarm.observability.tracing import Facts, traced, watch
from tests.unit.experience_factory import ALICE, READER, Clock
from tests.unit.local_http import local_http

FORMATS = Path(__file__).parents[1] / "formats" / "0.1.0"
ROW = {
    "kind": "round", "round": 3, "rollout/reward_mean": 0.5, "train/loss": float("nan"), "train/skip_reason": "",
    "exchange/rejected": {"replay": 2}, "health/warnings": ["one"],
}  # fmt: skip
OWNER = "12D3KooWNYMUbCVu5oBRjVT2nfG7AryH7KhAdRMhfZ7F8NPgkF41"


class Rows:
    """A sink that keeps what it gets, once it may."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.rows: list[dict[str, Any]] = []
        self.is_closed = False

    def write(self, row: dict[str, Any]) -> None:
        assert self.may_write.wait(20)
        self.rows.append(row)

    def close(self) -> None:
        self.is_closed = True


def settings(**values: Any) -> Config:
    return load([], {f"integrations.{name}": json.dumps(value) for name, value in values.items()})


def test_sink_gets_all_rows_in_order_before_it_is_closed() -> None:
    rows = Rows()
    rows.may_write.set()
    sink = QueuedSink("rows", lambda: rows)
    for number in range(100):
        sink.write({"round": number})
    sink.close()
    assert [row["round"] for row in rows.rows] == list(range(100))
    assert rows.is_closed
    assert sink.num_lost == 0


def test_slow_sink_holds_up_nobody_and_loses_what_does_not_fit() -> None:
    rows = Rows()
    sink = QueuedSink("rows", lambda: rows)
    for number in range(1000):
        sink.write({"round": number})  # would block here for ever if it waited
    assert 1000 - 256 - 1 <= sink.num_lost <= 1000 - 256
    rows.may_write.set()
    sink.close()
    assert len(rows.rows) == 1000 - sink.num_lost


def test_failing_sink_is_told_once_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    opened = threading.Semaphore(0)

    def fail() -> Rows:
        opened.release()
        raise RuntimeError("no such project")

    sink = QueuedSink("watcher", fail)
    sink.write(ROW)
    assert opened.acquire(timeout=20)
    sink._thread.join(20)
    for _ in range(10):
        sink.write(ROW)
    sink.close()
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.getMessage() for record in told] == [
        "watcher failed and is left alone; the node goes on: RuntimeError: no such project"
    ]
    assert sink.num_lost >= 11
    assert not opened.acquire(blocking=False), "it is not opened again"


def test_scalars_are_the_finite_numbers_of_a_row() -> None:
    assert dict(scalars(ROW)) == {"rollout/reward_mean": 0.5, "exchange/rejected/replay": 2.0}
    evaluation = {"kind": "evaluation", "round": 0, "accuracy_mean": 0.25, "accuracy": {"gcd": 0.5}}
    assert dict(scalars(evaluation)) == {"evaluation/accuracy_mean": 0.25, "evaluation/accuracy/gcd": 0.5}


# ── settings ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_on_by_default(tmp_path: Path) -> None:
    assert open_sinks(Config(), NodeFolder(tmp_path), ALICE) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"wandb": "online"}, 'integrations.wandb = "online"'),
        ({"otel_endpoint": "http://collector.example:4318"}, "integrations.otel_endpoint"),
        ({"hub_repo": "me/adapter"}, "integrations.hub_repo"),
        ({"hub_repo": "me/adapter", "hub_endpoint": "http://127.0.0.1:1"}, "integrations.hub_repo"),
    ],
)
def test_silo_refuses_what_leaves_the_machine(values: dict[str, Any], told: str) -> None:
    settings(**values)
    overrides = {f"integrations.{name}": json.dumps(value) for name, value in values.items()}
    with pytest.raises(ConfigError, match="a silo's node tells nobody outside") as caught:
        load([], {"swarm.silo_owner": OWNER, **overrides})
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"tensorboard": True},
        {"wandb": "offline"},
        {"otel_endpoint": "http://127.0.0.1:4318"},
        {"otel_endpoint": "http://[::1]:4318"},
        {"otel_endpoint": "http://localhost:4318"},
    ],
)
def test_silo_takes_what_stays(values: dict[str, Any]) -> None:
    overrides = {f"integrations.{name}": json.dumps(value) for name, value in values.items()}
    assert load([], {"swarm.silo_owner": OWNER, **overrides}).integrations.outside is None


@pytest.mark.parametrize(
    ("values", "packages"),
    [
        ({"tensorboard": True}, "'tensorboardx>=2.6'"),
        ({"wandb": "offline"}, "'wandb>=0.20'"),
        (
            {"otel_endpoint": "http://[::1]:1"},
            "'opentelemetry-exporter-otlp-proto-http>=1.30' 'opentelemetry-sdk>=1.30'",
        ),
    ],
)
def test_missing_extra_is_told_at_the_start(
    values: dict[str, Any], packages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.integrations.open_sinks.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"-m pip install {packages}, or leave"):
        open_sinks(settings(**values), NodeFolder(tmp_path), ALICE)


# ── TensorBoard, Weights & Biases ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.extra("tensorboardX")
def test_tensorboard_files_hold_every_number(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    (sink,) = open_sinks(settings(tensorboard=True), NodeFolder(tmp_path), ALICE)
    sink.write(ROW)
    sink.write({"kind": "evaluation", "round": 4, "accuracy_mean": 0.75, "accuracy": {"gcd": 0.75}})
    sink.close()
    (path,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    written = {}
    for record in _records(path.read_bytes()):
        event = Event.FromString(record)
        written |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    assert written == {
        ("rollout/reward_mean", 3): 0.5, ("exchange/rejected/replay", 3): 2.0,
        ("evaluation/accuracy_mean", 4): 0.75, ("evaluation/accuracy/gcd", 4): 0.75,
    }  # fmt: skip


def _records(data: bytes) -> Iterator[bytes]:
    """Of a TFRecord file: length (8 bytes), its checksum (4), content, its checksum (4)."""
    while data:
        length = int.from_bytes(data[:8], "little")
        yield data[12 : 12 + length]
        data = data[16 + length :]


@pytest.mark.extra("wandb")
def test_offline_run_of_weights_and_biases_is_on_disk(tmp_path: Path) -> None:
    (sink,) = open_sinks(settings(wandb="offline"), NodeFolder(tmp_path), ALICE)
    sink.write(ROW)
    sink.close()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (path,) = run.glob("run-*.wandb")
    content = path.read_bytes()
    assert b"rollout/reward_mean" in content
    assert ALICE.peer_name.encode() in content
    assert str(tmp_path).encode() not in b"".join(file.read_bytes() for file in run.rglob("config.yaml"))


@pytest.mark.extra("wandb")
@pytest.mark.parametrize("folder", ["wandb", ".wandb"])
def test_who_filled_the_current_folder_does_not_decide_where_the_key_of_the_user_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """Neither before the start of a node nor between that and its first row, with which a run begins."""
    import wandb

    here, node = tmp_path / "here", NodeFolder(tmp_path / "node")
    for path in (here / folder, node.path / folder):
        path.mkdir(parents=True)
        (path / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    monkeypatch.chdir(here)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    begun: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "init", lambda **told: begun.append({**told, "to": wandb.setup().settings.base_url}))
    (sink,) = open_sinks(settings(wandb="online"), node, ALICE)
    sink.write(ROW)
    sink.close()
    wandb.teardown()
    assert [one["to"].startswith("https://") for one in begun] == [True]
    assert Path.cwd() == here


# ── OpenTelemetry ───────────────────────────────────────────────────────────────────────────────────────────────────


class Spans:
    """A tracer that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[Any]:
        facts: dict[str, Any] = {}

        def tell(more: Facts) -> None:
            facts.update(more)

        try:
            yield tell
        finally:
            self.told.append((name, facts))


@pytest.fixture
def spans() -> Iterator[Spans]:
    watcher = Spans()
    watch(watcher)
    yield watcher
    watch(None)


@traced("add", lambda result, one, other: {"sum": result})
def add(one: int, other: int) -> int:
    """Add."""
    return one + other


@traced("add later", lambda result, one: {"sum": result})
async def add_later(one: int) -> int:
    return add(one, 1)


async def test_traced_functions_tell_name_and_facts_and_give_their_results(spans: Spans) -> None:
    assert add(1, 2) == 3
    assert await add_later(1) == 2
    assert spans.told == [("add", {"sum": 3}), ("add", {"sum": 2}), ("add later", {"sum": 2})]
    with pytest.raises(TypeError):
        add(1, None)  # type: ignore[arg-type]
    assert spans.told[-1] == ("add", {})


async def test_unwatched_functions_are_called_as_they_are() -> None:
    assert (add(1, 2), await add_later(1)) == (3, 2)
    assert (add.__name__, add.__doc__) == ("add", "Add.")


@pytest.mark.extra("opentelemetry")
def test_collector_gets_spans_of_a_node_with_their_facts(tmp_path: Path) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    from swarm.node.process import run_node

    with local_http(lambda *_: (200, b""), "application/x-protobuf") as collector:
        overrides = {
            "node.dir": json.dumps(str(tmp_path / "n")), "node.max_rounds": "2", "node.threads": "1", "network.backend": '"off"',
            "sharing.swarm_groups": "0", "evaluation.tasks_per_source": "0", "rollouts.groups_per_round": "8",
            "integrations.otel_endpoint": json.dumps(collector.address), "observability.http": "false",
        }  # fmt: skip
        run_node(load([], overrides))
        assert {path for _, path, _ in collector.requests} == {"/v1/traces"}
        spans = {}
        for _, _, body in collector.requests:
            request = ExportTraceServiceRequest.FromString(_unpacked(body))
            for resource in request.resource_spans:
                named = {fact.key: fact.value.string_value for fact in resource.resource.attributes}
                assert (named["service.name"], named["swarm.name"]) == ("swarm", "local")
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    spans.setdefault(span.name, []).append(span)
    assert {"round", "rollout", "train_step", "checkpoint"} <= set(spans)
    assert len(spans["round"]) == len(spans["rollout"]) == 2
    first = min(spans["round"], key=lambda span: span.start_time_unix_nano)
    facts = {fact.key: fact.value for fact in first.attributes}
    assert facts["round"].int_value == 1
    assert 0 <= facts["rollout/reward_mean"].double_value <= 1
    inner = min(spans["rollout"], key=lambda span: span.start_time_unix_nano)
    assert inner.parent_span_id == first.span_id
    assert (
        first.start_time_unix_nano <= inner.start_time_unix_nano < inner.end_time_unix_nano <= first.end_time_unix_nano
    )


def _unpacked(body: bytes) -> bytes:
    try:
        return gzip.decompress(body)
    except (OSError, zlib.error):
        return body


@pytest.mark.extra("opentelemetry")
def test_collector_that_is_gone_is_told_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with local_http(lambda *_: (400, b""), "text/plain") as collector:
        (tracer,) = open_sinks(settings(otel_endpoint=collector.address), NodeFolder(tmp_path), ALICE)
        add(1, 2)
        tracer._provider.force_flush()  # type: ignore[attr-defined]
        add(1, 2)
        tracer.close()
    told = [record.getMessage() for record in caplog.records]
    assert sum("spans are lost" in message for message in told) == 1
    assert len(told) == 1


# ── the hub ─────────────────────────────────────────────────────────────────────────────────────────────────────────


WEIGHTS = "adapter_model.safetensors"
STORE = "/store"


class Hub:
    """The part of a hub's HTTP interface that a push takes."""

    def __init__(self, *, has_store: bool = False) -> None:
        """`has_store`: weights are put to a place of their own first, as on a real hub, and not into the commit."""
        self._has_store = has_store
        self.stored: list[bytes] = []
        self.status = 200
        self.created: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.address = ""
        """Of the server that answers so."""

    def _mode(self, file: dict[str, Any]) -> str:
        return "lfs" if self._has_store and file["path"] == WEIGHTS else "regular"

    def __call__(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if self.status != 200:
            return self.status, b'{"error": "the hub is closed"}'
        if path == "/api/repos/create":
            self.created = json.loads(body)
            return 200, json.dumps(
                {"url": "https://huggingface.co/me/adapter", "name": "me/adapter", "id": "x"}
            ).encode()
        if path.startswith("/api/models/me/adapter/preupload/"):
            asked = json.loads(body)["files"]
            files = [{"path": file["path"], "uploadMode": self._mode(file), "shouldIgnore": False} for file in asked]
            return 200, json.dumps({"files": files}).encode()
        if path == "/me/adapter.git/info/lfs/objects/batch":
            (item,) = json.loads(body)["objects"]
            upload = {"upload": {"href": f"{self.address}{STORE}"}}
            return 200, json.dumps({"transfer": "basic", "objects": [{**item, "actions": upload}]}).encode()
        if path == STORE:
            self.stored.append(body)
            return 200, b"{}"
        if path.startswith("/api/models/me/adapter/commit/"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "header":
                    self.messages.append(line["value"]["summary"])
            done = {
                "success": True,
                "commitOid": "0" * 40,
                "commitUrl": "https://huggingface.co/me/adapter/commit/0",
                "hookOutput": "",
            }
            return 200, json.dumps(done).encode()
        if path == "/api/validate-yaml":
            return 200, b'{"errors": [], "warnings": []}'
        return 200, json.dumps({"id": "me/adapter", "modelId": "me/adapter", "siblings": [], "sha": "0" * 40}).encode()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeFolder:
    """Of a node that has two rounds behind it."""
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    shutil.copytree(FORMATS, tmp_path / "node")
    return NodeFolder(tmp_path / "node")


def pushing(folder: NodeFolder, address: str, **more: str) -> Config:
    overrides = {"integrations.hub_repo": '"me/adapter"', "integrations.hub_endpoint": json.dumps(address), **more}
    return load([folder.config], {"integrations.hub_interval_rounds": "2", **overrides})


@pytest.mark.parametrize(("num_cuts", "is_pushed"), [(1, True), (100, False)])
def test_a_transfer_that_is_cut_is_tried_again_and_commits_nothing_before_all_has_arrived(
    folder: NodeFolder, monkeypatch: pytest.MonkeyPatch, num_cuts: int, is_pushed: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between the client's tries
    exported = folder.path / "out"
    exported.mkdir()
    (exported / WEIGHTS).write_bytes(bytes(range(256)) * 4000)
    hub = Hub(has_store=True)
    with local_http(hub, cuts={STORE: num_cuts}) as server:
        hub.address = server.address
        repository = ModelRepository("me/adapter", endpoint=server.address)
        with (
            nullcontext()
            if is_pushed
            else pytest.raises(NetworkError, match="the hub must be reachable, got me/adapter")
        ):
            repository.push(exported, "Round 2")
    assert hub.messages == (["Round 2"] if is_pushed else [])
    assert hub.stored == ([(exported / WEIGHTS).read_bytes()] if is_pushed else [])


def test_a_hub_that_takes_a_connection_and_never_answers_is_not_waited_for(
    folder: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between the client's tries
    with socket.create_server(("127.0.0.1", 0)) as silent:
        repository = ModelRepository("me/adapter", endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        bound_hub_requests(0.05)
        try:
            with pytest.raises(NetworkError, match=r"the hub must be reachable, got me/adapter: .*Timeout"):
                repository.check(lambda _: False)
        finally:
            bound_hub_requests()
    assert get_session().timeout.read == ANSWER_TIMEOUT_S


def test_push_holds_adapter_and_card_and_is_private(folder: NodeFolder) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    hub = Hub()
    with local_http(hub) as server:
        (sink,) = open_sinks(pushing(folder, server.address), folder, READER)
        sink.write(ROW | {"round": 1})
        sink.write(ROW | {"round": 2})
        sink.close()
    assert hub.created.get("visibility") == "private" or hub.created.get("private") is True
    assert hub.messages == ["Round 2"]
    assert set(hub.files) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    out = folder.path / "pulled"
    out.mkdir()
    for name, content in hub.files.items():
        (out / name).write_bytes(content)
    base = Path(__file__).parents[2] / "swarm" / "assets" / "tiny_policy"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    saved = CheckpointStore(folder.checkpoints, 1).load_newest()
    assert saved is not None
    loaded = {
        name.replace(".default.weight", ""): value
        for name, value in model.base_model.model.named_parameters()
        if "lora_" in name
    }
    assert set(loaded) == set(saved.tensors["adapter"]) == {
        name.removeprefix("base_model.model.").removesuffix(".weight")
        for name in safetensors.torch.load(hub.files["adapter_model.safetensors"])
    }  # fmt: skip
    assert all((loaded[name] == value).all() for name, value in saved.tensors["adapter"].items())


def test_card_tells_facts_and_the_licence(folder: NodeFolder) -> None:
    config = pushing(folder, "http://127.0.0.1:1", **{"policy.base": '"acme/base: \\"7b\\""'})
    saved = CheckpointStore(folder.checkpoints, 1).load_newest()
    assert saved is not None
    with folder.metrics.open("a") as file:
        last_evaluation = [row for row in read_rows(folder.metrics) if row["kind"] == "evaluation"][-1]
        file.write(json.dumps(last_evaluation | {"num_tasks": 24}) + "\n")
        file.write(
            json.dumps({"kind": "round", "round": 2, "train/own_groups_total": 30, "train/swarm_groups_total": 10})
            + "\n"
        )
    facts = trained_facts(
        config, folder, form="adapter", base=BaseName('acme/base: "7b"', "main"), lineage=saved.state["lineage"]["policy"],
        round=2, policy_version=2, licence="apache-2.0",
    )  # fmt: skip
    card = model_card(facts)
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["base_model"] == 'acme/base: "7b"'
    assert front["license"] == "apache-2.0"
    assert front["library_name"] == "peft"
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    first, *_, last = [row for row in rows if row["kind"] == "evaluation"]
    for told in (
        saved.state["lineage"]["policy"], config.swarm_id, "2, 2 optimizer steps", "spelling", "revision main",
        f"| 0 | at most 1 a source | {first['accuracy_mean']:.3f} |", f"| 2 | 24 | {last['accuracy_mean']:.3f} |", "rank = 1",
        "The licence of acme/base", "(apache-2.0)", "25%: 10 of 40 groups",
    ):  # fmt: skip
        assert told in card, told
    for secret in (str(folder.path), str(Path.home()), READER.peer_id):
        assert secret not in card


@pytest.mark.parametrize(
    ("totals", "told"),
    [
        ({"train/swarm_groups_total": 0}, "Trained by one node with swarm-rl"),
        ({"train/swarm_groups_total": 0}, ": reinforcement learning on its own answers."),
        ({"train/swarm_groups_total": 2}, "on its own answers and on those of peers, whose rewards it computed again."),
        (
            {"train/swarm_groups_total": 0, "merge/merges_total": 3},
            "on its own answers, merged with adapters of peers.",
        ),
    ],
)
def test_card_claims_no_peers_where_there_were_none(folder: NodeFolder, totals: dict[str, int], told: str) -> None:
    row = {"kind": "round", "round": 2, "train/own_groups_total": 7, **totals}
    folder.metrics.write_text(json.dumps(row) + "\n")
    config = pushing(folder, "http://127.0.0.1:1")
    facts = trained_facts(
        config, folder, form="adapter", base=BaseName("acme/base"), lineage="00", round=2, policy_version=2
    )
    assert told in model_card(facts)


def test_card_of_an_adapter_names_the_folder_of_its_base(folder: NodeFolder, tmp_path: Path) -> None:
    base = tmp_path / "tinyqwen"
    base.mkdir()
    config = pushing(folder, "http://127.0.0.1:1", **{"policy.base": json.dumps(str(base))})
    cards = [
        model_card(
            trained_facts(config, folder, form="adapter", base=BaseName(name), lineage="00", round=2, policy_version=2)
        )
        for name in ("tinyqwen", "acme/base")  # the second: a folder of the hub's cache
    ]
    assert 'base = AutoModelForCausalLM.from_pretrained("PATH/tinyqwen")' in cards[0]
    assert "PeftModel.from_pretrained(base," in cards[0] and "AutoPeft" not in cards[0]
    assert str(tmp_path) not in cards[0]
    assert 'AutoPeftModelForCausalLM.from_pretrained("this/repository")' in cards[1]


def test_hub_that_refuses_is_asked_again_later_and_later(folder: NodeFolder, caplog: pytest.LogCaptureFixture) -> None:
    hub, clock = Hub(), Clock()
    hub.status = 403
    with local_http(hub) as server:
        push = HubPush(pushing(folder, server.address), folder, clock)
        push.write(ROW | {"round": 2})
        push.write(ROW | {"round": 3})
        assert push.num_failures == 1, "not asked again at once"
        for number in range(8):
            clock.now += min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S)
            push.write(ROW | {"round": 4 + number})
            assert push.num_failures == number + 2
        hub.status = 200
        clock.now += LONGEST_PAUSE_S
        push.write(ROW | {"round": 20})
        assert hub.messages == ["Round 2"]
        push.write(ROW | {"kind": "end", "round": 20})
    assert hub.messages == ["Round 2"], "the same checkpoint is not pushed twice"
    first = next(record for record in caplog.records if record.name == "swarm.integrations.hub")
    assert "in 60 s at the earliest" in first.getMessage()


def test_hub_that_is_gone_costs_a_push_and_nothing_else(folder: NodeFolder) -> None:
    with local_http(Hub()) as server:
        address = server.address
    push = HubPush(pushing(folder, address), folder, Clock())
    push.write(ROW | {"kind": "end"})
    assert push.num_failures == 1
