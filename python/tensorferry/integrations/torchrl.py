"""TorchRL's weight synchronisation over publications: a trainer publishes its policy, and workers load what changed.

The interface is that of TorchRL 0.14.1, ``torchrl.weight_update.WeightSyncScheme``.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Literal

try:
    from torchrl.weight_update.weight_sync_schemes import WeightSyncScheme, register_weight_sync_backend
except ImportError as _missing:
    raise ImportError(
        "tensorferry.integrations.torchrl needs TorchRL with weight_update: pip install 'torchrl>=0.14'"
    ) from _missing

from .. import errors
from ..published import Publication
from ..standalone import StandaloneAgent
from .torchrl_transport import RegionWeightTransport, by_name, weakly

__all__ = ["RegionWeightSyncScheme", "RegionWeightTransport"]

_log = logging.getLogger("tensorferry")


def _of_one_process() -> dict[str, Any]:
    """The attributes of a scheme that it does not take to another process."""
    nothing = ("_standalone", "_publication", "_published", "_connecting", "_initial", "_receiver_transport")
    return {**dict.fromkeys(nothing), "_workers": {}}


@register_weight_sync_backend("tensorferry")
class RegionWeightSyncScheme(WeightSyncScheme):  # type: ignore[misc] # TorchRL has no types here
    """A scheme for collectors, or for processes of one's own. It may be pickled, once it is initialised on the sender.

    ``send`` publishes a version, and returns when all workers have loaded it. A worker that has died is left out, and
    may join again. ``receive`` in a worker waits for a newer version. On the trainer's host a worker copies the blocks
    that have changed out of the trainer's memory; to another host they travel once.

    Args:
        strategy: as for TorchRL's own schemes.
        sync: False: ``send`` does not wait for the workers.
        timeout: of calls to workers, and of waits for the trainer at the beginning, in seconds.
        on_gpu: versions of tensors on a GPU stay there, as :meth:`tensorferry.Agent.publish` says: a worker of the
            trainer's host copies them from there to its own GPU.
        options: those of :class:`tensorferry.Agent` for the agents at both ends, such as ``interface``.

    Example::

        from tensorferry.integrations.torchrl import RegionWeightSyncScheme

        policy, copy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        trainer = RegionWeightSyncScheme()
        trainer.init_on_sender(model_id="policy", model=policy)
        worker = pickle.loads(pickle.dumps(trainer))  # as it goes to another process
        trainer.connect()
        worker.init_on_receiver(model_id="policy", model=copy, worker_idx=0)
        worker.connect()
        torch.nn.init.ones_(policy.weight)
        trainer.send()
        assert copy.weight.equal(policy.weight)
        worker.shutdown()
        trainer.shutdown()
    """

    _standalone: StandaloneAgent | None
    _publication: Publication | None
    _published: threading.Event | None  # set when there is something to subscribe to
    _connecting: threading.Lock | None  # held until the worker has the first version
    _workers: dict[int, str]

    def __init__(
        self,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        *,
        sync: bool = True,
        timeout: float = 60.0,
        on_gpu: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(strategy)
        self.sync = sync
        self.timeout = timeout
        self.on_gpu = on_gpu
        self._options = options
        self._trainer = b""  # the address of the trainer's agent: travels with the scheme
        self.__dict__.update(_of_one_process())

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **_of_one_process()}

    def _begin(self, role: str) -> StandaloneAgent:
        self._standalone = StandaloneAgent(f"torchrl-{role}-{uuid.uuid4().hex}", **self._options)
        return self._standalone

    def create_transport(self, **kwargs: Any) -> RegionWeightTransport:
        """Returns the receiving end of a subscription, ``subscription=``."""
        return RegionWeightTransport(kwargs["subscription"])

    # ---- in the trainer

    def _init_on_sender_impl(
        self, *, model_id: str = "policy", context: Any = None, model: Any = None, weights: Any = None, **_: Any
    ) -> None:
        self.model_id, self.context, self.model, self._initial = model_id, context, model, weights
        self._published = threading.Event()
        standalone = self._begin("trainer")
        standalone.agent.expose(weakly(self._join), name="join")
        self._trainer = standalone.address

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        self._publish(self._initial if weights is None else weights)

    def _publish(self, weights: Any, changed: Mapping[str, Any] | Iterable[str] | None = None) -> None:
        assert self._standalone is not None and self._published is not None
        weights = self.prepare_weights(weights, self.model_id, self._strategy, self.context)
        if weights is None:
            weights = self._strategy.extract_weights(self.model)
        if self._publication is None:
            publish = self._standalone.agent.publish
            self._publication = publish(by_name(weights), name=str(self.model_id), on_gpu=self.on_gpu)
            self._published.set()
        else:
            self._publication.update(by_name(weights), changed=changed)

    def _join(self, worker: int, address: bytes) -> None:
        """A worker's call: returns when there is something to subscribe to."""
        assert self._standalone is not None and self._published is not None
        if not self._published.wait(self.timeout):
            raise errors.DeadlineExceeded("the trainer has not called connect()")
        self._workers[worker], _ = self._standalone.introduce(address)

    def send(
        self,
        weights: Any = None,
        worker_ids: int | list[int] | None = None,
        *,
        changed: Mapping[str, Any] | Iterable[str] | None = None,
    ) -> None:
        """Publishes the weights, and lets workers load them.

        Args:
            weights: None: those of the model. Or a module, a TensorDict, or a state_dict.
            worker_ids: which workers to call; None: all that have joined. Others load it with :meth:`receive`.
            changed: what may differ from the last version, by the names of a state_dict, as for
                :meth:`tensorferry.published.Publication.update`. None: all is compared.

        Raises:
            RuntimeError: before ``connect``. ValueError: no such worker has joined. InvalidArgument: ``changed`` names
            a tensor or a row that is not there. What a worker raises.
        """
        if self._publication is None or self._standalone is None:
            raise RuntimeError("init_on_sender() and connect() come before send()")
        known = dict(self._workers)
        wanted = list(known) if worker_ids is None else [worker_ids] if isinstance(worker_ids, int) else worker_ids
        if strangers := [worker for worker in wanted if worker not in known]:
            raise ValueError(f"workers that have not joined, or have died: {strangers}")
        self._publish(weights, changed)
        call = self._standalone.agent.rpc_async
        calls = [(worker, call(known[worker], "load", timeout=self.timeout, idempotent=True)) for worker in wanted]
        for worker, loaded in calls if self.sync else ():
            try:
                loaded.wait()
            except errors.ConnectionLost as error:
                if self._workers.get(worker) == known[worker]:  # it has not joined again
                    del self._workers[worker]
                self._standalone.forget(known[worker])
                _log.warning("worker %d gets no more weights until it joins again: %s", worker, error)

    # ---- in a worker

    def _init_on_receiver_impl(
        self, *, model_id: str, context: Any = None, model: Any = None, worker_idx: int | None = None, **_: Any
    ) -> None:
        if not self._trainer:
            raise RuntimeError("init_on_sender() comes before the scheme goes to a worker")
        self.model_id, self.context, self.model = model_id, context, model
        self.worker_idx = getattr(context, "worker_idx", None) if worker_idx is None else worker_idx
        self._connecting = threading.Lock()

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        worker = self._worker_idx if worker_idx is None else worker_idx
        if worker is None or self._connecting is None:
            raise RuntimeError("a worker has a number: worker_idx=")
        standalone = self._begin("worker")
        trainer, _ = standalone.introduce(self._trainer)
        standalone.agent.expose(weakly(self._load), name="load")
        with self._connecting:
            standalone.agent.rpc_sync(trainer, "join", args=(worker, standalone.address), timeout=self.timeout)
            subscription = standalone.agent.subscribe(str(self.model_id), from_=trainer)
            self._receiver_transport = self.create_transport(subscription=subscription)
            self.receive(timeout=0)

    def _load(self) -> None:
        """The trainer's call."""
        assert self._connecting is not None
        with self._connecting:  # the transport is there
            pass
        self.receive(timeout=0)

    def shutdown(self) -> None:
        """Leaves. In the trainer it ends the publication; workers keep the weights that they have."""
        super().shutdown()
        standalone, self._standalone = getattr(self, "_standalone", None), None
        if standalone is not None:
            standalone.leave()
