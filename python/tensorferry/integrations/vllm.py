"""vLLM's weight transfer over publications: a trainer publishes its weights, and the inference workers load them.

The interface is that of vLLM 0.33.0, ``vllm.distributed.weight_transfer``. The wheel has the entry point by which vLLM
registers the backend ``"tensorferry"`` in each of its processes. A trainer's side is::

    register()
    source = vllm.distributed.weight_transfer.ModuleSource(model)
    trainer = WeightTransferTrainerFactory.trainer_init(RegionTrainerInfo(rank=0), client=client, source=source)
    trainer.send_weights()
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

try:
    from vllm.distributed.weight_transfer import base
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
except ImportError as _missing:
    raise ImportError(
        "tensorferry.integrations.vllm needs vLLM with vllm.distributed.weight_transfer: pip install 'vllm>=0.33'"
    ) from _missing

from ..published import Loader, Publication, Subscription
from ..standalone import StandaloneAgent

__all__ = ["RegionInitInfo", "RegionTrainer", "RegionTrainerInfo", "RegionUpdateInfo", "RegionWorker", "register"]

NAME = "tensorferry"


@dataclass
class RegionInitInfo(base.WeightTransferInitInfo):  # type: ignore[misc] # vLLM is not there when types are checked
    """What a worker subscribes to: a publication of the agent with the address ``trainer``. ``tensors``: if versions
    are on the trainer's GPU, the dtype and the shape of each."""

    trainer: str
    publication: str
    tensors: dict[str, tuple[str, list[int]]] | None = None


@dataclass
class RegionUpdateInfo(base.WeightTransferUpdateInfo):  # type: ignore[misc]
    """The number of the version that a worker is to load."""

    version: int


@dataclass
class RegionTrainerInfo(base.TrainerInitInfo):  # type: ignore[misc]
    """Of a trainer's rank: ``rank`` (0 publishes), a name for the weights, whether workers compare checksums.

    With ``on_gpu`` versions stay on the GPU of rank 0, which takes its memory for all of a version 2 to 3 times beside
    what was gathered. Each worker then loads versions by way of a copy on its own GPU, to which only changed blocks go.
    """

    backend: ClassVar[str] = NAME
    publication: str = "weights"
    checksums: bool = False
    on_gpu: bool = False


class RegionWorker(base.WeightTransferEngine):  # type: ignore[misc]
    """The end in an inference worker. It loads each version whole, in the format of checkpoints.

    On the trainer's host it reads the trainer's memory. On another host, the workers fetch the blocks that have changed
    once, and share them. So the model's ``load_weights`` must not write the tensors that it gets.
    """

    init_info_cls = RegionInitInfo
    update_info_cls = RegionUpdateInfo

    _standalone: StandaloneAgent | None = None
    _subscription: Subscription | None = None
    _init: RegionInitInfo | None = None
    _staged: dict[str, torch.Tensor] | None = None  # the copy of a version that is on the trainer's GPU
    _loader: Loader | None = None

    def init_transfer_engine(self, init_info: RegionInitInfo) -> None:
        """Notes where the trainer is. Another trainer's call replaces the first. Raises InvalidArgument: no address."""
        if self._standalone is None:
            self._standalone = StandaloneAgent(f"vllm-worker-{uuid.uuid4().hex}")
        self._standalone.introduce(init_info.trainer.encode("ascii"))
        self._init, self._subscription, self._staged, self._loader = init_info, None, None, None

    def start_weight_update(self) -> None:
        """Prepares the model for weights in the format of checkpoints, layer by layer."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: RegionUpdateInfo) -> None:
        """Loads a version, or a newer one, into the model.

        Raises:
            RuntimeError: :meth:`init_transfer_engine` comes first. ConnectionLost: the trainer has died. NotFound: it
            has shut down. DeadlineExceeded.
        """
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        if self._standalone is None or self._init is None:
            raise RuntimeError("init_transfer_engine comes before the first update")
        if self._subscription is None:
            trainer, _ = self._standalone.introduce(self._init.trainer.encode("ascii"))
            self._subscription = self._standalone.agent.subscribe(self._init.publication, from_=trainer)
        weights: Mapping[str, torch.Tensor]
        if self._init.tensors is None:
            weights = self._subscription.wait(newer_than=update_info.version - 1)
        else:
            weights = self._load_to_device(self._subscription, self._init.tensors, update_info.version)
        with disable_mtp_completeness_check():
            self.model.load_weights(weights.items())

    def _load_to_device(
        self, subscription: Subscription, tensors: dict[str, tuple[str, list[int]]], version: int
    ) -> dict[str, torch.Tensor]:
        """Brings the copy on this worker's device to a version, or a newer one."""
        if self._staged is None or self._loader is None:
            self._staged = {
                name: torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                for name, (dtype, shape) in tensors.items()
            }
            self._loader = subscription.into(self._staged)
        while self._loader.version < version:
            self._loader.wait()
        return self._staged

    def finish_weight_update(self) -> None:
        """Ends the update: the model is ready for inference."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leaves. The worker goes on with the weights that it has."""
        self._subscription = self._init = self._staged = self._loader = None
        if self._standalone is not None:
            self._standalone.leave()
            self._standalone = None


class RegionTrainer(base.TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's end. Make it with ``WeightTransferTrainerFactory.trainer_init`` on each rank; rank 0 owns all
    parameters, and publishes."""

    init_info_cls = RegionTrainerInfo

    def __init__(
        self, init_info: RegionTrainerInfo, client: base.VLLMWeightSyncClient, source: base.WeightSource
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        self._init = init_info
        self._staged: dict[str, torch.Tensor] = {}
        self._publication: Publication | None = None
        self._standalone = StandaloneAgent(f"vllm-trainer-{uuid.uuid4().hex}") if self.is_sender else None

    @classmethod
    def trainer_init(
        cls, init_info: RegionTrainerInfo, *, client: base.VLLMWeightSyncClient, source: base.WeightSource | None = None
    ) -> RegionTrainer:
        """Makes the engine, and tells the workers where it is.

        Raises:
            ValueError: no source, or rank 0 does not own all parameters. TypeError: a source without ``iter_full``.
        """
        if source is None:
            raise ValueError(f"backend {NAME!r} publishes a WeightSource: source= is missing")
        if not source.implements_iter_full():
            raise TypeError(f"backend {NAME!r} publishes full tensors: {type(source).__name__} has no iter_full()")
        if init_info.is_sender and len(source.owned_names(init_info.rank)) != len(source.metadata):
            raise ValueError(f"backend {NAME!r} publishes from rank 0, which does not own all parameters")
        engine = cls(init_info, client, source)
        if engine._standalone is not None:
            told: dict[str, Any] = {"trainer": engine._standalone.address.decode("ascii")}
            if init_info.on_gpu:
                forms = {each.name: (str(each.dtype).split(".")[-1], list(each.shape)) for each in source.metadata}
                told["tensors"] = forms
            client.init_weight_transfer_engine(told | {"publication": init_info.publication})
        return engine

    def send_weights(self, changed: Mapping[str, Any] | Iterable[str] | None = None) -> None:
        """Publishes the next version, and returns when all workers have loaded it. All ranks call it.

        Args:
            changed: what may differ from the last version, as for :meth:`tensorferry.published.Publication.update`.
                Other tensors are not copied to the host. None: all is compared.

        Raises:
            InvalidArgument: ``changed`` names a tensor or a row that is not there. ResourceExhausted: workers hold all
            the versions that the publication has memory for. What the client raises if a worker fails.
        """
        if changed is not None and not isinstance(changed, Mapping):
            changed = dict.fromkeys(changed, ...)
        wanted = None if self._publication is None or self._init.on_gpu else changed
        weights: dict[str, torch.Tensor] = {}
        for name, tensor in self.source.iter_full():  # on each rank: it may gather
            if self._standalone is None or (wanted is not None and name not in wanted):
                continue
            weights[name] = tensor.detach() if self._init.on_gpu else self._on_host(name, tensor.detach())
        if self._standalone is None:
            return
        if self._publication is None:
            self._publication = self._standalone.agent.publish(
                weights, name=self._init.publication, checksums=self._init.checksums, on_gpu=self._init.on_gpu
            )
        else:
            self._publication.update(weights, changed=changed)
        self.client.start_weight_update()
        self.client.update_weights({"version": self._publication.version})
        self.client.finish_weight_update()

    def _on_host(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, or a copy of it on the host, so that a GPU never has to hold all that was gathered."""
        if tensor.is_cpu:
            return tensor
        kept = self._staged.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = self._staged[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return kept.copy_(tensor)

    def shutdown(self) -> None:
        """Ends the publication, and leaves. Workers keep the weights that they have."""
        if self._standalone is not None:
            self._standalone.leave()


def register() -> None:
    """Registers the backend at both of vLLM's factories. The entry point calls it in each process of vLLM; a trainer
    without vLLM's plugins calls it itself. The second time it does nothing."""
    with contextlib.suppress(ValueError):  # it is registered
        WeightTransferEngineFactory.register_engine(NAME, __name__, "RegionWorker")
        WeightTransferTrainerFactory.register_engine(NAME, __name__, "RegionTrainer")
