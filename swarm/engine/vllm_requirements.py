"""What sampling with vLLM needs: its package, a device that both compute on, and a base that both can hold alike."""

import importlib
import os
import re
from importlib.util import find_spec
from typing import Any

import torch

from swarm.errors import ConfigError, PolicyError
from swarm.machine.child_python import install_from_clone
from swarm.policy.policy import Policy

OLDEST = (0, 32)
"""Oldest version of vLLM whose parts for adapters are those that `vllm_weights` calls."""
_INSTALL = f'{install_from_clone("vllm")}, or run "make vllm" there, or set rollouts.engine = "auto"'


def import_vllm(policy: Policy) -> Any:
    """Return the module vllm, which will compute in this process and send no usage statistics.

    Raises ConfigError where it is missing or too old, or cannot sample from this policy.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # another process could not share the policy's weights
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        vllm = importlib.import_module("vllm")
        built_for = importlib.import_module("vllm.platforms").current_platform.device_type
    except ImportError as error:
        raise ConfigError(f'rollouts.engine = "vllm" needs the package vllm, got {error}; {_INSTALL}') from None
    numbers = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise ConfigError(
            f'rollouts.engine = "vllm" needs vllm {OLDEST[0]}.{OLDEST[1]} or newer, got {vllm.__version__}; {_INSTALL}'
        )
    _check_device(policy.device, built_for)
    _check_quantization(policy)
    return vllm


def check_implementation(vllm: Any, policy: Policy) -> None:
    """Raises PolicyError for architectures that vLLM runs with the classes of transformers.

    It changes these classes, and the policy in this process would no longer compute. Raises anything for a damaged base.
    """
    arguments = vllm.EngineArgs(model=str(policy.base_folder), trust_remote_code=False)
    config = arguments.create_model_config()
    if config.using_transformers_backend():
        raise PolicyError(
            f"vLLM must have an implementation of its own for policy.base, got none for {config.architectures[0]}; "
            'set rollouts.engine = "auto"'
        )


def _check_device(device: torch.device, built_for: str) -> None:
    if device.type != built_for:
        raise ConfigError(
            f'rollouts.engine = "vllm" must compute on the device of the policy, got {device.type} and a vLLM for '
            f"{built_for or 'no device of this machine'}; set node.device, install the vLLM for {device.type}, or set "
            'rollouts.engine = "auto"'
        )
    if device.index:
        raise ConfigError(
            f'rollouts.engine = "vllm" computes on the first visible GPU, got node.device = "{device}"; start the node with '
            f'CUDA_VISIBLE_DEVICES={device.index} and set node.device = "cuda"'
        )


def _check_quantization(policy: Policy) -> None:
    quantization = policy.config.quantization
    if quantization == "8bit":
        raise ConfigError(
            'rollouts.engine = "vllm" samples from bases in 4 bit or without quantization, got policy.quantization = "8bit"; '
            'set policy.quantization = "4bit", or rollouts.engine = "auto"'
        )
    if quantization == "4bit" and policy.dtype == torch.float32:
        raise ConfigError(
            'rollouts.engine = "vllm" computes 4-bit bases in 16 bits, got policy.dtype = "float32"; '
            'set policy.dtype = "bfloat16", or rollouts.engine = "auto"'
        )
    if quantization == "4bit" and find_spec("vllm_bnb_plugin") is None:
        raise ConfigError(
            'rollouts.engine = "vllm" needs the package vllm-bnb-plugin for policy.quantization = "4bit", got no such '
            f"package; {_INSTALL}"
        )
