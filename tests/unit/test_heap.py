"""Freed memory goes back to the system."""

import asyncio
import subprocess
import sys

from swarm.machine.memory import HeapTrimmer


async def test_one_trim_follows_a_burst_of_large_data_and_none_follows_small() -> None:
    trimmer = HeapTrimmer(delay_s=0.0)
    trimmer.note(64 * 1024)
    await asyncio.to_thread(int)
    assert trimmer.num_trims == 0
    trimmer.note(1 << 20)
    trimmer.note(1 << 20)
    await asyncio.to_thread(int)
    assert trimmer.num_trims == 1


async def test_stopped_trimmer_does_nothing_more() -> None:
    trimmer = HeapTrimmer(delay_s=0.0)
    trimmer.note(1 << 20)
    trimmer.stop()
    await asyncio.to_thread(int)
    assert trimmer.num_trims == 0


def test_holes_in_the_heap_are_given_back() -> None:
    script = """
import asyncio
from swarm.machine import memory as heap
heap.keep_heaps_small()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
async def main():
    blocks = [bytes(60_000) for _ in range(1000)]  # below the size that is mapped by itself
    kept = blocks[::10]
    before = resident()
    del blocks
    heap.HeapTrimmer(delay_s=0.0).note(1 << 20)
    await asyncio.to_thread(int)
    print(before - resident(), len(kept))
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[0]) > 40e6


def test_a_process_that_computes_takes_no_new_pages_for_the_tensors_of_each_step() -> None:
    script = """
import resource, sys
from swarm.machine import memory as heap
heap.keep_heaps_small(computes=sys.argv[1] == "computes")
def step():
    for size in (1 << 20, 3 << 20):
        held = [bytearray(size) for _ in range(4)]
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
before = faults()
for _ in range(20):
    step()
print(faults() - before)
"""
    counts = {
        kind: int(
            subprocess.run(
                [sys.executable, "-c", script, kind], capture_output=True, text=True, timeout=60, check=True
            ).stdout
        )
        for kind in ("computes", "carries")
    }
    assert 10 * counts["computes"] < counts["carries"], "which returns the pages of every step"
