"""A peer-to-peer node for RL post-training of language models: roll out, share, learn, merge, survive.

node = swarm.Node.from_config("node.toml", training={"lr": 1e-5})
for done in node.run(rounds=50):
    print(done.number, done.reward)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm.api.node import Node, Round

__version__ = "0.1.0"
__all__ = ["Node", "Round"]


def __getattr__(name: str) -> Any:
    """Import what Python programs use at its first use, as `import swarm` has to be quick."""
    if name not in __all__:
        raise AttributeError(f"module 'swarm' has no attribute {name!r}")
    from swarm.api import node

    return getattr(node, name)
