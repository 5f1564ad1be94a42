"""Checks torch, the device and bitsandbytes in a child process, as a broken driver can hang or crash its process."""

import json
import subprocess
from collections.abc import Sequence

from swarm.config import Config
from swarm.diagnostics.check_result import CheckResult, ok, problem, warning
from swarm.machine.child_python import module_command, pip_install
from swarm.machine.hardware import detect

PROBE = tuple(module_command("swarm.diagnostics.accelerator_probe"))
_TIMEOUT_S = 120.0
_REINSTALL = pip_install("--force-reinstall")


def check_accelerator(
    config: Config, command: Sequence[str] = PROBE, timeout_s: float = _TIMEOUT_S
) -> list[CheckResult]:
    """Findings "torch" and, where that works, "8-bit"."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return [problem("torch", f"torch gave no answer within {timeout_s:.0f} s", "nvidia-smi  (the driver may hang)")]
    except OSError as error:
        return [problem("torch", f"cannot be asked: {error}", f"{_REINSTALL} torch")]
    try:
        result = json.loads(ran.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        lines = ran.stderr.strip().splitlines() or ["no output"]
        return [problem("torch", f"ended with code {ran.returncode}: {lines[-1][:200]}", f"{_REINSTALL} torch")]
    return [_torch(result, config), _int8(result, config)]


def _torch(result: dict[str, object], config: Config) -> CheckResult:
    device = str(result["device"])
    text = f"torch {result['torch']} computes on {result.get('name', 'the CPU')}"
    if not result["matmul"]:
        return problem("torch", f"torch {result['torch']} computes wrong results on {device}", f"{_REINSTALL} torch")
    wanted = config.node.device
    if wanted not in ("auto", device) and wanted != "cpu":
        fix = "set node.device to auto, or install a torch build for this device"
        return problem("torch", f"{text}, and node.device asks for {wanted}", fix)
    if device == "cpu" and (gpu := detect().gpu_name):
        fix = f"{_REINSTALL} torch --index-url https://download.pytorch.org/whl/cu128"
        return warning("torch", f"{text}, though there is a {gpu}", fix)
    return ok("torch", text)


def _int8(result: dict[str, object], config: Config) -> CheckResult:
    if result.get("int8"):
        return ok("8-bit", "bitsandbytes multiplies in 8 bit")
    text = f"bitsandbytes does not work here: {result.get('int8_error', 'wrong results')}"
    if config.policy.quantization == "none":
        return warning("8-bit", f"{text}; needed for quantised bases only", f"{_REINSTALL} bitsandbytes")
    return problem("8-bit", text, f"{_REINSTALL} bitsandbytes, or set policy.quantization to none")
