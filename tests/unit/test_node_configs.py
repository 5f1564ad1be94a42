"""The ready configurations fit the machines that they are for, by arithmetic over the shapes of their bases."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from swarm.config import Config, load
from swarm.machine.hardware import Hardware, choose_policy
from swarm.policy.answer_head import CHUNK_BYTES, CHUNK_COPIES

ROOT = Path(__file__).parents[2] / "node_configs"


@dataclass(frozen=True)
class Shape:
    """What config.json of a Qwen2.5 says."""

    layers: int
    hidden: int
    intermediate: int
    kv_width: int
    vocab: int
    is_tied: bool

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the linear layers of one block."""
        attention = [(self.hidden, self.hidden)] * 2 + [(self.hidden, self.kv_width)] * 2
        return attention + [(self.hidden, self.intermediate)] * 2 + [(self.intermediate, self.hidden)]


SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": Shape(24, 896, 4864, 128, 151_936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": Shape(28, 1536, 8960, 256, 151_936, True),
    "Qwen/Qwen2.5-7B-Instruct": Shape(28, 3584, 18_944, 512, 152_064, False),
}
WEIGHT_BYTES = {"4bit": 0.5 + 4 / 64, "8bit": 1.0}
"""NF4 with a float32 scale for every 64 weights, as base_model.py asks bitsandbytes for."""


def needed_bytes(config: Config, value_bytes: int) -> dict[str, float]:
    """What a node with that base keeps at once; `value_bytes` of one weight, activation or cached key that is not quantized."""
    shape, policy, rollouts = SHAPES[config.policy.base], config.policy, config.rollouts
    tokens = policy.max_prompt_tokens + rollouts.max_new_tokens
    linear_weights = shape.layers * sum(inputs * outputs for inputs, outputs in shape.linears)
    adapter_weights = shape.layers * policy.lora.rank * sum(inputs + outputs for inputs, outputs in shape.linears)
    kept_width = (
        shape.layers * shape.hidden
    )  # with gradient checkpointing: one hidden state a layer, and all of one layer
    kept_width += sum(outputs for _, outputs in shape.linears) * 2
    return {
        "base": linear_weights * WEIGHT_BYTES.get(policy.quantization, value_bytes),
        "embedding and head": (1 if shape.is_tied else 2) * shape.vocab * shape.hidden * value_bytes,
        "adapter": adapter_weights * 16,  # float32, gradient, two moments
        "cache": rollouts.max_batch_sequences * tokens * 2 * shape.layers * shape.kv_width * value_bytes,
        "activations": tokens
        * kept_width
        * value_bytes,  # of the longest sequence; the memory probe takes more where they fit
        "logits": CHUNK_COPIES * CHUNK_BYTES,
    }


@pytest.mark.parametrize(
    ("name", "device_gib", "value_bytes"), [("gpu-8gb", 8, 2), ("gpu-24gb", 24, 2), ("mac-mps", 16 * 0.7, 4)]
)
def test_policy_caches_and_one_step_fit_with_a_tenth_to_spare(name: str, device_gib: float, value_bytes: int) -> None:
    config = load([ROOT / f"{name}.toml"])
    assert config.policy.gradient_checkpointing, "the arithmetic counts on it"
    needed = needed_bytes(config, value_bytes)
    assert sum(needed.values()) < 0.9 * device_gib * 2**30, {part: f"{n / 2**30:.2f} GiB" for part, n in needed.items()}


def test_arithmetic_knows_what_does_not_fit() -> None:
    too_large = load([ROOT / "gpu-8gb.toml"], {"policy.base": "Qwen/Qwen2.5-7B-Instruct"})
    assert sum(needed_bytes(too_large, 2).values()) > 8 * 2**30
    unquantized = load([ROOT / "gpu-24gb.toml"], {"policy.quantization": "none"})
    assert needed_bytes(unquantized, 2)["base"] == pytest.approx(
        13.05e9, rel=0.01
    )  # 6.5 billion of the 7.6 are in layers


@pytest.mark.parametrize(("name", "gpu_gib"), [("gpu-8gb", 8.0), ("gpu-24gb", 24.0)])
def test_ready_config_names_the_base_that_swarm_init_would_choose(name: str, gpu_gib: float) -> None:
    config = load([ROOT / f"{name}.toml"])
    choice = choose_policy(Hardware(8, 32.0, "some GPU", gpu_gib))
    assert (config.policy.base, config.policy.quantization) == (choice.base, choice.quantization)
    assert config.training.lr == choice.lr
    assert config.node.device == "cuda"


@pytest.mark.parametrize("name", ["laptop-cpu", "testbed"])
def test_machine_without_gpu_gets_the_bundled_policy(name: str) -> None:
    config = load([ROOT / f"{name}.toml"])
    assert config.policy.base == choose_policy(Hardware(4, 16.0, "", 0.0)).base == "bundled"
    assert config.policy.quantization == "none"


@pytest.mark.parametrize("hardware", ["gpu-8gb", "gpu-24gb", "laptop-cpu"])
def test_nodes_of_several_gpus_merge_and_stay_on_the_machine(hardware: str) -> None:
    config = load([ROOT / f"{hardware}.toml", ROOT / "multi-gpu.toml"])
    assert config.merging.enabled
    assert config.network.listen == ("/ip4/127.0.0.1/tcp/0",)
    assert not config.policy.pipeline.is_on


def test_modes_keep_their_promises() -> None:
    silo, public = load([ROOT / "silo.toml"]), load([ROOT / "public.toml"])
    assert silo.network.backend == "off"
    assert not silo.sharing.publish
    assert not any("127.0.0.1" in address for address in public.network.listen)


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.toml")), ids=lambda path: path.stem)
def test_every_group_of_settings_says_why(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# ")
    for table in text.split("\n[")[1:]:
        assert "#" in table, f"{path.name} [{table.splitlines()[0]} has no comment"
