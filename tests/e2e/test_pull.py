"""`swarm pull` from processes that merge, over loopback: what it writes is what they have."""

from pathlib import Path

import safetensors.torch
import tomli_w
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from swarm.policy.base_folder import BUNDLED_FOLDER
from tests.e2e.node_process import node_settings, wait_for
from tests.e2e.test_join import Command, done
from tests.e2e.test_nodes_merge import MERGING, first_merge
from tests.swarm_process import swarm


def joined(folder: Path, manifest: Path) -> Command:
    """A node that merges, and rests most of the time."""
    settings = node_settings(
        folder,
        node={"dir": str(folder), "threads": 1, "duty_cycle": 0.2},
        network={"listen": ["/ip4/127.0.0.1/tcp/0"]},
        rollouts={"groups_per_round": 3, "max_new_tokens": 8},
        sharing={"own_groups": 3, "swarm_groups": 0, "publish": False},
        checkpoint={"interval_rounds": 1},
        merging=MERGING,
    )
    path = folder.with_suffix(".toml")
    path.write_text(tomli_w.dumps(settings))
    return Command(folder, "join", str(manifest), str(path))


def flat(path: Path) -> torch.Tensor:
    tensors = safetensors.torch.load_file(path)
    named = {name.removeprefix("base_model.model.").removesuffix(".weight"): one for name, one in tensors.items()}
    return torch.cat([named[name].flatten() for name in sorted(named) if name.endswith("lora_B")])


def test_a_swarms_adapter_is_pulled_without_training(tmp_path: Path) -> None:
    done(tmp_path, "create", "friends")
    manifest, out = tmp_path / "friends.swarm.toml", tmp_path / "out"
    alone = swarm("pull", str(manifest), str(out), "--wait", "3", cwd=tmp_path)
    assert alone.returncode == 7, alone.stderr
    assert "a pull needs 3 donors that answer within 3 s, got 0 of 0 listed for lineage" in alone.stderr
    with joined(tmp_path / "a", manifest) as a:
        done(tmp_path, "create", "--update", str(manifest), "--bootstrap", a.address())
        with joined(tmp_path / "b", manifest) as b:
            for node in (a, b):
                wait_for(lambda node=node: first_merge(node), "a merge", a, b, deadline_s=240)
            few = swarm("pull", str(manifest), str(out), "--wait", "10", cwd=tmp_path)
            assert few.returncode == 7
            assert "of 2 listed for lineage" in few.stderr and "trust fewer with --least 2" in few.stderr
            assert not out.exists()
            told = done(tmp_path, "pull", str(manifest), str(out), "--least", "2")
            newest = [sorted((node.folder / "checkpoints").glob("round-*/adapter.safetensors"))[-1] for node in (a, b)]
            expected = (flat(newest[0]) + flat(newest[1])) / 2
    assert "mean of 2 donors, offered" in told and " s ago, after " in told
    pulled = flat(out / "adapter_model.safetensors")
    assert torch.nn.functional.cosine_similarity(pulled, expected, dim=0) > 0.5, "what they have, or had a moment ago"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BUNDLED_FOLDER), str(out))
    assert any(bool(one.any()) for name, one in model.named_parameters() if "lora_B" in name)
    written = b"".join(path.read_bytes() for path in out.iterdir())
    for secret in (str(tmp_path), str(Path.home()) + "/", "12D3KooW"):
        assert secret.encode() not in written, secret
    again = swarm("pull", str(manifest), str(out), cwd=tmp_path)
    assert again.returncode == 5 and "new or empty folder" in again.stderr
