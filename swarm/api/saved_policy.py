"""The policy of a node, with the adapter of its newest or its best checkpoint."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from swarm.adapters.checkpoint import Checkpoint, CheckpointStore
    from swarm.config import Config
    from swarm.policy.policy import Policy


def load(config: "Config", *, base_only: bool = False, best: bool = False) -> tuple["Policy", int | None]:
    """(policy, round of its checkpoint), or the untrained base and None.

    The newest checkpoint counts, or with `best` the one that did best on held-out tasks.

    Raises CheckpointError where node.dir holds no checkpoint, or one of another lineage, or one that no learner has written.
    """
    from swarm.machine.node_folder import NodeFolder
    from swarm.policy.base_folder import fitted_to_base
    from swarm.policy.policy import load_policy
    from swarm.warm_start.start_digest import start_digest

    if config.swarm.silo_owner:
        os.environ["HF_HUB_OFFLINE"] = "1"  # a silo's node asks nobody but its peers
    folder = NodeFolder(config.node.dir)
    folder.check()
    cache = folder.hash_cache if folder.path.is_dir() else None
    start = start_digest(config)
    if base_only:
        return load_policy(
            fitted_to_base(config).policy, device=config.node.device, hash_cache=cache, start=start
        ), None
    checkpoint = _store(config).load_best() if best else _newest(config)
    policy = load_policy(fitted_to_base(config).policy, device=config.node.device, hash_cache=cache, start=start)
    return policy, _take(policy, config, checkpoint)


def newest_round(config: "Config") -> int | None:
    """Round of the newest checkpoint in node.dir, without reading it; None where there is none."""
    return _store(config).newest_round()


def load_newest_into(policy: "Policy", config: "Config") -> int:
    """Give a policy the adapter of the newest checkpoint, and return its round. Raises CheckpointError as `load`."""
    return _take(policy, config, _newest(config))


def _store(config: "Config") -> "CheckpointStore":
    from swarm.adapters.checkpoint import CheckpointStore
    from swarm.machine.node_folder import NodeFolder

    return CheckpointStore(NodeFolder(config.node.dir).checkpoints, config.checkpoint.keep)


def _newest(config: "Config") -> "Checkpoint":
    checkpoint = _store(config).load_newest()
    if checkpoint is None:
        raise CheckpointError(
            f"node.dir must hold a checkpoint, got none in {config.node.dir}; run the node first, or set node.dir "
            "(`swarm eval`, `swarm sample` and `swarm chat` do without one with --base)"
        )
    return checkpoint


def _take(policy: "Policy", config: "Config", checkpoint: "Checkpoint") -> int:
    from swarm.adapters.adapter_state import write_adapter
    from swarm.machine.node_folder import NodeFolder
    from swarm.node.run_state import check_run_state

    check_run_state(checkpoint, policy.vocab_size)
    if not policy.lineage.has_name(checkpoint.state["lineage"]["policy"]):
        raise CheckpointError(
            f"policy settings must be those of the run, got another lineage than {checkpoint.path}; "
            f"pass {NodeFolder(config.node.dir).config} as the config"
        )
    write_adapter(policy.model, checkpoint.tensors["adapter"])
    policy.version = checkpoint.state["policy_version"]
    return checkpoint.round


class SavedPolicy:
    """A trained policy in this process: it answers prompts and can be saved."""

    def __init__(self, config: "Config", *, best: bool = False) -> None:
        """Loads base and adapter. Raises as `load` does."""
        from swarm.engine.make_engine import make_engine
        from swarm.policy.base_folder import fitted_to_base

        self._policy, self.round = load(config, best=best)
        self._config = fitted_to_base(config)
        self._engine = make_engine(self._policy, self._config.rollouts)

    def sample(
        self, prompt: str, n: int = 1, *, temperature: float = 1.0, max_new_tokens: int | None = None, seed: int = 0
    ) -> list[str]:
        """`n` answers to a prompt, which is put as prompts of the node's tasks are, if these are all put alike.

        `temperature`: 0 takes the likeliest token each time. `max_new_tokens`: `rollouts.max_new_tokens` unless given. The same
        `seed` gives the same answers. Raises ConfigError for numbers that make no sense.
        """
        from swarm.engine.engine import AnswerRequest
        from swarm.engine.sampling import Sampling
        from swarm.tasks.prompted_source import shared_context

        most = self._config.rollouts.max_new_tokens if max_new_tokens is None else max_new_tokens
        for name, value, least in (("n", n, 1), ("max_new_tokens", most, 1), ("temperature", temperature, 0)):
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}; raise it")
        request = AnswerRequest(self._policy.encode_prompt(prompt, shared_context(self._config.tasks.sources)), n, most)
        (answers,) = self._engine.generate(
            [request], Sampling(temperature=temperature), seed=seed, stop=self._config.rollouts.stop
        )
        return [self._policy.decode(answer.token_ids) for answer in answers]

    def save(self, folder: str | Path, *, merged: bool = False) -> Path:
        """Write the adapter in peft format, or with `merged` base and adapter as one model, to a new or empty folder.

        Returns the folder. Raises PolicyError where it is not empty or cannot be written.
        """
        from swarm.adapters.export import export_adapter, export_merged, published_base
        from swarm.machine.node_folder import NodeFolder
        from swarm.policy.lineage import hash_weights

        policy, settings, out = self._policy, self._config.policy, Path(folder)
        if merged:
            export_merged(policy.model, policy.tokenizer, policy.base_folder, out)
        else:
            base_hash = hash_weights(policy.base_folder, NodeFolder(self._config.node.dir).hash_cache)
            base = published_base(settings.base, settings.revision, policy.base_folder)
            export_adapter(policy.model, policy.tokenizer, out, base_hash, base=base)
        return out
