"""The receiving end of torchrl.py: copies of the newest version into a worker's model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

from .. import errors
from ..published import Loader, Subscription

__all__ = ["RegionWeightTransport", "by_name", "weakly"]


def by_name(weights: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors themselves, by the names that a state_dict has."""
    if isinstance(weights, TensorDictBase):
        weights = weights.data.flatten_keys(".").to_dict()
    return {str(name): tensor.detach() for name, tensor in weights.items()}


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Lets an agent call a method without keeping its object alive."""
    known = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = known()
        if bound is None:
            raise errors.NotFound("the weight synchronisation scheme is no longer there")
        return bound(*args)

    return call


class RegionWeightTransport:
    """The receiving end: brings a model to the newest version. Thread-safe."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._lock = threading.Lock()
        self._model: Any = None
        self._target: Any = None
        self._has_extra_state = False
        self._loader: Loader | None = None

    def send_weights(self, weights: Any) -> None:
        """Raises RuntimeError: a worker receives."""
        raise RuntimeError("a worker's end of RegionWeightSyncScheme receives weights")

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """Waits for a version that the model does not have yet, and loads it. Returns the weights; None: none came.

        Raises:
            ConnectionLost: the trainer has died. NotFound: it has shut down.
        """
        with self._lock:
            if self._loader is None or model is not self._model:
                self._plan(weights, model, strategy)
            assert self._loader is not None
            before = self._loader.version
            try:
                if timeout == 0:
                    self._loader.load()
                else:
                    self._loader.wait(timeout or 0)
            except errors.DeadlineExceeded:
                return None
            if self._loader.version == before:
                return None
            if self._has_extra_state:
                (strategy or WeightStrategy()).apply_weights(model, self._target)
            return self._target

    def _plan(self, weights: Any, model: Any, strategy: WeightStrategy | None) -> None:
        tensors = by_name(weights)
        if any(tensor.is_meta for tensor in tensors.values()):  # a collector gives its workers policies without memory
            strategy = strategy or WeightStrategy()
            empty = {name: torch.empty_like(each, device="cpu") for name, each in tensors.items()}
            strategy.apply_weights(model, TensorDict(empty).unflatten_keys("."), inplace=False)
            weights = strategy.extract_weights(model)
            tensors = by_name(weights)
        self._model, self._target = model, weights
        self._has_extra_state = any(name.startswith("__extra_state__.") for name in tensors)
        self._loader = self._subscription.into(tensors)
