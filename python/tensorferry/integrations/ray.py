"""Ray Direct Transport over regions: tensors of an actor stay in its memory, and other actors read them from there.

The interface is that of Ray 2.60.0, ``ray.experimental.register_tensor_transport``, which is alpha there.
"""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

try:
    from ray.experimental import register_tensor_transport
    from ray.experimental.rdt.tensor_transport_manager import (
        CommunicatorMetadata,
        TensorTransportManager,
        TensorTransportMetadata,
    )
except ImportError as _missing:
    raise ImportError(
        "tensorferry.integrations.ray needs Ray with ray.experimental.rdt: pip install 'ray>=2.60'"
    ) from _missing

from .. import gpu_regions
from ..regions import Region, form_of, read_regions, tensor_form
from ..standalone import StandaloneAgent

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from ..regions import OwnRegion

__all__ = ["RegionMetadata", "RegionTensorTransport", "register"]

NAME = "TENSORFERRY"


@dataclass
class RegionMetadata(TensorTransportMetadata):  # type: ignore[misc] # Ray has no types here
    """What Ray carries from the owner of an object to its readers.

    Args:
        owner: the address of the owner's agent.
        regions: for each tensor the number of its region, and its dtype, sizes and strides.
    """

    owner: bytes = b""
    regions: list[tuple[int, str]] = field(default_factory=list)


class RegionTensorTransport(TensorTransportManager):  # type: ignore[misc]
    """The transport: Ray makes one in each process. Its agent joins with the first object that it owns or reads.

    The tensors of an object are dense, and on the CPU or on CUDA devices. Readers get copies. A read of an object whose
    owner has died raises ConnectionLost; of one that was freed, NotFound.
    """

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self._lock = threading.Lock()  # Ray calls from the task's thread and from its own
        self._standalone: StandaloneAgent | None = None
        self._owned: dict[str, list[OwnRegion]] = {}

    def _own_agent(self) -> StandaloneAgent:
        with self._lock:
            if self._standalone is None:
                self._standalone = StandaloneAgent(f"ray-{uuid.uuid4().hex}", **self.options)
            return self._standalone

    def tensor_transport_backend(self) -> str:
        """Returns the name for ``@ray.method(tensor_transport=...)``, in the form that Ray stores."""
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        """Returns True: the reader alone acts."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """Returns True, so that Ray kills no actor if a read fails."""
        return True

    def actor_has_tensor_transport(self, actor: ActorHandle) -> bool:
        """Returns True: Ray has imported this module in the actor when it registered the transport there."""
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[torch.Tensor]) -> RegionMetadata:
        """Makes the tensors of a new object regions. Waits for the streams that write them.

        Raises:
            ValueError: tensors of several kinds of devices. InvalidArgument: one with gaps.
        """
        kinds = {tensor.device.type for tensor in rdt_object}
        if len(kinds) > 1:
            raise ValueError(f"the tensors of one object are on one kind of device, not on {', '.join(sorted(kinds))}")
        gpu_regions.wait_for_tensors(rdt_object)
        standalone = self._own_agent()
        with self._lock:
            regions = self._owned.get(obj_id)  # Ray asks again if a task's answer was lost
            if regions is None:
                regions = []
                try:
                    for tensor in rdt_object:
                        regions.append(standalone.agent.region(tensor))
                except BaseException:
                    for region in regions:
                        region.drop()
                    raise
                self._owned[obj_id] = regions
        return RegionMetadata(
            [(tensor.shape, tensor.dtype) for tensor in rdt_object],
            kinds.pop() if kinds else None,
            standalone.address,
            [(region._id, form_of(region.tensor)) for region in regions],
        )

    def get_communicator_metadata(
        self, src_actor: ActorHandle | None, dst_actor: ActorHandle | None, backend: str | None = None
    ) -> CommunicatorMetadata:
        """Returns nothing of interest: the object's metadata tells all that a reader needs."""
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: RegionMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Reads the tensors of an object from its owner's memory, into ``target_buffers``, or into new ones on the
        owner's kind of device, or on the CPU if this process has no GPU.

        Raises:
            ConnectionLost: the owner has died. NotFound: it has freed the object. DeadlineExceeded.
        """
        described = tensor_transport_metadata
        kind = "cuda" if described.tensor_device == "cuda" and torch.cuda.is_available() else "cpu"
        outs = target_buffers or [
            torch.empty(shape, dtype=dtype, device=kind) for shape, dtype in described.tensor_meta
        ]
        standalone = self._own_agent()
        owner, incarnation = standalone.introduce(described.owner)
        regions = [
            Region(owner, incarnation, number, tensor_form(form), standalone.agent)
            for number, form in described.regions
        ]
        read_regions(regions, outs)
        return outs

    def send_multiple_tensors(
        self,
        tensors: list[torch.Tensor],
        tensor_transport_metadata: RegionMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        """Raises NotImplementedError: Ray does not call it, since the transport is one-sided."""
        raise NotImplementedError("readers of a tensorferry object read it themselves")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: RegionMetadata, tensors: list[torch.Tensor]) -> None:
        """Drops the regions of an object, at its owner: reads that are under way raise NotFound."""
        with self._lock:
            regions = self._owned.pop(obj_id, [])
        for region in regions:
            region.drop()

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Does nothing: a read ends by itself when its owner dies, or at the agent's time-out."""


def register(**options: Any) -> None:
    """Registers the transport ``"tensorferry"`` in this process. Call it once, before the actors are made.

    Args:
        options: those of :class:`tensorferry.Agent` for the agents of all actors, such as ``timeout`` or ``interface``.
            Keys belong in ``TENSORFERRY_KEY_FILE`` on each node instead, because Ray stores the options.

    Raises:
        ValueError: it is registered.

    Example::

        from tensorferry.integrations.ray import register

        register()

        @ray.remote(enable_tensor_transport=True)
        class Trainer:
            @ray.method(tensor_transport="tensorferry")
            def weights(self):
                return torch.ones(4)

        assert ray.get(Trainer.remote().weights.remote()).sum() == 4
    """
    kind = type("RegionTensorTransport", (RegionTensorTransport,), {"options": options})  # Ray pickles it by value
    register_tensor_transport(NAME, ["cpu", "cuda"], kind, torch.Tensor)
