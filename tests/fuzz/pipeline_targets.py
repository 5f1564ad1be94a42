"""The messages between the machines of a pipeline, as functions of bytes; the first byte selects the kind of command."""

import asyncio
import functools
import itertools
from collections.abc import Sequence

import torch

from swarm.config import PolicySection
from swarm.errors import PipelineError, RequestError
from swarm.pipeline.commands import (
    BackwardCommand,
    CloseBatchCommand,
    CommitCommand,
    DecodeCommand,
    ForwardCommand,
    StageSettings,
    backward_bundle,
    close_batch_bundle,
    commit_bundle,
    decode_command_bundle,
    forward_bundle,
    part_fields,
    recover_bundle,
    state_bundle,
)
from swarm.pipeline.driver.expected_stage import ExpectedStage, expected_stages
from swarm.pipeline.model_shape import StagePart
from swarm.pipeline.stage.stage_host import PLAIN_KINDS, STATES_KINDS, WEIGHTS_KINDS, StageHost, base_model
from swarm.pipeline.stage_link import RemoteLink
from swarm.pipeline.tensor_bundle import Bundle, decode_bundle, encode_bundle

KINDS = (*PLAIN_KINDS, *STATES_KINDS, *WEIGHTS_KINDS, "machine", "load", "unload", "copy", "keep", "kept", "route")
ASKED = ("describe", "settle", "commit", "state", "forward", "backward", "decode", "drop")
PART = StagePart(1, 2, False, False)


def stage_bundle(data: bytes) -> bool:
    """Fields and tensors in either direction."""
    try:
        bundle = decode_bundle(data)
    except PipelineError:
        return False
    assert sum(tensor.numel() for tensor in bundle.tensors.values()) <= len(data)
    return True


def stage_order(data: bytes) -> bool:
    """A command that a driver sends to a stage."""
    kind = KINDS[data[0] % len(KINDS)] if data else "describe"
    if len(data) - 1 > _host().max_payload_bytes(kind):
        return False
    outcome = _host().carry_out(kind, data[1:])
    reply = decode_bundle(outcome if isinstance(outcome, bytes) else outcome[1])
    parts = [(part.start, part.stop) for part in _host().status().parts]
    if parts != [(PART.start, PART.stop)]:  # loaded otherwise, or unloaded, as is a driver's right
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(parts))
        _load(_host())
    return not {"refused", "gone"} & set(reply.fields)


def stage_answer(data: bytes) -> bool:
    """What a driver is answered by a stage."""
    kind = ASKED[data[0] % len(ASKED)] if data else "describe"
    try:
        return _runner().run(_asked(kind, data[1:]))
    except (PipelineError, RequestError) as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        return False


async def _asked(kind: str, reply: bytes) -> bool:
    async def give(
        peer_id: str, kind: str, payload: bytes, *, max_reply_bytes: int, relayed_to: Sequence[str] = ()
    ) -> bytes:
        if len(reply) > max_reply_bytes:
            raise RequestError("oversize", "oversize")
        return reply

    link = RemoteLink(give, "peer", _expected(), "fp32")
    states = torch.zeros(1, 2, _expected().hidden)
    forward = ForwardCommand(1, 0, states)
    if kind == "describe":
        _expected().check_facts(await link.describe())
    elif kind == "settle":
        assert not (await link.close_batch(CloseBatchCommand(1, 1, ()))).own_norm_squared < 0
    elif kind == "commit":
        assert await link.commit(CommitCommand(1, 0.0, 1.0, {})) >= 0
    elif kind == "state":
        tensors, _ = await link.state()
        assert all(bool(torch.isfinite(tensor).all()) for group in tensors.values() for tensor in group.values())
    elif kind == "drop":
        await link.drop(1)
    elif kind == "decode":
        result = await link.decode(DecodeCommand(1, states))
        assert result.shape == states.shape and bool(torch.isfinite(result).all())
    elif kind == "forward":
        result = await link.forward(forward)
        assert isinstance(result, torch.Tensor) and result.shape == states.shape
    else:
        link._sizes[0] = (1, 2)
        gradient = await link.backward(BackwardCommand(1, 0, states))
        assert gradient is None or (gradient.shape == states.shape and bool(torch.isfinite(gradient).all()))
    return True


def pipeline_seeds() -> dict[str, list[bytes]]:
    """{target: valid inputs}"""
    host, width = StageHost(base_model(PolicySection(), "cpu"), StageSettings()), _expected().hidden
    _load(host)
    states, place = torch.full((1, 2, width), 0.5), {"slot": 1, "precision": "bf16"}
    weights = host._stages[1].state()
    commands = [
        ("describe", Bundle()),
        ("forward", forward_bundle(ForwardCommand(1, 0, states))),
        ("backward", backward_bundle(BackwardCommand(1, 0, states))),
        ("settle", close_batch_bundle(CloseBatchCommand(1, 1, ()))),
        ("commit", commit_bundle(CommitCommand(1, 1e-3, 1.0, {}))),
        ("state", Bundle()),
        ("decode", decode_command_bundle(DecodeCommand(1, states, (0,)))),
        ("decode", decode_command_bundle(DecodeCommand(1, states.repeat(2, 1, 1), rows=(0, 0)))),
        ("route", Bundle({"slot": 1, "before": "a", "after": "b", "after_slot": 2})),
        ("end", Bundle({"session": 1})),
        ("drop", Bundle({"batch": 1})),
        ("restore", state_bundle(weights)),
        ("recover", recover_bundle(weights[0]["adapter"], 1, {})),
        ("machine", Bundle({"measure": False})),
        ("keep", Bundle({"of": 0, "version": 1}, {"adapter/x": torch.zeros(2, 2)})),
        ("kept", Bundle({"of": 0})),
        ("copy", Bundle()),
        ("load", Bundle({**part_fields(PART), "instead_of": []})),
    ]
    sent, answered, bundles = [], [], []
    for kind, bundle in commands:
        payload = encode_bundle(Bundle(bundle.fields | place, bundle.tensors))
        sent.append(bytes([KINDS.index(kind)]) + payload)
        bundles.append(payload)
        reply = host.carry_out(kind, payload)
        if kind in ASKED:
            answered.append(bytes([ASKED.index(kind)]) + reply)
    return {"stage_order": sent, "stage_answer": answered, "stage_bundle": bundles}


@functools.cache
def _expected() -> ExpectedStage:
    base = base_model(PolicySection(), "cpu")
    return expected_stages(base.folder, base.lora, [PART])[0]


@functools.cache
def _host() -> StageHost:
    torch.set_num_threads(1)
    settings = StageSettings(max_states=64, max_micro_batches=8, max_in_flight=2, max_sessions=2)
    host = StageHost(base_model(PolicySection(), "cpu"), settings)
    host._speed = 1.0
    _load(host)
    return host


def _load(host: StageHost) -> None:
    held = [part.start for part in host.status().parts]
    host.carry_out("load", encode_bundle(Bundle({**part_fields(PART), "instead_of": held})))


@functools.cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()
