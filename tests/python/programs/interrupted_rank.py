"""Two ranks of a torch.distributed job on the backend tensorferry: interrupted_rank.py PORT RANK.

Rank 1 takes part in nothing. Rank 0 gets a SIGINT in each blocking function of torch.distributed, and of a group of
tensorferry.collectives; at last one ends it. Rank 1 prints what it hears then.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import tensorferry.c10d
import tensorferry.collectives
import tensorferry.rpc
import torch
import torch.distributed as dist
from interrupting import interrupt
from torch.distributed import distributed_c10d

port, rank = int(sys.argv[1]), int(sys.argv[2])


def ones() -> torch.Tensor:
    return torch.ones(2)


def pair() -> list[torch.Tensor]:
    return [ones(), ones()]


TORCH: dict[str, Callable[[Any], Any]] = {
    "all_gather": lambda g: dist.all_gather(pair(), ones(), g),
    "all_gather_coalesced": lambda g: dist.all_gather_coalesced([[ones()], [ones()]], [ones()], g),
    "all_gather_into_tensor": lambda g: dist.all_gather_into_tensor(torch.ones(4), ones(), g),
    "all_gather_object": lambda g: dist.all_gather_object([None, None], 1, g),
    "all_gather_single": lambda g: dist.all_gather_single(torch.ones(4), ones(), g),
    "all_reduce": lambda g: dist.all_reduce(ones(), group=g),
    "all_reduce_coalesced": lambda g: dist.all_reduce_coalesced(pair(), group=g),
    "all_to_all": lambda g: dist.all_to_all(pair(), pair(), g),
    "all_to_all_single": lambda g: dist.all_to_all_single(ones(), ones(), group=g),
    "barrier": lambda g: dist.barrier(g),
    "batch_isend_irecv": lambda g: dist.batch_isend_irecv([dist.P2POp(dist.irecv, ones(), 1, g)])[0].wait(),
    "broadcast": lambda g: dist.broadcast(ones(), 1, g),
    "broadcast_object_list": lambda g: dist.broadcast_object_list([None], 1, g),
    "destroy_process_group": lambda g: (dist.barrier(g, async_op=True), dist.destroy_process_group(g)),
    "gather": lambda g: dist.gather(ones(), pair(), group=g),
    "gather_object": lambda g: dist.gather_object(1, [None, None], group=g),
    "irecv": lambda g: dist.irecv(ones(), 1, g).wait(),
    "isend": lambda g: dist.isend(torch.ones(1 << 20), 1, g).wait(),
    "monitored_barrier": lambda g: dist.monitored_barrier(g),
    "new_group": lambda g: dist.new_group([0, 1]),
    "recv": lambda g: dist.recv(ones(), 1, g),
    "recv_object_list": lambda g: dist.recv_object_list([None], 1, g),
    "reduce": lambda g: dist.reduce(ones(), 0, group=g),
    "reduce_scatter": lambda g: dist.reduce_scatter(ones(), pair(), group=g),
    "reduce_scatter_single": lambda g: dist.reduce_scatter_single(torch.ones(1), ones(), group=g),
    "reduce_scatter_tensor": lambda g: dist.reduce_scatter_tensor(torch.ones(1), ones(), group=g),
    "scatter": lambda g: dist.scatter(ones(), src=1, group=g),
    "scatter_object_list": lambda g: dist.scatter_object_list([None], [None, None], 1, g),
    "send": lambda g: dist.send(torch.ones(1 << 20), 1, g),
    "send_object_list": lambda g: dist.send_object_list([b"x" * (4 << 20)], 1, g),
}
# They wait for no rank, are torch's own from end to end, or are made of the others; the backend lacks gather_single.
# interrupted_calls.py has init_process_group.
TORCH_OTHERS = {
    "abort_process_group", "broadcast_object", "gather_into_tensor",
    "gather_single", "get_backend", "get_backend_config",
    "get_backend_impl",
    "get_global_rank", "get_group_rank", "get_node_local_rank", "get_pg_count", "get_process_group_ranks", "get_rank",
    "get_world_size", "init_process_group", "is_backend_available", "is_gloo_available", "is_initialized",
    "is_mpi_available", "is_nccl_available", "is_torchelastic_launched", "is_ucc_available", "is_xccl_available",
    "new_subgroups", "new_subgroups_by_enumeration", "set_timeout", "shrink_group", "split_group", "supports_complex",
}  # fmt: skip
OURS: dict[str, Callable[[Any], Any]] = {
    "all_gather": lambda g: g.all_gather(ones()).wait(),
    "all_gather_coalesced": lambda g: g.all_gather_coalesced([ones()]).wait(),
    "all_gather_object": lambda g: g.all_gather_object(1),
    "all_reduce": lambda g: g.all_reduce(ones()).wait(),
    "all_reduce_coalesced": lambda g: g.all_reduce_coalesced([ones()]).wait(),
    "all_to_all": lambda g: g.all_to_all(pair(), pair()).wait(),
    "barrier": lambda g: g.barrier().wait(),
    "broadcast": lambda g: g.broadcast(ones(), 1).wait(),
    "broadcast_object": lambda g: g.broadcast_object(None, 1),
    "gather": lambda g: g.gather(ones()).wait(),
    "gather_object": lambda g: g.gather_object(1),
    "merge": lambda g: g.merge([*g.names, "nobody"]),
    "monitored_barrier": lambda g: g.monitored_barrier(),
    "receive": lambda g: g.receive(ones(), 1).wait(),
    "reduce": lambda g: g.reduce(ones()).wait(),
    "reduce_scatter": lambda g: g.reduce_scatter(ones(), pair()).wait(),
    "reduce_scatter_coalesced": lambda g: g.reduce_scatter_coalesced([ones()], [pair()]).wait(),
    "scatter": lambda g: g.scatter(ones(), (), 1).wait(),
    "scatter_object": lambda g: g.scatter_object((), 1),
    "send": lambda g: g.send(torch.ones(1 << 20), 1).wait(),
    "split": lambda g: g.split(0),
}
OUR_OTHERS = {"abort", "close", "explain"}


def check_that_all_are_here() -> None:
    functions = {name for name in distributed_c10d.__all__ if inspect.isfunction(vars(dist).get(name))}
    takes_group = {name for name in functions if "group" in inspect.signature(getattr(dist, name)).parameters}
    assert not (new := takes_group - TORCH.keys() - TORCH_OTHERS), f"functions without a case: {new}"
    methods = {n for n, m in inspect.getmembers(tensorferry.collectives.Group, inspect.isfunction) if n[0] != "_"}
    assert methods == OURS.keys() | OUR_OTHERS, methods ^ (OURS.keys() | OUR_OTHERS)


signal.signal(signal.SIGINT, signal.default_int_handler)
check_that_all_are_here()
torch_cases = {name: case for name, case in TORCH.items() if hasattr(dist, name)}  # an older torch lacks some
store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
# The agent of the groups: one of their own would refuse pickles, which object operations of Group send.
tensorferry.rpc.init_rpc(f"agent{rank}", rank=rank, world_size=2, store=store)
dist.init_process_group("tensorferry", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600))
groups = [dist.new_group([0, 1]) for _ in range(len(torch_cases) + len(OURS))]
if rank == 1:
    try:
        dist.recv(ones(), 0)
    except dist.DistBackendError as error:
        print(error, flush=True)
    os._exit(0)
for group, (name, case) in zip(groups, torch_cases.items()):
    interrupt(f"torch.distributed.{name}", lambda case=case, group=group: case(group), 0.1)
for group, (name, case) in zip(groups[len(torch_cases) :], OURS.items()):
    interrupt(f"Group.{name}", lambda case=case, group=group: case(tensorferry.c10d.group_of(group)), 0.1)
print("interrupted", flush=True)
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
dist.recv(ones(), 1)
