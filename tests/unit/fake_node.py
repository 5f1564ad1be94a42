"""A process that leaves the files of a node behind, without being one: `fake_node.py FOLDER ROUNDS ENDING`.

ENDING: done, meet (done once three siblings have started), wait (until interrupted),
stubborn (ignores the interrupt), or crash (one line, exit code 5).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def round_row(number: int, reward: float, **more: Any) -> dict[str, Any]:
    return {
        "kind": "round", "time_s": 1000.0 + number, "round": number, "policy_version": number,
        "rollout/reward_mean": reward, "rollout/tokens": 100, "rollout/tokens_per_s": 200.0, "time/rollout_s": 0.5,
        "train/own_groups_total": 4 * number, "train/swarm_groups_total": 3 * number,
        "exchange/bytes_sent": 10 * number, "exchange/bytes_received": 20 * number,
        "exchange/rejected": {"replay": number}, "network/peers": 3, **more,
    }  # fmt: skip


def evaluation_row(number: int, phase: str, accuracy: float) -> dict[str, Any]:
    return {
        "kind": "evaluation", "time_s": 1000.0 + number, "round": number, "phase": phase,
        "accuracy_mean": accuracy, "accuracy": {"gcd": accuracy}, "policy_version": number,
    }  # fmt: skip


def end_row(number: int, reason: str = "max_rounds") -> dict[str, Any]:
    return {"kind": "end", "time_s": 2000.0, "round": number, "reason": reason}


def main() -> None:
    folder, rounds, ending = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    status = {
        "peer_id": "12D3x", "peer_name": "fake", "pid": os.getpid(), "started_at": 0.0, "phase": "learning",
        "addresses": [f"/ip4/127.0.0.1/tcp/{os.getpid()}/p2p/12D3x"],
    }  # fmt: skip
    (folder / "status.json").write_text(json.dumps(status))
    if ending == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        (folder / "daemon.pid").write_text(str(daemon.pid))
    if ending == "crash":
        print("starting\nerror: policy.base must exist, got nothing; set policy.base")
        sys.exit(5)
    while ending == "meet" and len(list(folder.parent.glob("*/status.json"))) < 4:
        time.sleep(0.02)
    with (folder / "metrics.jsonl").open("a") as log:
        rows = [evaluation_row(0, "start", 0.25)]
        rows += [round_row(number, number / (2 * rounds)) for number in range(1, rounds + 1)]
        rows += [evaluation_row(rounds, "end", 0.75), end_row(rounds)] if ending in ("done", "meet") else []
        log.writelines(json.dumps(row) + "\n" for row in rows)
    if ending in ("wait", "stubborn"):
        time.sleep(600)


if __name__ == "__main__":
    main()
