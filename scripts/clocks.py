#!/usr/bin/env python3
"""Fails if a file of agent/ or rpc/ reads the system's clock, or sleeps by it, and is not on the list here.

What an agent decides by time reads its Clock (base/clock.h), which a test can move. A file on the list uses real time
for a reason that stands beside it. A file that needs it no more must leave the list.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DIRECT = re.compile(r"steady_clock::now\(|this_thread::sleep_(?:for|until)\(")

REAL_TIME = {
    "agent/observing/call_trace.cpp": "relates the steady clock to the time of day",
    "agent/pool/executor_use.h": "measures how long entering an executor takes",
    "agent/link/link.cpp": "waits for another thread that reads the last replies, 50 ms at most",
    "agent/transport/doorbell.cpp": "ends idle threads of this process",
    "agent/transport/oversubscribed_wait.h": "spins for microseconds",
    "rpc/collectives/cuda/direct_group.cpp": "waits for devices",
    "rpc/collectives/cuda/flag_kernels.h": "waits for devices",
    "rpc/collectives/cuda/lent_memory.cpp": "gives memory back",
    "rpc/collectives/cuda/stream_run.cpp": "waits for devices",
    "rpc/collectives/cuda/watch.cpp": "waits for devices",
    "rpc/collectives/raw_group.cpp": "polls a device's stream, and says when the watching thread looks again",
    "rpc/collectives/torch/device_group.cpp": "waits for torch's streams",
    "rpc/collectives/torch/meeting.cpp": "waits for torch's store",
    "rpc/collectives/torch/torch_work.cpp": "measures operations for torch",
    "rpc/store_adapter.cpp": "waits for torch's store",
    "rpc/torch/rpc_agent.cpp": "delays messages, as torch's fault injection asks",
}


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "agent/*.h", "agent/*.cpp", "rpc/*.h", "rpc/*.cpp"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    direct = {file for file in listed if DIRECT.search(Path(file).read_text(encoding="utf-8"))}
    for file in sorted(direct - REAL_TIME.keys()):
        print(f"{file} uses the system's clock directly: use the agent's (base/clock.h)")
    for file in sorted(REAL_TIME.keys() - direct):
        print(f"scripts/clocks.py lists {file}, which does not use the system's clock")
    return 1 if direct != REAL_TIME.keys() else 0


if __name__ == "__main__":
    sys.exit(main())
