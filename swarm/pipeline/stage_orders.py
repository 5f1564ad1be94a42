"""A stage behind bytes: what a machine does with an order that came over the network."""

from collections.abc import Callable

from swarm.pipeline import order_bytes
from swarm.pipeline.activation_wire import WirePrecision
from swarm.pipeline.order_bytes import Fields
from swarm.pipeline.stage import Stage
from swarm.pipeline.tensor_bundle import Bundle

STATES_KINDS = ("forward", "backward", "decode")
"""Orders that carry hidden states."""
WEIGHTS_KINDS = ("commit", "restore", "recover")
"""Orders that carry weights, moments or gradients of them."""
PLAIN_KINDS = ("describe", "settle", "drop", "select", "end", "state")


def stage_reply(stage: Stage, kind: str, fields: Fields, precision: WirePrecision) -> tuple[Bundle, bool]:
    """(reply, whether its `states` are hidden states or gradients of them, to be sent in `precision`).

    `kind` is one of those above. Raises PipelineError.
    """
    if kind == "forward":
        order = order_bytes.forward_order(fields)
        return order_bytes.forward_reply(stage.forward(order)), order.answers is None
    if kind == "decode":
        decoding = order_bytes.decode_order(fields)
        return Bundle({}, {"states": stage.decode(decoding)}), not decoding.is_last
    if kind == "backward":
        reply = order_bytes.backward_reply(stage.backward(order_bytes.backward_order(fields)))
        return reply, bool(reply.tensors)
    return _PLAIN[kind](stage, fields), False


def _recover(stage: Stage, fields: Fields) -> Bundle:
    tensors, rest = order_bytes.state_of(fields)
    stage.recover(tensors["adapter"], int(rest["policy_version"]), tensors["optimizer"])
    return Bundle()


def _done(_: None) -> Bundle:
    return Bundle()


_PLAIN: dict[str, Callable[[Stage, Fields], Bundle]] = {
    "describe": lambda stage, _: order_bytes.facts_bundle(stage.describe()),
    "settle": lambda stage, fields: order_bytes.settled_reply(stage.settle(order_bytes.settle_order(fields))),
    "commit": lambda stage, fields: Bundle({"version": stage.commit(order_bytes.commit_order(fields))}),
    "drop": lambda stage, fields: _done(stage.drop(fields.integer("batch"))),
    "select": lambda stage, fields: _done(stage.select(fields.integer("session"), fields.integers("rows"))),
    "end": lambda stage, fields: _done(stage.end(fields.integer("session"))),
    "state": lambda stage, _: order_bytes.state_bundle(stage.state()),
    "restore": lambda stage, fields: _done(stage.restore(*order_bytes.state_of(fields))),
    "recover": _recover,
}
