"""The parts of `benchmarks/gpu.py`: each measures one thing on one device and returns its figures by name."""

import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
from peers.environment import PeerUnavailable
from peers.trainers_venv import TRAINERS
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from measuring.engine_contest import ENGINE, FOLDED, GENERATE, Case, Contest, finish
from measuring.engine_long import LongCase, LongContest
from measuring.peak_memory import forget_peak, peak_mib, resident_mib
from swarm.adapters.checkpoint import CheckpointStore, CheckpointWriter
from swarm.config import PolicySection, RolloutsSection, TrainingSection
from swarm.engine.engine import AnswerRequest
from swarm.engine.make_engine import make_engine
from swarm.engine.sampling import Sampling
from swarm.engine.slot_cache import CachedAnswer
from swarm.engine.slot_model import SlotModel
from swarm.machine.child_python import swarm_command
from swarm.machine.node_folder import NodeFolder
from swarm.observability.metrics import read_rows
from swarm.policy.base_folder import BUNDLED_FOLDER
from swarm.policy.base_model import load_tokenizer
from swarm.policy.memory_probe import measure_step
from swarm.policy.policy import Policy, load_policy
from swarm.training.experience import TrainingGroup
from swarm.training.policy_optimizer import LocalOptimizer
from swarm.training.trainer import Trainer
from swarm.types import Rollout, RolloutGroup, TaskRef

Figures = Mapping[str, float | str]
_HERE = Path(__file__).resolve().parent.parent


class SkippedPart(Exception):
    """A part that cannot be measured here; the message says why."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What is measured, and where."""

    device: str
    quick: bool
    base: str
    """A folder or a name of a hub."""
    soak_s: float
    num_turns: int
    """Of each system, where several are compared."""

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"


def machine(spec: Spec) -> Figures:
    """What the figures are of."""
    found: dict[str, float | str] = {"torch": torch.__version__, "device": spec.device}
    found["memory_gib"] = round(psutil.virtual_memory().total / 2**30, 1)
    if spec.is_cuda:
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30, 1)}
        found |= {"cuda": str(torch.version.cuda), "native_bf16": str(torch.cuda.is_bf16_supported(False))}
    return found


def make_base(folder: Path, *, device: str, quick: bool) -> None:
    """Write random weights in the shape of Qwen2.5-1.5B, or of a model of 9 M parameters."""
    disable_progress_bar()
    torch.manual_seed(0)
    shape = (256, 1024, 2, 4, 2, 8192) if quick else (1536, 8960, 28, 12, 2, 151_936)
    width, inner, layers, heads, kv_heads, vocabulary = shape
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=32_768,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.device(device):
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    load_tokenizer(BUNDLED_FOLDER).save_pretrained(folder)


def float32(spec: Spec) -> Figures:
    return _one_format(spec, "float32", "none")


def bfloat16(spec: Spec) -> Figures:
    return _one_format(spec, "bfloat16", "none")


def four_bit(spec: Spec) -> Figures:
    if not find_spec("bitsandbytes"):
        raise SkippedPart("bitsandbytes is not installed")
    return _one_format(spec, "auto", "4bit")


def eight_bit(spec: Spec) -> Figures:
    if not find_spec("bitsandbytes"):
        raise SkippedPart("bitsandbytes is not installed")
    return _one_format(spec, "auto", "8bit")


def _one_format(spec: Spec, dtype: str, quantization: str) -> Figures:
    """Sample, compare the log-probs of engine and trainer, and take a step, in one number format."""
    started = time.perf_counter()
    policy = _policy(spec, dtype=dtype, quantization=quantization)
    loaded_s = time.perf_counter() - started
    engine = make_engine(policy, RolloutsSection(max_batch_sequences=32))
    length = 16 if spec.quick else 128
    requests = [AnswerRequest(policy.encode_prompt(f"What is {n} + 2?"), 8, length) for n in range(4)]
    engine.generate(requests, Sampling(), seed=0)
    started = time.perf_counter()
    answers = engine.generate(requests, Sampling(), seed=1)
    sampling_s = time.perf_counter() - started
    pairs = [(tuple(r.prompt), one.token_ids) for r, group in zip(requests, answers, strict=True) for one in group]
    with torch.no_grad():
        trained = policy.token_logprobs(pairs).logprobs.cpu()
    off = [
        abs(drawn - again)
        for row, one in zip(trained, (one for group in answers for one in group), strict=True)
        for drawn, again in zip(one.policy_logprobs, row.tolist(), strict=False)
    ]
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters() if p.requires_grad}
    seconds = _step(policy, 8, 32, length)
    moved = max((p.detach() - before[name]).abs().max().item() for name, p in _trained(policy))
    return {
        "dtype": str(policy.dtype).removeprefix("torch."), "load_s": loaded_s,
        "weights_mib": sum(p.nbytes for p in policy.model.parameters() if not p.requires_grad) / 2**20,
        "tokens_per_s": sum(len(token_ids) for _, token_ids in pairs) / sampling_s,
        "engine_and_trainer_differ_mean": statistics.fmean(off), "engine_and_trainer_differ_max": max(off),
        "step_s": seconds, "adapter_moved_by": moved,
    }  # fmt: skip


def engine_and_generate(spec: Spec) -> Figures:
    """The engine beside `model.generate`, answers of equal and of very different lengths."""
    contest = Contest(_policy(spec), max_answers=80)
    group_size, median = (2, 4) if spec.quick else (8, 64)
    figures: dict[str, float | str] = {}
    for name, lengths in (("uniform", (2 * median,) * 8), ("long tail", (8 * median, *(median,) * 9))):
        times = contest.run(Case(name, group_size, lengths), spec.num_turns)
        figures |= {f"{name}: {system}, tokens/s": times.tokens_per_s(system) for system in (GENERATE, FOLDED, ENGINE)}
        figures[f"{name}: ratio"] = times.strict_ratio
    return figures


def long_answers(spec: Spec) -> Figures:
    """Long prompts and answers of log-normal length beside `generate`, continuous batching of transformers and vLLM."""
    case = LongCase(2, 2, 96, median=12, longest=40) if spec.quick else LongCase(8, 16, 1024, median=800, longest=8192)
    times = LongContest(lambda: _policy(spec), case).run(num_turns=1, with_vllm=not spec.quick or spec.is_cuda)
    found: dict[str, float | str] = {f"{name}, tokens/s": times.tokens_per_s(name) for name in times.seconds}
    return found | {f"{name}": f"left out: {reason}" for name, reason in times.missing.items()}


def memory(spec: Spec) -> Figures:
    """Peaks of a training step by length of the answers, as predicted by the probe and as measured."""
    figures: dict[str, float | str] = {}
    policy = _policy(spec, gradient_checkpointing=True)
    need = measure_step(policy)
    for length in (48, 96) if spec.quick else (512, 2048, 8192):
        held = _held_mib(spec)
        _forget_peak(spec)
        seconds = _step(policy, 2, 64, length, micro_batch_tokens=1)
        figures[f"{length} tokens: peak over weights, MiB"] = _peak_mib(spec) - held
        figures[f"{length} tokens: predicted, MiB"] = need.of(1, 64, length) / 2**20
        figures[f"{length} tokens: step, s"] = seconds
    return figures


def cost_of_a_token(spec: Spec) -> Figures:
    """What sampling a token and training on one cost, in answers of a thousand tokens; both twice, the second time counts."""
    policy = _policy(spec, gradient_checkpointing=True)
    policy.eos_token_ids = (-1,)  # lengths are given
    num_answers, length = (4, 32) if spec.quick else (64, 1024)
    engine = make_engine(policy, RolloutsSection(max_batch_sequences=num_answers))
    requests = [AnswerRequest(policy.encode_prompt("What is 2 + 3?"), num_answers, length)]
    for turn in range(2):
        started = time.perf_counter()
        engine.generate(requests, Sampling(), seed=turn)
        finish(policy.device)
        sampling_s = time.perf_counter() - started
    training_s = [_step(policy, num_answers, 32, length) for _ in range(2)][-1]
    num_tokens = num_answers * length
    return {
        "sampling, tokens/s": num_tokens / sampling_s, "training, tokens/s": num_tokens / training_s,
        "sampling over training": sampling_s / training_s,
    }  # fmt: skip


@torch.inference_mode()
def one_token_pass(spec: Spec) -> Figures:
    """What a CUDA graph would save in the engine's pass over one token of every answer: the same pass as it is, and replayed."""
    policy = _policy(spec)
    model, num_answers = SlotModel(policy), 32
    prompt = policy.encode_prompt("What is 2 + 3?")
    cache = model.cache(num_answers, 4096)
    prepared, _ = model.prepare([prompt])
    cache.add([CachedAnswer(len(prompt), 128) for _ in range(num_answers)])
    for slot in range(num_answers):
        cache.fill(slot, prepared, row=0, start=0)
    tokens = torch.full((num_answers,), prompt[-1], device=policy.device)
    cache.begin_step()
    as_it_is = model._forward(cache, tokens).clone()
    repeats = 5 if spec.quick else 100
    figures: dict[str, float | str] = {
        "as it is, ms": 1000 * _mean_s(policy, repeats, lambda: model._forward(cache, tokens))
    }
    if not spec.is_cuda:
        return figures | {"graph": "left out: a CPU has no CUDA graphs"}
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model._forward(cache, tokens)
    except RuntimeError as error:
        return figures | {"graph": f"cannot be captured: {str(error).splitlines()[0]}"}
    figures["replayed, ms"] = 1000 * _mean_s(policy, repeats, graph.replay)
    return figures | {"largest difference of logits": (logits - as_it_is).abs().max().item()}


def beside_trl(spec: Spec) -> Figures:
    """Whole steps beside TRL's trainer: `benchmarks/trainer.py` on this device."""
    try:
        TRAINERS.python_of(TRAINERS.folder)
    except PeerUnavailable as error:
        raise SkippedPart(str(error)) from None
    command = [sys.executable, str(_HERE / "trainer.py"), "--device", spec.device]
    command += ["--quick"] if spec.quick else ["--base", spec.base] if Path(spec.base).is_dir() else []
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(" ".join(ended.stderr.split())[-300:])
    found = json.loads(ended.stdout.splitlines()[-1])
    return {name: value for name, value in found.items() if value is not None}


def checkpoint(spec: Spec) -> Figures:
    """How long training waits for a checkpoint, and how long it takes to write it."""
    policy = _policy(spec)
    optimizer = LocalOptimizer(TrainingSection(), policy)
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder), 2)
        copy_s, wait_s, write_s = [], [], []
        for turn in range(2 if spec.quick else 5):
            started = time.perf_counter()
            tensors = optimizer.state()
            copy_s.append(time.perf_counter() - started)
            with CheckpointWriter(store, lambda round, error: None) as writer:
                writer.save(2 * turn, tensors, {})
                wait_s.append(time.perf_counter() - started - copy_s[-1])
            write_s.append(time.perf_counter() - started)
        num_bytes = sum(one.nbytes for named in tensors.values() for one in named.values())
    return {
        "copied, MiB": num_bytes / 2**20, "copy, ms": 1000 * statistics.median(copy_s),
        "wait beside the copy, ms": 1000 * max(wait_s), "written after, ms": 1000 * statistics.median(write_s),
    }  # fmt: skip


def soak(spec: Spec) -> Figures:
    """A whole node for a while: it trains without a failed step, its memory stays, and it ends when asked to."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "node"
        base = (
            "bundled" if Path(spec.base).is_dir() else spec.base
        )  # random weights earn no reward, so they train nothing
        options = {
            "node.dir": str(folder), "node.device": spec.device, "policy.base": base, "network.backend": "off",
            "evaluation.tasks_per_source": "0", "observability.http": "false", "checkpoint.interval_rounds": "2",
        }  # fmt: skip
        config = Path(scratch) / "node.toml"
        config.write_text("")
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        with (Path(scratch) / "terminal.log").open("wb") as log:
            node = subprocess.Popen(swarm_command("run", str(config), *arguments), stdout=log, stderr=log)
            used = _watch(node, folder, spec)
            node.send_signal(signal.SIGTERM)
            code = node.wait(60)
        rows = [row for row in read_rows(NodeFolder(folder).metrics) if row["kind"] == "round"]
        if not rows:
            said = (Path(scratch) / "terminal.log").read_text(errors="replace").split()
            raise RuntimeError(f"no round was completed; exit code {code}: {' '.join(said)[-300:]}")
    speeds = [row["rollout/tokens_per_s"] for row in rows]
    half = len(speeds) // 2
    return {
        "base": base, "seconds": spec.soak_s, "rounds": len(rows), "exit code": code,
        "steps skipped": sum(bool(row.get("train/skip_reason")) for row in rows),
        "tokens/s, first half": statistics.fmean(speeds[:half] or speeds),
        "tokens/s, second half": statistics.fmean(speeds[half:]),
        **{f"{name}, MiB, after a third": values[len(values) // 3] for name, values in used.items()},
        **{f"{name}, MiB, at the end": values[-1] for name, values in used.items()},
    }  # fmt: skip


def _watch(node: "subprocess.Popen[bytes]", folder: Path, spec: Spec) -> dict[str, list[float]]:
    """Memory by time, from the first round on."""
    used: dict[str, list[float]] = {"resident": []}
    metrics = NodeFolder(folder).metrics
    starts_by = time.monotonic() + 300
    while node.poll() is None and not _has_round(metrics) and time.monotonic() < starts_by:
        time.sleep(0.2)
    ends_at = time.monotonic() + spec.soak_s
    while node.poll() is None and (time.monotonic() < ends_at or not used["resident"]):
        used["resident"].append(psutil.Process(node.pid).memory_info().rss / 2**20)
        if spec.is_cuda:
            free, total = torch.cuda.mem_get_info()
            used.setdefault("gpu", []).append((total - free) / 2**20)
        time.sleep(1.0)
    return used if used["resident"] else {}


def _has_round(metrics: Path) -> bool:
    return metrics.exists() and any(row["kind"] == "round" for row in read_rows(metrics))


def _policy(spec: Spec, **settings: object) -> Policy:
    section = PolicySection.model_validate({"base": spec.base, **settings})
    return load_policy(section, device=spec.device)


def _trained(policy: Policy) -> Sequence[tuple[str, torch.Tensor]]:
    return [(name, p) for name, p in policy.model.named_parameters() if p.requires_grad]


def _step(
    policy: Policy, num_answers: int, prompt_tokens: int, answer_tokens: int, micro_batch_tokens: int | None = None
) -> float:
    """Train on made-up answers once, and return how long that took."""
    numbers = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(numbers.randrange(3, policy.vocab_size) for _ in range(count))

    training = TrainingSection(mask_truncated=False, groups_per_step=0)
    if micro_batch_tokens is not None:
        policy.micro_batch_tokens = micro_batch_tokens
    trainer = Trainer(training, policy, LocalOptimizer(training, policy), temperature=1.0, max_new_tokens=answer_tokens)
    rollouts = tuple(
        Rollout("", tokens(answer_tokens), (-1.0,) * answer_tokens, finished=False, reward=float(number % 2))
        for number in range(num_answers)
    )
    group = RolloutGroup(TaskRef("made-up", "0" * 16, 16, 0), "0" * 16, rollouts, "me", policy.lineage, policy.version)
    started = time.perf_counter()
    report = trainer.step([TrainingGroup(tokens(prompt_tokens), group, usable_logprobs=True, is_own=True)])
    finish(policy.device)
    if report.skipped:
        raise RuntimeError(f"the step was skipped: {report.skip_reason}")
    return time.perf_counter() - started


def _mean_s(policy: Policy, repeats: int, work: Callable[[], object]) -> float:
    for _ in range(2):
        work()
    finish(policy.device)
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    finish(policy.device)
    return (time.perf_counter() - started) / repeats


def _held_mib(spec: Spec) -> float:
    return torch.cuda.memory_allocated() / 2**20 if spec.is_cuda else resident_mib()


def _peak_mib(spec: Spec) -> float:
    return torch.cuda.max_memory_allocated() / 2**20 if spec.is_cuda else peak_mib()


def _forget_peak(spec: Spec) -> None:
    torch.cuda.reset_peak_memory_stats() if spec.is_cuda else forget_peak()
