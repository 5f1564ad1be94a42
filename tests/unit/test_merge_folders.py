"""`swarm merge`: exported folders in, one folder out that peft loads; everything that does not belong together is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from swarm.adapters.adapter_folder import check_one_base, read_adapter_folder
from swarm.adapters.adapter_state import check_adapter, read_adapter, write_adapter
from swarm.adapters.export import BASE_FACTS, export_adapter
from swarm.adapters.product_merge import greedy_soup
from swarm.cli import main as cli
from swarm.errors import CheckpointError, MergeError
from swarm.policy.lineage import hash_weights
from swarm.policy.policy import Policy

MakePolicy = Callable[..., Policy]


def train(policy: Policy, seed: int, scale: float) -> None:
    """As if it had been trained: every factor moved."""
    generator = torch.Generator().manual_seed(seed)
    moved = {n: t + scale * torch.randn(t.shape, generator=generator) for n, t in read_adapter(policy.model).items()}
    write_adapter(policy.model, moved)


def export(policy: Policy, folder: Path) -> Path:
    return export_adapter(policy.model, policy.tokenizer, folder, hash_weights(policy.base_folder))


def merge(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["swarm", "merge", *map(str, arguments)])
    return cli._run()


def delta(policy: Policy) -> dict[str, torch.Tensor]:
    """scaling · B·A by layer."""
    tensors = read_adapter(policy.model)
    scaling = policy.config.lora.alpha / policy.config.lora.rank
    names = [name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")]
    return {name: scaling * tensors[f"{name}.lora_B"] @ tensors[f"{name}.lora_A"] for name in names}


def loaded_delta(base_folder: Path, folder: Path) -> dict[str, torch.Tensor]:
    base = AutoModelForCausalLM.from_pretrained(base_folder)
    model = PeftModel.from_pretrained(base, str(folder))
    return {
        name: module.get_delta_weight("default").detach()
        for name, module in model.base_model.model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


def assert_close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, atol=tolerance, rtol=tolerance, msg=name)


def test_close_adapters_are_averaged_by_factor(
    make_policy: MakePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    first, second = make_policy(), make_policy()
    train(second, 1, 0.001)
    folders = [export(first, tmp_path / "a"), export(second, tmp_path / "b")]
    assert merge(monkeypatch, *folders, "--out", tmp_path / "out", "--weights", "3,1") == 0
    assert "14 layers averaged by factor, 0 as products" in capsys.readouterr().out
    merged = read_adapter_folder(tmp_path / "out")
    one, two = read_adapter(first.model), read_adapter(second.model)
    for name, tensor in merged.tensors.items():
        torch.testing.assert_close(tensor, 0.75 * one[name] + 0.25 * two[name])
    wanted = {name: 0.75 * tensor + 0.25 * delta(second)[name] for name, tensor in delta(first).items()}
    assert_close(loaded_delta(first.base_folder, tmp_path / "out"), wanted)


def test_other_ranks_are_merged_as_products(
    make_policy: MakePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    first, second = make_policy(rank=2), make_policy(rank=4)
    train(first, 1, 0.2)
    train(second, 2, 0.2)
    folders = [export(first, tmp_path / "a"), export(second, tmp_path / "b")]
    assert merge(monkeypatch, *folders, "--out", tmp_path / "out", "--rank", 6) == 0
    assert "0 layers averaged by factor, 14 as products, at most 0.0% of a layer lost" in capsys.readouterr().out
    wanted = {name: (tensor + delta(second)[name]) / 2 for name, tensor in delta(first).items()}
    assert_close(loaded_delta(first.base_folder, tmp_path / "out"), wanted)
    merged = read_adapter_folder(tmp_path / "out")
    assert merged.rank == 6 and merged.base_hash == hash_weights(first.base_folder)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_adapters_of_other_starts_are_not_averaged_by_factor(
    make_policy: MakePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Same rank, other seed of A: the mean of the factors would be wrong, the mean of the products is right."""
    first, second = make_policy(init_seed=0), make_policy(init_seed=1)
    train(first, 1, 0.1)
    train(second, 2, 0.1)
    folders = [export(first, tmp_path / "a"), export(second, tmp_path / "b")]
    assert merge(monkeypatch, *folders, "--out", tmp_path / "out", "--rank", 8) == 0
    wanted = {name: (tensor + delta(second)[name]) / 2 for name, tensor in delta(first).items()}
    assert_close(loaded_delta(first.base_folder, tmp_path / "out"), wanted)


def test_evaluation_leaves_out_a_spoiled_adapter(
    make_policy: MakePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from swarm.config import LoraSection, PolicySection
    from swarm.policy.policy import load_policy

    policy = load_policy(PolicySection(lora=LoraSection(rank=2, alpha=4, targets=("q_proj", "v_proj"))), device="cpu")
    good = export(policy, tmp_path / "good")
    train(policy, 1, 3.0)
    spoiled = export(policy, tmp_path / "spoiled")
    how = ("--how", "evaluated", "--tasks", 4)
    assert merge(monkeypatch, spoiled, good, "--out", tmp_path / "out", *how) == 0
    told = capsys.readouterr().out
    assert "weights 0, 1\n" in told and f"{spoiled}: held-out reward 0.0" in told
    assert_close(loaded_delta(policy.base_folder, tmp_path / "out"), loaded_delta(policy.base_folder, good))

    other = export(make_policy(), tmp_path / "other")
    assert merge(monkeypatch, other, other, "--out", tmp_path / "out2", *how) == 15
    assert "policy.base must be the base of the adapters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda f: (f / BASE_FACTS).write_text(json.dumps({"weights": "1" * 64})), "must have one base"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"\x80\x04pickle"), "readable adapter_model.safetensors"),
        (lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"), "readable adapter_model"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "readable adapter_config.json"),
        (lambda f: (f / "adapter_config.json").write_text("[]"), "must hold a JSON object"),
        (lambda f: configure(f, use_dora=True), "plain LoRA, got use_dora"),
        (lambda f: configure(f, peft_type="IA3"), "plain LoRA, got peft_type IA3"),
        (lambda f: configure(f, r=3), r"rank of adapter_config.json, got [4] and 3"),
        (lambda f: configure(f, lora_alpha=0), "alpha in (0, 1e+06]"),
        (lambda f: configure(f, lora_alpha=10**400), "alpha in (0, 1e+06]"),
        (lambda f: rewrite(f, lambda n, t: {n: t * torch.nan}), "must be finite"),
        (lambda f: rewrite(f, lambda n, t: {n + ".old": t}), "LoRA factors only"),
        (lambda f: rewrite(f, lambda n, t: {n: t[:, :-1]} if "k_proj.lora_A" in n else {n: t}), "same layers of one base"),
        (lambda f: rewrite(f, lambda n, t: {} if "k_proj" in n else {n: t}), "same layers of one base"),
        (lambda f: rewrite(f, lambda n, t: {} if "lora_A" in n else {n: t}), "a lora_A and a lora_B"),
        (lambda f: rewrite(f, lambda n, t: {}), "got none"),
    ],
)  # fmt: skip
def test_what_does_not_belong_together_is_refused(
    make_policy: MakePolicy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], object],
    told: str,
):
    policy = make_policy()
    folders = [export(policy, tmp_path / "a"), export(policy, tmp_path / "b")]
    spoil(folders[1])
    assert merge(monkeypatch, *folders, "--out", tmp_path / "out") == 15
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def configure(folder: Path, **changed: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def rewrite(folder: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in safetensors.torch.load_file(path).items():
        tensors |= {key: value.contiguous() for key, value in change(name, tensor).items()}
    safetensors.torch.save_file(tensors, path)


def test_without_a_hash_the_name_of_the_base_decides(make_policy: MakePolicy, tmp_path: Path):
    policy = make_policy()
    here, there = (read_adapter_folder(export_adapter(policy.model, policy.tokenizer, tmp_path / n)) for n in "ab")
    check_one_base(here, there)
    configure(tmp_path / "b", base_model_name_or_path="elsewhere")
    with pytest.raises(MergeError, match="must have one base"):
        check_one_base(here, read_adapter_folder(tmp_path / "b"))


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["a", "--out", "out"], 15, "at least two folders, got 1"),
        (["a", "b"], 2, "--out"),
        (["a", "b", "--out", "out", "--weights", "1"], 15, "must be 2 numbers"),
        (["a", "b", "--out", "out", "--weights", "1,nan"], 15, "must be 2 numbers"),
        (["a", "b", "--out", "out", "--weights", "0,0"], 15, "must be 2 numbers"),
        (["a", "b", "--out", "out", "--weights", "1,1", "--how", "evaluated"], 15, "leave out one"),
        (["a", "b", "--out", "out"], 15, "adapter_config.json"),
    ],
)
def test_mistakes_end_in_one_line(
    arguments: list[str], code: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert merge(monkeypatch, *arguments) == code
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_a_merge_does_not_overwrite(make_policy: MakePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = export(make_policy(), tmp_path / "a")
    assert merge(monkeypatch, folder, folder, "--out", tmp_path) == 5


def test_greedy_soup_takes_in_what_does_no_harm() -> None:
    quality = [0.5, 0.9, 0.1, 0.7]

    def score(weights: object) -> float:
        used = [i for i, weight in enumerate(weights) if weight > 0]  # type: ignore[arg-type]
        bonus = 0.12 * (len(used) - 1)
        return sum(quality[i] for i in used) / len(used) + bonus

    soup = greedy_soup(4, score)
    assert soup.alone == pytest.approx(quality)
    assert soup.weights == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    assert soup.score == pytest.approx(0.94)


def write_adapter_of(folder: Path, factor_a: torch.Tensor, factor_b: torch.Tensor) -> Path:
    config = {"peft_type": "LORA", "r": len(factor_a), "lora_alpha": 16, "base_model_name_or_path": "base"}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    named = {f"base_model.model.one.lora_{part}.weight": t for part, t in (("A", factor_a), ("B", factor_b))}
    safetensors.torch.save_file(named, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(("inputs", "outputs"), [(0, 0), (1, 1)])
def test_a_rank_beyond_the_sides_is_refused_before_a_matrix_of_that_size_is_made(
    tmp_path: Path, inputs: int, outputs: int
) -> None:
    """A file of 192 bytes may name a rank of 30,000, whose square takes 7 GB."""
    path = write_adapter_of(tmp_path / "adapter", torch.zeros(30_000, inputs), torch.zeros(outputs, 30_000))
    with pytest.raises(MergeError, match="at most the longer side"):
        read_adapter_folder(path)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(1e300, torch.float64), (1.0, torch.float8_e4m3fn), (1.0, torch.complex64), (1.0, torch.bool), (1.0, torch.int8)],
)
def test_numbers_that_float32_does_not_hold_are_refused(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    factors = [torch.full((2, 2), value, dtype=torch.float64).to(dtype) for _ in range(2)]
    with pytest.raises(MergeError, match="finite numbers in float32"):
        read_adapter_folder(write_adapter_of(tmp_path / "adapter", *factors))
    with pytest.raises(CheckpointError, match="finite numbers in float32"):
        check_adapter({"one": factors[0]}, {"one": torch.Size([2, 2])})
