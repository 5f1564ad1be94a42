"""A peer-to-peer node for RL post-training of language models: roll out, share, learn, merge, survive.

trained = swarm.train("bundled", my_reward, rows, rounds=50)     # alone, or swarm="friends.swarm.toml"
node = swarm.Node.from_config("node.toml", training={"lr": 1e-5})
for done in node.run(rounds=50):
    print(done.number, done.reward)
swarm.testbed(nodes=4, reward=my_reward, dataset=rows).run()     # four nodes on this machine
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm.api.node import Evaluation, Node, Round
    from swarm.api.saved_policy import SavedPolicy
    from swarm.api.testbed import Testbed, testbed
    from swarm.api.train import Training, train
    from swarm.errors import SwarmError

__version__ = "0.1.0"
__all__ = ["Evaluation", "Node", "Round", "SavedPolicy", "SwarmError", "Testbed", "Training", "testbed", "train"]
_HOMES = {
    "Evaluation": "api.node", "Node": "api.node", "Round": "api.node", "SavedPolicy": "api.saved_policy",
    "SwarmError": "errors", "Testbed": "api.testbed", "testbed": "api.testbed", "Training": "api.train", "train": "api.train",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what Python programs use at its first use, as `import swarm` has to be quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'swarm' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"swarm.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The public names, also those that are not imported yet: for completion in a notebook."""
    return sorted([*globals(), *__all__])
