"""Data-parallel training on a group: communication hooks, which say what is done with a bucket of gradients.

A hook is a function ``hook(state, bucket)`` that returns a future of one tensor. The same hook is used in two ways:
``network.register_comm_hook(state, hook)`` of torch's ``DistributedDataParallel``, and :func:`reduce_gradients`, which
needs no process group of ``torch.distributed``. Buckets are ``torch.distributed.GradBucket`` in both.

- :func:`all_reduce_hook`, :func:`half_hook` and :func:`bfloat16_hook` average over a group.
- :class:`CommHook` makes a hook of a function of one's own. torch's hooks, such as ``powerSGD_hook``, work too.
"""

# Annotations here are no texts: DistributedDataParallel compares those of a hook with the types.

from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import GradBucket

from . import _C, errors
from .c10d import group_of
from .collectives import Group, Work

__all__ = [
    "GradBucket",
    "CommHook",
    "all_reduce_hook",
    "half_hook",
    "bfloat16_hook",
    "reduce_gradients",
    "broadcast_coalesced",
]

S = TypeVar("S")
TensorFuture: TypeAlias = torch.futures.Future[torch.Tensor]
AnyGroup: TypeAlias = Group | dist.ProcessGroup | None

BUCKET_BYTES = 25 << 20  # as DistributedDataParallel's


def _group(given: AnyGroup) -> _C.Group:
    if isinstance(given, Group):
        return given._group
    try:
        return group_of(given)._group
    except KeyError:
        raise errors.InvalidArgument(
            "the process group has another backend than tensorferry: pass a tensorferry.collectives.Group, "
            'or call init_process_group("tensorferry")'
        ) from None


# ---- hooks in Python


def _future_of(answer: Any, device: torch.device) -> "torch._C.Future[Any]":
    """Returns a future for what a hook's function has returned, for gradients on ``device``."""
    if isinstance(answer, torch._C.Future):
        return answer
    if isinstance(answer, dist.Work):
        return answer.get_future()
    on_cpu = device.type == "cpu"
    future: torch.futures.Future[Any] = torch.futures.Future(devices=None if on_cpu else [device])
    if not isinstance(answer, Work):
        future.set_result(answer)
    elif on_cpu:
        answer._on_done(lambda: future.set_result(answer))  # also after an error, which wait() raises
    else:
        answer._on_done(lambda: _hand_over(answer, future))
    return future


def _hand_over(work: Work[Any], future: "torch.futures.Future[Any]") -> None:
    """Completes the future of an operation that has ended on a device: its users wait for what this thread's current
    stream waits for."""
    try:
        result = work.wait()
    except Exception as error:
        future.set_exception(error)  # type: ignore[arg-type]
    else:
        future.set_result(result)


def _one_tensor(value: Any, elements: int) -> torch.Tensor:
    """Returns the one tensor of a hook's result. It has as many elements as the bucket."""
    if isinstance(value, Work):
        value = value.wait()
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, torch.Tensor):
        kind = f"{type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__
        raise TypeError(f"its result is a {kind}; return one tensor, or a future of one")
    if value.numel() != elements:
        raise ValueError(f"its result has {value.numel()} elements, and the bucket has {elements}; return as many")
    return value


class CommHook(Generic[S]):
    """Makes a communication hook of a function, also as a decorator.

    The function gets the hook's state and a bucket. It starts what it does with the gradients ``bucket.buffer()`` and
    returns at once: a future of torch's or of a call, the work of a group or of ``torch.distributed``, or the result
    itself. The result is one tensor, or a list of one, of as many elements as the buffer; often it is the buffer. It
    becomes the gradients of the bucket's parameters. The function is called on the thread of the backward pass, in the
    same order at every rank.

    Args:
        function: the function. Its name is the hook's in errors.
        overlap: False: each bucket's result is there before the next bucket's hook starts. A hook needs that if it
            starts operations of a group in callbacks of its futures, as ``powerSGD_hook`` does, and there are several
            buckets. Otherwise those operations and the next bucket's may start in another order at each rank.

    Raises:
        RuntimeError: from the training step, if the function, its future or the check of its result fails. The text
            names the hook and the bucket.

    Example::

        @tensorferry.ddp.CommHook
        def clipped(group, bucket):
            return group.all_reduce(bucket.buffer().clamp_(-1, 1), "average")

        group = tensorferry.collectives.form_group(["worker0"])
        weights = torch.zeros(3, requires_grad=True)
        (weights * torch.tensor([0.5, 2.0, -3.0])).sum().backward()
        tensorferry.ddp.reduce_gradients([weights], group, clipped)
        assert weights.grad.tolist() == [0.5, 1.0, -1.0]
    """

    def __init__(self, function: Callable[[S, GradBucket], Any], *, overlap: bool = True) -> None:
        self._function = function
        self._overlap = overlap
        self._name = getattr(function, "__qualname__", type(function).__qualname__)
        update_wrapper(self, function)  # DistributedDataParallel logs __qualname__
        self.__dict__.pop("__wrapped__", None)  # its signature is that of __call__, whatever the function returns
        self.__qualname__ = self.__name__ = self._name

    def __call__(self, state: S, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        index, elements = bucket.index(), bucket.buffer().numel()
        try:
            future = _future_of(self._function(state, bucket), bucket.buffer().device)
            if not self._overlap:
                future.wait()
        except Exception as error:
            raise self._failed(index, error) from error

        def parse(done: Any) -> torch.Tensor:
            try:
                return _one_tensor(done.value(), elements)
            except Exception as error:
                raise self._failed(index, error) from error

        parsed: TensorFuture = future.then(parse)  # type: ignore[assignment]
        return parsed

    def _failed(self, index: int, error: Exception) -> RuntimeError:
        return RuntimeError(f'the hook "{self._name}" failed at bucket {index}: {type(error).__name__}: {error}')


# ---- hooks over a group, in C++


def _start(name: str, state: AnyGroup, bucket: GradBucket) -> TensorFuture:
    future: Any = _C.run_group_hook(_group(state), name, bucket)
    return cast(TensorFuture, future)


def all_reduce_hook(state: AnyGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook that averages the gradients over a group, in place.

    Args:
        state: the group, or a process group of the backend ``tensorferry``; None: the default process group.
        bucket: the bucket.

    Raises:
        InvalidArgument: the process group has another backend.
        RuntimeError: from the training step, if the operation fails. The text names the hook and the bucket. It is
            ``torch.distributed.DistBackendError`` in ``DistributedDataParallel``, and the error of the group, such as
            ``ConnectionLost``, in :func:`reduce_gradients`.

    Example::

        group = tensorferry.collectives.form_group(["worker0"])
        network = torch.nn.Linear(4, 2)
        network(torch.ones(4)).sum().backward()
        tensorferry.ddp.reduce_gradients(network.parameters(), group, tensorferry.ddp.all_reduce_hook)
    """
    return _start("all_reduce", state, bucket)


def half_hook(state: AnyGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook that averages the gradients over a group as float16, which halves the bytes of float32 that travel.

    The sum is accumulated in float32 and rounded once. Gradients beyond 65504 become infinite.

    Args:
        state: as that of :func:`all_reduce_hook`.
        bucket: the bucket.

    Raises:
        RuntimeError: as :func:`all_reduce_hook`.

    Example::

        group = tensorferry.collectives.form_group(["worker0"])
        network = torch.nn.Linear(4, 2)
        network(torch.ones(4)).sum().backward()
        tensorferry.ddp.reduce_gradients(network.parameters(), group, tensorferry.ddp.half_hook)
    """
    return _start("half", state, bucket)


def bfloat16_hook(state: AnyGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook that averages the gradients over a group as bfloat16, which has the range of float32.

    The sum is accumulated in float32 and rounded once.

    Args:
        state: as that of :func:`all_reduce_hook`.
        bucket: the bucket.

    Raises:
        RuntimeError: as :func:`all_reduce_hook`.

    Example::

        group = tensorferry.collectives.form_group(["worker0"])
        network = torch.nn.Linear(4, 2)
        network(torch.ones(4)).sum().backward()
        tensorferry.ddp.reduce_gradients(network.parameters(), group, tensorferry.ddp.bfloat16_hook)
    """
    return _start("bfloat16", state, bucket)


# ---- without DistributedDataParallel

_NAMES_ITSELF = (all_reduce_hook, half_hook, bfloat16_hook)  # in errors


def reduce_gradients(
    parameters: Iterable[torch.Tensor],
    state: S,
    hook: Callable[[S, GradBucket], torch.futures.Future[torch.Tensor]],
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Reduces the gradients of parameters by a hook, without ``DistributedDataParallel``: call it after ``backward()``.

    It fills buckets from the gradients, in the order of the parameters, runs the hook on each, two in flight, and
    copies the results into the gradients. It blocks until all have ended; on a GPU, the gradients are then valid in
    the order of the current stream. A parameter without a gradient counts as one with zeros, and has a gradient
    afterwards; one that requires none is left out. Every rank has the same parameters.

    Args:
        parameters: dense tensors of the CPU or of a GPU.
        state: the first argument of the hook.
        hook: one of this module's or torch's, a :class:`CommHook`, or a function that would do for one.
        bucket_bytes: the most bytes of a bucket, unless a single gradient is larger. A bucket has one dtype and device.

    Raises:
        InvalidArgument: a parameter is not a dense tensor, or a gradient is sparse.
        RuntimeError: the hook has failed; the text names the hook and the bucket. Some gradients may have been reduced,
            so do not step the optimiser.

    Example::

        group = tensorferry.collectives.form_group(["worker0"])
        network = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        network(torch.ones(4)).sum().backward()
        tensorferry.ddp.reduce_gradients(network.parameters(), group, tensorferry.ddp.all_reduce_hook)
        optimizer.step()
    """
    named: Callable[[Any, GradBucket], TensorFuture] = hook
    if not isinstance(hook, CommHook) and hook not in _NAMES_ITSELF:
        named = CommHook(hook)
    _C.reduce_gradients(list(parameters), lambda bucket: named(state, bucket), bucket_bytes)


def broadcast_coalesced(
    group: AnyGroup,
    tensors: Iterable[torch.Tensor],
    root: int = 0,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    timeout: float | None = None,
) -> None:
    """Copies the tensors of rank ``root`` into those of every other rank, in buckets, of which two are in flight.

    Blocks until all have arrived. A network's parameters can be given as they are.

    Args:
        group: the group, or a process group of the backend ``tensorferry``; None: the default process group.
        tensors: the same number, shapes and dtypes at every rank; strided ones too.
        root: the rank that gives.
        bucket_bytes: the most bytes of a bucket, unless a single tensor is larger. A bucket has one dtype.
        timeout: seconds for each bucket; None: the group's.

    Raises:
        InvalidArgument: a tensor is not dense, or the ranks gave different tensors. Other errors are
            those of :meth:`tensorferry.collectives.Work.wait`. After an error some tensors may have arrived.

    Example::

        group = tensorferry.collectives.form_group(["worker0"])
        network = torch.nn.Linear(4, 2)
        tensorferry.ddp.broadcast_coalesced(group, network.state_dict().values())
    """
    _C.broadcast_coalesced(_group(group), list(tensors), root, bucket_bytes, timeout)
