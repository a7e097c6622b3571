"""Published versions: a set of tensors that one agent updates and many read, never torn.

:meth:`Agent.publish` with a name begins a publication; :meth:`Agent.subscribe` reads it. docs/regions.md says what each
failure does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch

from . import _C, errors, gpu_regions, gpu_versions
from .regions import _seconds, form_of, service_of, tensor_form

if TYPE_CHECKING:
    from .agent import Agent

__all__ = ["Loader", "Publication", "Subscription", "Version"]

Tensors = Mapping[str, torch.Tensor]


def _tensors_of(state: Tensors | torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors = state.state_dict() if isinstance(state, torch.nn.Module) else state
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a publication has tensors by name, not {name!r}: {type(tensor).__name__}")
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _check_size(name: str, form: torch.Tensor, nbytes: int) -> None:
    if form.nbytes != nbytes:
        raise errors.ProtocolError(f"the publisher described {name!r} as another size than it has")


def _forms_of(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Returns the forms that the tensors have in an image: without gaps."""
    return {key: form_of(torch.empty(each.shape, dtype=each.dtype, device="meta")) for key, each in tensors.items()}


def _look(changed: Mapping[str, Any], pieces: list[tuple[str, str, int, int]], block: int, blocks: int) -> torch.Tensor:
    """Returns a byte for each block of an image: 1 if it holds a row that may have changed.

    Args:
        changed: the rows by name: ``...``, a slice, or what :func:`torch.as_tensor` makes indices or a mask of.
        pieces: of the image: name, form, offset and size in bytes.
    """
    marks = torch.zeros(blocks, dtype=torch.uint8)
    for name, form, offset, nbytes in pieces:
        if name not in changed or nbytes == 0:
            continue
        rows = changed[name]
        count, *_ = tensor_form(form).shape or [1]
        size = nbytes // count
        if rows is ... or isinstance(rows, slice):
            picked = range(count)[slice(None) if rows is ... else rows]
            if len(picked) != 0:  # with those between, if there is a step
                first, last = sorted((picked[0], picked[-1]))
                marks[(offset + first * size) // block : (offset + (last + 1) * size - 1) // block + 1] = 1
            continue
        places = torch.as_tensor(rows, device="cpu")
        if places.dtype == torch.bool and places.shape == (count,):
            places = places.nonzero()
        elif places.numel() != 0 and (places.dtype in (torch.bool, torch.uint8) or places.is_floating_point()):
            raise errors.InvalidArgument(f"changed= of {name!r}: indices, or a mask of {count} rows")
        places = places.long()
        places = torch.where(places < 0, places + count, places).flatten()
        if places.numel() != 0 and not 0 <= int(places.min()) <= int(places.max()) < count:
            raise errors.InvalidArgument(f"{name!r} has {count} rows, and changed= names another")
        begin, end = (offset + places * size) // block, (offset + (places + 1) * size - 1) // block
        for step in range(size // block + 2):
            marks[torch.minimum(begin + step, end)] = 1
    return marks


@final
class Publication:
    """A publication of this agent: :meth:`Agent.publish` makes it.

    Example::

        model = torch.nn.Linear(4, 4)
        publication = rpc.publish(model.state_dict(), name="example")
        assert publication.version == 1
        assert publication.update(model.state_dict()) == 2
        assert publication.update(model.state_dict(), changed={"weight": slice(0, 2)}) == 3
        assert publication.leases == 0
        publication.withdraw()
    """

    def __init__(self, agent: Agent, name: str, state: Tensors | torch.nn.Module, options: dict[str, Any]) -> None:
        self.name = name
        self._agent = agent
        self._service = service_of(agent)
        self._staging: dict[str, torch.Tensor] = {}
        self._turn = threading.Lock()
        given = _tensors_of(state)
        on_gpu = gpu_versions.on_one_gpu(given) if options.pop("on_gpu") else []
        given = {key: given[key] for key in [*(key for key in given if key not in on_gpu), *on_gpu]}
        self._on_gpu = frozenset(on_gpu)
        self._block = int(options["block"])
        self._forms = _forms_of(given)
        pieces = [(key, form, given[key].nbytes) for key, form in self._forms.items()]
        self._versions = self._service.publish(name, pieces, **options, on_gpu=len(on_gpu))
        self._writer: gpu_versions.Writer | None = None
        if on_gpu:
            first = self._versions.gpu_from
            places = [
                (offset - first, tensor_form(form))
                for key, form, offset, _ in self._versions.pieces
                if key in self._on_gpu
            ]
            self._writer = gpu_versions.Writer(given[on_gpu[0]].device, options["block"], places)
        try:
            self._update(given, None, 0)
        except BaseException:
            self.withdraw()
            raise

    def _update(self, given: dict[str, torch.Tensor], look: torch.Tensor | None, seconds: float) -> int:
        writer = self._writer
        if writer is not None:
            gpu_regions.refuse_capture("the update of a publication on a GPU")
        there = self._on_host({key: each for key, each in given.items() if key not in self._on_gpu})
        host = [there.get(key) for key in self._forms if key not in self._on_gpu]
        if writer is None:
            return self._versions.update(host, look, seconds, None, None)
        tensors = [given[key] for key in self._forms if key in self._on_gpu]
        return self._versions.update(host, look, seconds, writer.make, partial(writer.write, tensors))

    def _on_host(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors without gaps; copies of those on devices, in page-locked memory that is kept."""
        tensors = {}
        for key, tensor in given.items():
            if tensor.is_cpu:
                tensors[key] = tensor.resolve_conj().resolve_neg().contiguous()
                continue
            kept = self._staging.get(key)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = self._staging[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            tensors[key] = kept.copy_(tensor, non_blocking=tensor.is_cuda)
        gpu_regions.wait_for_tensors(given.values())
        return tensors

    @property
    def version(self) -> int:
        """The number of the newest version."""
        return self._versions.version

    @property
    def leases(self) -> int:
        """How many versions subscribers hold now."""
        return self._versions.leases

    def update(
        self,
        state: Tensors | torch.nn.Module,
        timeout: float = -1,
        *,
        changed: Mapping[str, Any] | Iterable[str] | None = None,
    ) -> int:
        """Publishes the next version. Copies the blocks that have changed, and returns when all is there.

        Readers of older versions go on. ``state`` must not be written meanwhile.

        Args:
            state: tensors of the same names, dtypes and shapes as at first. Those on GPUs are copied behind the current
                streams: to the host, or with ``on_gpu`` to memory of the GPU.
            timeout: how many seconds to wait for readers, if all the versions that are kept are being read; -1: the
                agent's default; 0: no limit.
            changed: what may differ from the last version: names, or the rows of each name, such as
                ``{"embedding": ids, "head": ..., "bias": slice(0, 8)}``: indices or a mask, all rows, a slice. The
                blocks without such a row stay as they are in the last version, and are not compared; ``state`` need not
                have the other tensors. A tensor on a GPU, or with gaps, is copied whole first. None: all is compared.
                Tensors that ``on_gpu`` keeps on the GPU are always compared, and must be there.

        Returns:
            The number of the version.

        Raises:
            InvalidArgument: other names, dtypes or shapes; ``changed`` names a tensor or a row that is not there; with
                ``on_gpu``, a CUDA graph is being captured.
            ResourceExhausted: readers hold all versions; the text names them. NotFound: the publication is withdrawn.
        """
        given, look, wanted = _tensors_of(state), None, self._forms
        if changed is not None:
            rows = dict(changed) if isinstance(changed, Mapping) else dict.fromkeys(changed, ...)
            if unknown := sorted({*rows} - {*self._forms}):
                raise errors.InvalidArgument(
                    f"{self.name!r} lacks tensors that changed= names: {', '.join(unknown[:8])}"
                )
            wanted = {key: form for key, form in self._forms.items() if key in rows or key in self._on_gpu}
            given = {key: each for key, each in given.items() if key in wanted}
            look = _look(rows, self._versions.pieces, self._block, self._versions.blocks)
        if (forms := _forms_of(given)) != wanted:
            other = sorted(key for key in {*forms, *wanted} if forms.get(key) != wanted.get(key))
            raise errors.InvalidArgument(f"{self.name!r} with other tensors than before: {', '.join(other[:8])}")
        with self._turn:  # the copies on the host are those of one version
            return self._update({key: given[key] for key in wanted}, look, _seconds(self._agent, timeout))

    def withdraw(self) -> None:
        """Ends the publication, and lets go of its memory. Subscribers keep the versions that they hold, except what is
        on a GPU; those that wait get NotFound.

        Raises:
            Nothing.
        """
        self._service.withdraw(self.name)


@final
class Version(Mapping[str, torch.Tensor]):
    """One version: tensors by name, which stay as they are while this object or one of the tensors lives.

    On the publisher's host they lie in its memory, which other readers share: do not write them (``clone()`` first).
    A version that is held keeps one of the publication's images, so drop it soon.

    Example::

        publication = rpc.publish({"w": torch.ones(3)}, name="held")
        version = rpc.subscribe("held", from_="worker0").latest()
        assert version.version == 1 and list(version) == ["w"] and version["w"].sum() == 3
        publication.withdraw()
    """

    def __init__(self, view: _C.VersionView) -> None:
        self._view = view
        self._pieces = {name: (form, offset, nbytes) for name, form, offset, nbytes in view.pieces}

    @property
    def version(self) -> int:
        """Its number: versions count from 1, and again from 1 if the publisher restarts."""
        return self._view.version

    @property
    def checksum(self) -> int:
        """The publisher's checksum of all bytes; 0 if it publishes none. A subscriber has compared it."""
        return self._view.checksum

    def __getitem__(self, name: str) -> torch.Tensor:
        form, offset, nbytes = self._pieces[name]
        like = tensor_form(form)
        _check_size(name, like, nbytes)
        if nbytes == 0:
            return torch.empty(like.shape, dtype=like.dtype)
        return self._view.tensor(offset, nbytes).view(like.dtype).view(like.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __repr__(self) -> str:
        return f"<tensorferry version {self.version}: {len(self)} tensors>"


@final
class Subscription:
    """A subscription to a publication of a peer: :meth:`Agent.subscribe` makes it.

    On the publisher's host versions are read in place. On another host, one subscriber fetches the blocks that have
    changed, and the others of its host map its copy. If the publisher dies, calls raise ConnectionLost; versions that
    are held stay good. A later call subscribes again.

    Example::

        publication = rpc.publish({"w": torch.ones(3)}, name="weights")
        subscription = rpc.subscribe("weights", from_="worker0")
        assert subscription.latest()["w"].sum() == 3
        assert subscription.wait(newer_than=0).version == 1
        assert asyncio.run(subscription.wait_async(newer_than=0)).version == 1
        mine = {"w": torch.zeros(3)}
        assert subscription.into(mine).load() == 1 and mine["w"].sum() == 3
        publication.withdraw()
    """

    def __init__(self, agent: Agent, name: str, publisher: str, timeout: float) -> None:
        self.name = name
        self.publisher = publisher
        self._agent = agent
        self._service = service_of(agent)
        self._source = self._service.subscribe(publisher, name, _seconds(agent, timeout))

    def latest(self, timeout: float = -1) -> Version:
        """Returns the newest version. Its tensors are in memory of the host.

        Args:
            timeout: seconds; -1: the agent's default; 0: none.

        Raises:
            NotFound: it is withdrawn. ConnectionLost: the publisher has died. DeadlineExceeded. ResourceExhausted.
        """
        return Version(self._source.newest(None, _seconds(self._agent, timeout)))

    def wait(self, newer_than: int = 0, timeout: float = -1) -> Version:
        """Waits for a version above ``newer_than``, and returns the newest. If the publisher has restarted since
        the last version, any of its versions is newer.

        Args:
            newer_than: the number of a version.
            timeout: seconds; -1: the agent's default; 0: none.

        Raises:
            NotFound: it is withdrawn. ConnectionLost: the publisher has died. DeadlineExceeded. ResourceExhausted.
        """
        return Version(self._source.newest(newer_than, _seconds(self._agent, timeout)))

    async def wait_async(self, newer_than: int = 0, timeout: float = -1) -> Version:
        """Waits as :meth:`wait`, on a thread of asyncio's.

        Args:
            newer_than: the number of a version.
            timeout: seconds; -1: the agent's default; 0: none.

        Raises:
            NotFound: it is withdrawn. ConnectionLost: the publisher has died. DeadlineExceeded. ResourceExhausted.
        """
        return await asyncio.to_thread(self.wait, newer_than, timeout)

    def into(self, target: Tensors | torch.nn.Module, map: Mapping[str, tuple[str, Any] | str] | None = None) -> Loader:
        """Plans copies of each version into the reader's own tensors.

        Args:
            target: a module, or tensors by name. Tensors of other dtypes are cast to.
            map: for names of the target: the name in the publication, or that and an index of it, such as
                ``{"w": ("weight", slice(0, 512))}`` for a shard. Other names are the same on both sides.

        Raises:
            InvalidArgument: the publication lacks a name, or a shape does not fit.
        """
        return Loader(self, target, dict(map or {}))

    @property
    def carried(self) -> str:
        """How versions come: "mapped", "mapped from" another subscriber of the host, or "copied"."""
        return self._source.carried

    @property
    def fetched(self) -> int:
        """The bytes that this subscription has fetched over links."""
        return self._source.fetched


@final
class Loader:
    """Planned copies of versions into tensors: :meth:`Subscription.into`.

    Example::

        publication = rpc.publish({"w": torch.ones(4)}, name="loaded")
        half = {"w": torch.zeros(2, dtype=torch.float64)}
        loader = rpc.subscribe("loaded", from_="worker0").into(half, map={"w": ("w", slice(2, 4))})
        assert loader.wait() == 1 and half["w"].tolist() == [1.0, 1.0]
        publication.update({"w": torch.zeros(4)})
        assert loader.load() == 2
        publication.withdraw()
    """

    def __init__(
        self, subscription: Subscription, target: Tensors | torch.nn.Module, map: dict[str, tuple[str, Any] | str]
    ) -> None:
        self._subscription = subscription
        self._target = _tensors_of(target)
        self._map = {name: (where, ...) if isinstance(where, str) else where for name, where in map.items()}
        if unknown := sorted(set(self._map) - set(self._target)):
            raise errors.InvalidArgument(f"map= names tensors that the target lacks: {', '.join(unknown)}")
        self.version = 0
        self._epoch = 0
        self._planned: tuple[Any, int, bool] | None = None
        self._plain: list[tuple[int, torch.Tensor]] = []
        self._other: list[tuple[torch.Tensor, str, Any, int, int]] = []
        self._on_gpu: list[gpu_versions.Part] = []
        self._copies: dict[int, gpu_versions.Copies] = {}  # by region: one for each image of the publisher
        self._maps = any(tensor.is_cuda for tensor in self._target.values())
        self._unmapped: int | None = None  # the epoch of a publication on a GPU that this process cannot map

    def _plan(self, view: _C.VersionView) -> None:
        """Sorts the copies into those from a GPU, those of bytes as they are, and those by torch, which cast or leave
        gaps."""
        pieces = {name: (form, offset, nbytes) for name, form, offset, nbytes in view.pieces}
        self._plain, self._other, self._on_gpu, self._copies = [], [], [], {}
        for name, tensor in self._target.items():
            source, index = self._map.get(name, (name, ...))
            if source not in pieces:
                raise errors.InvalidArgument(f"{self._subscription.name!r} has no tensor {source!r}")
            form, offset, nbytes = pieces[source]
            whole = tensor_form(form)
            part = whole[index]
            if part.shape != tensor.shape:
                raise errors.InvalidArgument(
                    f"{name!r} has the shape {tuple(tensor.shape)}, and its part of {source!r} has {tuple(part.shape)}"
                )
            if view.region is not None and nbytes and offset >= view.gpu_from:
                _check_size(source, whole, nbytes)
                self._on_gpu.append(gpu_versions.Part(tensor, whole, index, offset - view.gpu_from))
            elif tensor.is_cpu and gpu_versions.is_view(part, whole) and gpu_versions.as_bytes_are(part, tensor):
                self._plain.append((offset + int(part.storage_offset()) * part.element_size(), tensor))
            else:
                self._other.append((tensor, source, index, offset, offset + nbytes))

    def load(self, timeout: float = -1) -> int:
        """Brings the tensors to the newest version, and returns its number. Copies only what has changed since the last
        load; the program must not have written the tensors. After an error they still have the version before; but if
        the publisher dies, withdraws or loses the link, or Ctrl-C comes, while a GPU copies from it, those on GPUs have
        parts of both, and the next load copies all.

        Args:
            timeout: seconds; -1: the agent's default; 0: none.

        Raises:
            NotFound: it is withdrawn. ConnectionLost: the publisher has died. DeadlineExceeded. ResourceExhausted.
            InvalidArgument: a CUDA graph is being captured, and a target is on a GPU.
        """
        return self._load(None, timeout)

    def wait(self, timeout: float = -1) -> int:
        """Waits for a version newer than the last one loaded, then does as :meth:`load`.

        Args:
            timeout: seconds; -1: the agent's default; 0: none.

        Raises:
            NotFound: it is withdrawn. ConnectionLost: the publisher has died. DeadlineExceeded. ResourceExhausted.
            InvalidArgument: a CUDA graph is being captured, and a target is on a GPU.
        """
        return self._load(self.version, timeout)

    @property
    def carried(self) -> str:
        """How the last load came: "gpu to gpu", or what :attr:`Subscription.carried` says."""
        return "gpu to gpu" if self._on_gpu else self._subscription.carried

    def _load(self, newer_than: int | None, timeout: float) -> int:
        if self._maps:
            gpu_regions.refuse_capture("a load to a GPU")
        seconds = _seconds(self._subscription._agent, timeout)
        maps = self._maps and self._unmapped != self._epoch
        try:
            view = self._subscription._source.newest(newer_than, seconds, maps)
        except (errors.ConnectionLost, errors.NotFound):
            self._copies = {}  # the publisher's memory does not stay mapped
            raise
        if self._copied(view, seconds):
            return self.version
        self._unmapped = view.epoch  # so the publisher's agent copies to the host
        self._copied(self._subscription._source.newest(None, seconds), seconds)
        return self.version

    def _copies_from(self, region: _C.RemoteRegion, gpu_from: int) -> gpu_versions.Copies:
        known = self._copies.get(region.id)
        if known is None or known.region is not region:
            self._copies = {key: each for key, each in self._copies.items() if each.region.alive}
            known = self._copies[region.id] = gpu_versions.Copies(region, self._on_gpu, gpu_from)
        return known

    def _copied(self, view: _C.VersionView, seconds: float) -> bool:
        """Copies a version. Returns False if it is on a GPU that cannot be mapped."""
        if view.epoch == self._epoch and view.version == self.version:
            return True
        if (form := (view.pieces, view.gpu_from, view.region is None)) != self._planned:
            self._plan(view)
            self._planned, self.version = form, 0
        ranges = self._subscription._source.changes(view, self.version, self._epoch, seconds)
        if view.region is not None and self._on_gpu:
            copies = self._copies_from(view.region, view.gpu_from)
            if not copies.possible:
                view.region.check()  # raises if the publisher has died: then another one may be mapped
                self._copies, self.version = {}, 0
                return False
            self.version = 0  # until all is there
            copies.run(ranges)
        self._subscription._service.copy(view, self._plain, ranges)
        version = Version(view)
        for tensor, source, index, begin, end in self._other:
            if ranges is None or any(at < end and begin < at + size for at, size in ranges):
                tensor.copy_(version[source][index])
        self.version, self._epoch = view.version, view.epoch
        return True
