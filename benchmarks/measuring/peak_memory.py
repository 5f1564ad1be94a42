"""The resident memory of this process, as Linux counts it. Standard library only."""

from pathlib import Path


def resident_mib() -> float:
    """Memory now."""
    return _status("VmRSS")


def peak_mib() -> float:
    """Most memory since the start, or since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Start `peak_mib` over."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    return 0.0
