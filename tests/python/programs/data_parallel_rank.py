"""One rank of data-parallel training on the backend tensorferry: data_parallel_rank.py FILE RANK SIZE SCENARIO...

Its tensors are on TEST_DEVICE, in which RANK stands for the rank; without that, on the CPU.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import tensorferry.c10d
import tensorferry.rpc as rpc
import torch
import torch.distributed as dist
from tensorferry import ddp
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[3] / "examples/14-gradient-server"))
example = importlib.import_module("gradient_server")

rank, size = int(sys.argv[2]), int(sys.argv[3])
device = os.environ.get("TEST_DEVICE", "cpu").replace("RANK", str(rank))
torch.set_default_device(device)
STEPS = 4
Register = Callable[[DistributedDataParallel], None]
SEVERAL = 0.0005  # MB, so that a small network has several buckets from the second step on


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 60), torch.nn.ReLU(), torch.nn.Linear(60, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows for all ranks, 8 each, and their labels."""
    chosen = torch.Generator("cpu").manual_seed(1)
    rows = torch.randn(8 * size, 20, generator=chosen, device="cpu")
    return rows.to(device), torch.randint(0, 3, (8 * size,), generator=chosen, device="cpu").to(device)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, part: slice) -> None:
    optimizer.zero_grad()
    rows, labels = data()
    torch.nn.functional.cross_entropy(model(rows[part]), labels[part]).backward()


def trained(
    register: Register, group: dist.ProcessGroup | None = None, after: Any = None, cap: float = SEVERAL
) -> list[torch.Tensor]:
    """The parameters after some steps of DistributedDataParallel with a hook."""
    model = network()
    parallel = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap)  # type: ignore[arg-type]
    register(parallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        step(parallel, optimizer, slice(8 * rank, 8 * rank + 8))
        optimizer.step()
        if after is not None:
            after.average_parameters(model.parameters())
    return list(model.parameters())


def alone() -> list[torch.Tensor]:
    """The parameters after the same steps of one process on all data."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        step(model, optimizer, slice(None))
        optimizer.step()
    return list(model.parameters())


def close(a: list[torch.Tensor], b: list[torch.Tensor], tolerance: float = 1e-6) -> None:
    atol = tolerance if device == "cpu" else max(tolerance, 1e-4)  # a GPU sums batches of two sizes in other orders
    for one, other in zip(a, b):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


def same_everywhere(parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        all_of_them = [torch.empty_like(parameter) for _ in range(size)]
        dist.all_gather(all_of_them, parameter.detach())
        assert all(each.equal(parameter) for each in all_of_them)


def hooks() -> None:
    """The hooks of tensorferry.ddp in DistributedDataParallel."""
    group = tensorferry.c10d.group_of()
    for state in None, dist.group.WORLD, group:
        got = trained(lambda model, state=state: model.register_comm_hook(state, ddp.all_reduce_hook))  # type: ignore[misc]
        close(got, alone())
        same_everywhere(got)
    for hook in ddp.half_hook, ddp.bfloat16_hook:
        got = trained(lambda model, hook=hook: model.register_comm_hook(group, hook))  # type: ignore[misc]
        close(got, alone(), 1e-2)
        assert not all(a.equal(b) for a, b in zip(got, trained(lambda model: None)))  # it has rounded
        same_everywhere(got)
    gloo = dist.new_group(backend="gloo")
    try:
        trained(lambda model: model.register_comm_hook(gloo, ddp.all_reduce_hook))
    except tensorferry.errors.InvalidArgument as error:
        assert "another backend than tensorferry" in str(error)
    else:
        raise AssertionError("a hook ran on gloo")


def sparse() -> None:
    """Hooks on the buckets of sparse gradients give what DistributedDataParallel gives without a hook, also on Gloo."""

    def gradients(register: Register, group: Any = None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(10, 3, sparse=True), torch.nn.Linear(3, 2))
        parallel = DistributedDataParallel(model, process_group=group)
        register(parallel)
        for _ in range(2):
            model.zero_grad()
            parallel(torch.tensor([rank, rank + 1, 9])).pow(2).sum().backward()
        assert model[0].weight.grad.is_sparse
        return [each.grad.to_dense() for each in model.parameters()]

    expected = gradients(lambda model: None)
    close(gradients(lambda model: None, dist.new_group(backend="gloo")), expected)
    own = ddp.CommHook(lambda state, bucket: dist.all_reduce(bucket.buffer().div_(size), async_op=True))
    for hook, tolerance in ((ddp.all_reduce_hook, 1e-6), (own, 1e-6), (ddp.half_hook, 1e-2), (ddp.bfloat16_hook, 1e-1)):
        got = gradients(lambda model, hook=hook: model.register_comm_hook(None, hook))  # type: ignore[misc]
        close(got, expected, tolerance)
        if hook is ddp.half_hook:
            close(got[:1], expected[:1])  # the sparse one is not rounded


def own_hooks() -> None:
    """A CommHook for each kind of answer, over several buckets."""
    group, seen = tensorferry.c10d.group_of(), set()

    def by_work(state: Any, bucket: ddp.GradBucket) -> Any:
        seen.add((bucket.index(), bucket.is_last()))
        assert [p.shape for p in bucket.parameters()] == [g.shape for g in bucket.gradients()]
        return state.all_reduce(bucket.buffer(), "average")

    def by_torchs_work(state: Any, bucket: ddp.GradBucket) -> Any:
        return dist.all_reduce(bucket.buffer().div_(size), async_op=True)

    def by_future(state: Any, bucket: ddp.GradBucket) -> Any:
        return by_torchs_work(state, bucket).get_future()

    def at_once(state: Any, bucket: ddp.GradBucket) -> Any:
        return state.all_reduce_coalesced([bucket.buffer()], "average").wait()

    for function in by_work, by_torchs_work, by_future, at_once:
        close(trained(lambda model, f=function: model.register_comm_hook(group, ddp.CommHook(f))), alone())  # type: ignore[misc]
    assert {(0, False), (1, True)} <= seen, seen


def errors() -> None:
    """What a hook raises reaches the training step, and names hook and bucket."""

    def raises(state: Any, bucket: ddp.GradBucket) -> Any:
        raise ValueError("no gradients today")

    def fails_later(state: Any, bucket: ddp.GradBucket) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_exception(OSError("the line is cut"))  # type: ignore[arg-type]
        return future

    def fails_at_the_peer(state: Any, bucket: ddp.GradBucket) -> Any:
        return state.all_reduce(torch.ones(3 + rank))

    def returns_two(state: Any, bucket: ddp.GradBucket) -> Any:
        return [bucket.buffer(), bucket.buffer()]

    def returns_less(state: Any, bucket: ddp.GradBucket) -> Any:
        return bucket.buffer()[1:]

    group = tensorferry.c10d.group_of()
    for function, text in (
        (raises, "ValueError: no gradients today"),
        (fails_later, "OSError: the line is cut"),
        (fails_at_the_peer, "InvalidArgument: "),
        (returns_two, "its result is a list of 2"),
        (returns_less, "elements, and the bucket has"),
    ):
        try:
            trained(lambda model, f=function: model.register_comm_hook(group, ddp.CommHook(f)))  # type: ignore[misc]
        except RuntimeError as error:
            assert f'{function.__name__}" failed at bucket ' in str(error), error
            assert text in str(error), error
        else:
            raise AssertionError(f"{function} raised nothing")
    # Hooks in C++ whose ranks disagree.
    try:
        hook: Any = ddp.CommHook(lambda state, bucket: state.barrier()) if rank == 1 else ddp.half_hook
        trained(lambda model: model.register_comm_hook(group, hook))
    except RuntimeError as error:
        assert isinstance(error, dist.DistBackendError) or rank == 1, type(error)
        assert "failed at bucket 0: InvalidArgument: " in str(error) or rank != 1, error
        assert 'InvalidArgument: the hook "half" failed at bucket 0: ' in str(error) or rank == 1, error
        assert "rank 1" in str(error), error
    else:
        raise AssertionError("the ranks agreed")
    model = torch.nn.Linear(4, 2 + rank, bias=False)
    model(torch.ones(4)).sum().backward()
    try:
        ddp.reduce_gradients(model.parameters(), None, ddp.half_hook)
    except tensorferry.errors.InvalidArgument as error:
        assert 'the hook "half" failed at bucket 0: ' in str(error) and "rank 1" in str(error), error
    else:
        raise AssertionError("the ranks agreed")


made: list[Any] = []


def the_server() -> Any:
    return made[0]


def server() -> None:
    """Buckets go to a parameter server by a remote reference, and no gradients over the group."""
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, init_method=f"file://{sys.argv[1]}.rpc")
    if rank == 0:
        made.append(rpc.remote("worker0", example.GradientServer, args=(size,)))
    dist.barrier()
    held = rpc.rpc_sync("worker0", the_server)
    got = trained(lambda model: model.register_comm_hook(held, example.gradient_server_hook))
    close(got, alone())
    same_everywhere(got)
    made.clear()
    rpc.shutdown()


def torch_hooks() -> None:
    """torch's own hooks train alike on this backend and on gloo."""
    gloo = dist.new_group(backend="gloo")

    def power(hook: Any, **options: Any) -> Callable[[Any], Register]:
        def of(group: Any) -> Register:
            state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=1.01, **options)
            return lambda model: model.register_comm_hook(state, hook)

        return of

    plain = default_hooks.allreduce_hook
    kinds: dict[str, Callable[[Any], Register]] = {
        "all-reduce": lambda group: lambda model: model.register_comm_hook(group, plain),
        "half": lambda group: lambda model: model.register_comm_hook(group, default_hooks.fp16_compress_hook),
        "half around all-reduce": lambda group: (
            lambda model: model.register_comm_hook(group, default_hooks.fp16_compress_wrapper(plain))
        ),
        "builtin all-reduce": lambda _: (
            lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        ),
        "builtin half": lambda _: (
            lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        ),
        "power": power(powerSGD_hook.powerSGD_hook),
        "power of rank 2": power(powerSGD_hook.powerSGD_hook, matrix_approximation_rank=2, warm_start=False),
        "power in half": power(default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
        "none": lambda _: lambda model: model.register_comm_hook(None, debugging_hooks.noop_hook),
    }
    for name, register in kinds.items():
        cap = 25 if "power" in name else SEVERAL  # it starts operations in callbacks, so several buckets are no order
        here, there = trained(register(dist.group.WORLD), cap=cap), trained(register(gloo), gloo, cap=cap)
        difference = max((a - b).abs().max().item() for a, b in zip(here, there))
        print(f"{name}: differs from gloo by {difference:.1e}", flush=True)
        close(here, there, 2e-3 if "half" in name else 1e-5)
        if name in ("all-reduce", "builtin all-reduce"):
            close(here, alone())

    in_turn = power(ddp.CommHook(powerSGD_hook.powerSGD_hook, overlap=False))  # it may have several buckets
    close(trained(in_turn(dist.group.WORLD)), trained(in_turn(gloo), gloo), 1e-5)

    def bfloat16(group: Any) -> list[torch.Tensor]:  # DistributedDataParallel refuses this hook on the CPU
        model = network()
        step(model, torch.optim.SGD(model.parameters()), slice(8 * rank, 8 * rank + 8))
        ddp.reduce_gradients(model.parameters(), group, default_hooks.bf16_compress_hook)
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    close(bfloat16(dist.group.WORLD), bfloat16(gloo), 2e-3)

    def local(group: Any) -> list[torch.Tensor]:
        state = PostLocalSGDState(group, subgroup=dist.new_subgroups(1)[0], start_localSGD_iter=2)
        averager = PeriodicModelAverager(period=2, warmup_steps=2, process_group=group)
        return trained(lambda model: model.register_comm_hook(state, post_localSGD_hook), group, averager)

    here = local(dist.group.WORLD)
    close(here, local(gloo), 1e-5)


def fsdp2() -> None:
    """fully_shard trains a network of two layers as one process does."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (size,))
    model = network()
    for layer in model[0], model[2], model:
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        step(model, optimizer, slice(8 * rank, 8 * rank + 8))
        optimizer.step()
    shards = list(model.parameters())
    assert sum(each.to_local().numel() for each in shards) < sum(each.numel() for each in shards)  # type: ignore[attr-defined]
    whole = [each.full_tensor().detach() for each in shards]  # type: ignore[attr-defined]
    close(whole, alone())
    difference = max((a - b).abs().max().item() for a, b in zip(whole, alone()))
    print(f"fsdp2: differs from one process by {difference:.1e}", flush=True)


def as_with_nccl() -> None:
    """DistributedDataParallel and fully_shard train as they do with NCCL."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.cuda.set_device(rank)
    nccl = dist.new_group(backend="nccl")

    def losses(parallel: Callable[[torch.nn.Sequential], torch.nn.Module]) -> list[float]:
        model = parallel(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = []
        for _ in range(STEPS):
            step(model, optimizer, slice(8 * rank, 8 * rank + 8))
            optimizer.step()
            rows, labels = data()
            out.append(torch.nn.functional.cross_entropy(model(rows), labels).item())
        return out

    def sharded(group: Any) -> Callable[[torch.nn.Sequential], torch.nn.Module]:
        def shard(model: torch.nn.Sequential) -> torch.nn.Module:
            mesh = DeviceMesh.from_group(group, "cuda")
            for layer in model[0], model[2], model:
                fully_shard(layer, mesh=mesh)
            return model

        return shard

    def replicated(group: Any) -> Callable[[torch.nn.Sequential], torch.nn.Module]:
        return lambda model: DistributedDataParallel(model, process_group=group, bucket_cap_mb=SEVERAL)  # type: ignore[arg-type]

    for name, kind in ("DistributedDataParallel", replicated), ("fully_shard", sharded):
        here, there = losses(kind(dist.group.WORLD)), losses(kind(nccl))
        print(f"{name}: losses {here}, with NCCL {there}", flush=True)
        assert all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(here, there)), (name, here, there)


def without_ddp() -> None:
    """The same hooks and torch's on the reducer, step by step like DistributedDataParallel."""
    power = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1.01)
    in_turn = ddp.CommHook(powerSGD_hook.powerSGD_hook, overlap=False)
    for state, hook in ((None, ddp.all_reduce_hook), (power, in_turn)):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            step(model, optimizer, slice(8 * rank, 8 * rank + 8))
            ddp.reduce_gradients(model.parameters(), state, hook, bucket_bytes=1000)
            optimizer.step()
        same_everywhere(list(model.parameters()))
        if state is None:
            close(list(model.parameters()), alone())


dist.init_process_group(
    "tensorferry", store=dist.FileStore(sys.argv[1], size), rank=rank, world_size=size, timeout=timedelta(seconds=60)
)
for name in sys.argv[4:]:
    globals()[name]()
    print("done", name, flush=True)
dist.barrier()
dist.destroy_process_group()
