"""A process of a group that survives the deaths of its ranks by ``reconfigure()``: reconfigured_rank.py STORE [BACKEND]

Runs on the backend BACKEND (tensorferry). Reads commands from its standard input, a line of JSON each, and answers with
a line:

- ``{"uuid": 1, "handles": [...], "ordered": true}``: reconfigures. Answers with its rank and the size.
- ``{"reduce": 2.0}``: sums that number over the ranks. Answers with the sum, or with "failed: " and the error.
"""

import json
import sys
from datetime import timedelta

import tensorferry.c10d  # noqa: F401  # registers the backend
import torch
import torch.distributed as dist


def main() -> None:
    store = dist.FileStore(sys.argv[1])
    backend = sys.argv[3] if len(sys.argv) > 3 else "tensorferry"
    dist.init_process_group(
        backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=60), enable_reconfigure=True
    )
    print(dist._get_reconfigure_handle(), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if "uuid" in command:
                handles = command["handles"] if command["ordered"] else set(command["handles"])
                dist._reconfigure(command["uuid"], handles).wait()
                group = dist.group.WORLD
                print(json.dumps([group.rank(), group.size()]), flush=True)
            else:
                value = torch.tensor([command["reduce"]])
                dist.all_reduce(value)
                print(value.item(), flush=True)
        except Exception as error:
            print("failed:", str(error).splitlines()[0], flush=True)


if __name__ == "__main__":
    main()
