"""Remote calls with tensors between processes, over the fastest channel between their devices.

- :mod:`tensorferry.rpc` has the names of ``torch.distributed.rpc``.
- :mod:`tensorferry.collectives` has groups that reduce and exchange tensors.
- :class:`Agent` has the same functions as methods, for several agents in one process.
- :func:`empty` and :func:`share` hand memory to a peer without a copy; :func:`register` prepares it for network cards.
- :meth:`Agent.region` and :meth:`Agent.publish` let peers read and write memory without calls of the program.
- :func:`load_plugin`, :func:`register_converter` and :func:`register_reduction` add channels, device types, reductions.
- :func:`on_default_stream` orders the work of calls on a GPU.
- :mod:`tensorferry.errors` lists the errors.
"""

from __future__ import annotations

from . import _torch_check

_torch_check.check()  # before _C is imported: _C links against torch's libraries

from . import collectives, errors, futures, rpc  # noqa: E402
from ._build_info import VERSION as __version__  # noqa: E402
from .agent import Agent, Counters, Explanation, WorkerInfo  # noqa: E402
from .device_streams import on_default_stream  # noqa: E402
from .errors import Error, RemoteError, RemoteTraceback  # noqa: E402
from .floors import measured  # noqa: E402
from .futures import Future, as_completed, awaitable, wait_all  # noqa: E402
from .peers import Peer  # noqa: E402
from .plugins import load_plugin, register_converter, register_reduction  # noqa: E402
from .published import Loader, Publication, Subscription, Version  # noqa: E402
from .regions import Notification, OwnRegion, Region, read_regions  # noqa: E402
from .rendezvous import StoreServer, connect_store  # noqa: E402
from .sharing import Registered, Shared, empty, register, share  # noqa: E402
from .streams import Stream  # noqa: E402

__all__ = [
    "Agent",
    "Counters",
    "Error",
    "Explanation",
    "Future",
    "Loader",
    "Notification",
    "OwnRegion",
    "Peer",
    "Publication",
    "Region",
    "Registered",
    "RemoteError",
    "RemoteTraceback",
    "Shared",
    "StoreServer",
    "Stream",
    "Subscription",
    "Version",
    "WorkerInfo",
    "__version__",
    "as_completed",
    "awaitable",
    "collectives",
    "connect_store",
    "empty",
    "errors",
    "futures",
    "load_plugin",
    "measured",
    "on_default_stream",
    "read_regions",
    "register",
    "register_converter",
    "register_reduction",
    "rpc",
    "share",
    "wait_all",
]
