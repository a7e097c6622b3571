"""The interface of vLLM 0.33.0 that tensorferry.integrations.vllm has to fit, for machines without vLLM: names,
signatures, abstract methods and the checks of the base classes, and nothing that computes."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

Init = TypeVar("Init")
Update = TypeVar("Update")
TrainerInit = TypeVar("TrainerInit")


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None


class WeightSource(ABC):
    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def owned_names(self, rank: int) -> list[str]:
        return [each.name for each in self.metadata if each.owners is None or rank in each.owners]

    def implements_iter_full(self) -> bool:
        return type(self).iter_full is not WeightSource.iter_full

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024, as there
    pass


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024
    pass


@dataclass
class TrainerInitInfo:
    backend: ClassVar[str]
    rank: int = field(kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not getattr(cls, "backend", None):
            raise TypeError(f"{cls.__name__} has no backend")

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class VLLMWeightSyncClient(Protocol):
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class WeightTransferEngine(ABC, Generic[Init, Update]):
    init_info_cls: type[Init]
    update_info_cls: type[Update]

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config

    def parse_init_info(self, fields: dict[str, Any]) -> Init:
        return self.init_info_cls(**fields)

    def parse_update_info(self, fields: dict[str, Any]) -> Update:
        return self.update_info_cls(**fields)

    def update_weights(self, fields: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(fields))

    @abstractmethod
    def init_transfer_engine(self, init_info: Init) -> None: ...
    @abstractmethod
    def start_weight_update(self) -> None: ...
    @abstractmethod
    def finish_weight_update(self) -> None: ...
    @abstractmethod
    def receive_weights(self, update_info: Update) -> None: ...
    @abstractmethod
    def shutdown(self) -> None: ...


class TrainerWeightTransferEngine(ABC, Generic[TrainerInit]):
    init_info_cls: type[TrainerInit]

    def __init__(
        self, *, client: Any, source: WeightSource | None = None, is_sender: bool = True, rank: int = 0
    ) -> None:
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank

    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info: TrainerInit, *, client: Any, source: WeightSource | None = None) -> Any: ...
    @abstractmethod
    def send_weights(self) -> None: ...
    def shutdown(self) -> None: ...


class _Factory:
    engines: dict[str, Callable[[], Any]]

    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: Any, class_name: str | None = None) -> None:
        if name in cls.engines:
            raise ValueError(f"{name} is registered")
        cls.engines[name] = lambda: getattr(importlib.import_module(module_path_or_cls), str(class_name))


class WeightTransferEngineFactory(_Factory):
    engines: ClassVar[dict[str, Callable[[], Any]]] = {}

    @classmethod
    def create_engine(cls, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> Any:
        return cls.engines[config.backend]()(config, vllm_config, device, model)


class WeightTransferTrainerFactory(_Factory):
    engines: ClassVar[dict[str, Callable[[], Any]]] = {}

    @classmethod
    def trainer_init(cls, init_info: TrainerInitInfo, *, client: Any, source: WeightSource | None = None) -> Any:
        return cls.engines[init_info.backend]().trainer_init(init_info=init_info, client=client, source=source)


def initialize_layerwise_reload(model: Any) -> None:
    model.reloads = True


def finalize_layerwise_reload(model: Any, model_config: Any) -> None:
    assert model.reloads, "finish without start"
    model.reloads = False


def modules() -> dict[str, types.ModuleType]:
    """The stub as vLLM's modules, by name."""
    here = sys.modules[__name__]
    loader = "vllm.model_executor.model_loader"
    names = ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer", "vllm.model_executor", loader)
    found = {name: types.ModuleType(name) for name in names}
    validation = types.ModuleType(f"{loader}.mtp_validation")
    validation.disable_mtp_completeness_check = contextlib.nullcontext  # type: ignore[attr-defined]
    return found | {
        "vllm.distributed.weight_transfer.base": here,
        "vllm.distributed.weight_transfer.factory": here,
        f"{loader}.reload": here,
        f"{loader}.mtp_validation": validation,
    }
