"""What commands import and read, for the server that all of them are forks of. bitsandbytes stays out, as with them."""

import sys
from importlib import import_module

from swarm.cli.arguments import prepare_imports
from swarm.config import Config, TasksSection
from swarm.tasks.reasoning_gym_source import import_library
from swarm.tasks.task_mixture import TaskMixture

prepare_imports(Config())
import_library()
for module in (
    "peft",
    "transformers.models.auto.modeling_auto",
    "swarm.cli.main",
    "swarm.network.hivemind.transport",
    "swarm.network.libp2p.transport",
    "swarm.node.process",
    "swarm.node.stage_process",
):
    import_module(module)
TaskMixture(TasksSection())  # the word lists of its sources stay in memory
sys.modules.pop("bitsandbytes", None)  # each command decides it anew
