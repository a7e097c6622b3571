"""A server that averages the gradients of several trainers, and the communication hook that hands them to it."""

# Annotations here are no texts: DistributedDataParallel compares those of a hook with the types.

import threading
from typing import Any, TypeAlias

import tensorferry
import tensorferry.rpc as rpc
import torch
from tensorferry import ddp, errors

TensorFuture: TypeAlias = torch.futures.Future[torch.Tensor]


class GradientServer:
    """Averages buckets of gradients. Trainers hold it by a remote reference.

    It keeps a sum for each bucket that some trainers have handed over and others not. Every trainer hands over each
    bucket once a step. Gradients are added in the order in which they come, so the last bits can differ from run to
    run; all trainers get the same bits. After an error make a new one.
    """

    def __init__(self, trainers: int) -> None:
        if trainers < 1:
            raise ValueError("a server needs at least one trainer")
        self._trainers = trainers
        self._lock = threading.Lock()
        self._rounds: dict[int, tuple[torch.Tensor, list[TensorFuture]]] = {}  # by bucket: the sum, and who waits

    @rpc.functions.async_execution
    def average(self, index: int, gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Adds one trainer's gradients of bucket ``index``. The future has the average once all trainers have called.

        It raises InvalidArgument for all of them if their gradients have different shapes or dtypes.
        """
        device = gradients.device
        answer: TensorFuture = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
        with self._lock, tensorferry.on_default_stream(device):
            total, waiting = self._rounds.setdefault(index, (torch.zeros_like(gradients), []))
            waiting.append(answer)
            alike = (total.shape, total.dtype) == (gradients.shape, gradients.dtype)
            if alike:
                total += gradients
            complete = not alike or len(waiting) == self._trainers
            if complete:
                del self._rounds[index]
                if alike:
                    total /= self._trainers
        if complete:  # answers every trainer that waits, without the lock
            difference = errors.InvalidArgument(
                f"bucket {index} is {list(gradients.shape)} {gradients.dtype} at one trainer, and "
                f"{list(total.shape)} {total.dtype} at another: all need the same model and bucket size"
            )
            for each in waiting:
                if alike:
                    each.set_result(total)
                else:
                    each.set_exception(difference)  # type: ignore[arg-type]
        return answer


@ddp.CommHook
def gradient_server_hook(state: Any, bucket: ddp.GradBucket) -> Any:
    """Hands the bucket to a server; ``state`` is a remote reference to it. Trainers need no group."""
    return state.rpc_async().average(bucket.index(), bucket.buffer())
