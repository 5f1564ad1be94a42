"""A line between two network namespaces that is late and lossy, in user space: not every kernel has netem.

A thread reads Ethernet frames from a TAP device at either end and hands them to the other one after the delay, or not.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP_NO_PI = 0x0002 | 0x1000
_MAX_FRAME_BYTES = 65_536
_MAX_WAITING_FRAMES = 4096


class SlowLine:
    """Open from the constructor to `close`; `delay_s` and `loss` (0 to 1) hold for each direction and may be changed."""

    def __init__(self, first: tuple[str, str], second: tuple[str, str], rng: random.Random) -> None:
        """`first`, `second`: (namespace, name of the device to make there)."""
        self.delay_s = 0.0
        self.loss = 0.0
        self.num_lost = 0
        self._ends = (first, second)
        self._rng = rng
        self._wake, self._stop = os.pipe()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slow-line", daemon=True)
        self._thread.start()
        if not self._is_ready.wait(5):
            raise OSError(f"no TAP devices for {first} and {second}; is /dev/net/tun there?")

    def close(self) -> None:
        """End the thread, and with it both devices. Idempotent."""
        if self._thread.is_alive():
            os.write(self._stop, b"x")
            self._thread.join(5)

    def _run(self) -> None:
        taps = [_open_tap(namespace, device) for namespace, device in self._ends]  # moves this thread only
        self._is_ready.set()
        other = {taps[0]: taps[1], taps[1]: taps[0]}
        waiting: list[tuple[float, int, int, bytes]] = []  # (due, number, where to, frame)
        poll, number = select.poll(), 0
        for descriptor in (*taps, self._wake):
            poll.register(descriptor, select.POLLIN)
        while True:
            timeout_ms = max(0.0, waiting[0][0] - time.monotonic()) * 1e3 if waiting else None
            for descriptor, _ in poll.poll(timeout_ms):
                if descriptor == self._wake:
                    for opened in (*taps, self._wake, self._stop):
                        os.close(opened)
                    return
                frame, number = os.read(descriptor, _MAX_FRAME_BYTES), number + 1
                if self._rng.random() < self.loss or len(waiting) >= _MAX_WAITING_FRAMES:
                    self.num_lost += 1
                else:
                    heapq.heappush(waiting, (time.monotonic() + self.delay_s, number, other[descriptor], frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(waiting)
                _write(target, frame)


def _write(tap: int, frame: bytes) -> None:
    try:
        os.write(tap, frame)
    except OSError:
        return  # the device is down: a cut line loses what is sent


def _open_tap(namespace: str, device: str) -> int:
    with Path("/run/netns", namespace).open("rb") as handle:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TAP_NO_PI))
    return tap
