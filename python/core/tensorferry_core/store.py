"""The store where agents of a job meet that has no other: its agents join with ``rendezvous="store://host:port"``."""

from __future__ import annotations

from ctypes import byref, c_void_p

from ._library import check, lib

__all__ = ["StoreServer"]


class StoreServer:
    """Serves a store until it is closed. Agents of several hosts need a cluster key.

    Args:
        host, port: the address to listen on; port 0: any free one.
        key, tls: as those of :class:`Agent`; by default those of the environment.

    Example::

        with tensorferry_core.StoreServer() as store:
            agent = tensorferry_core.Agent("a", rendezvous=store.url)
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, key: str = "", tls: str = "") -> None:
        self._handle = c_void_p()
        check(lib.tferry_store_serve(host.encode(), port, key.encode(), tls.encode(), byref(self._handle)))
        #: What agents pass as their rendezvous.
        self.url = f"store://{host}:{lib.tferry_store_port(self._handle)}"

    def close(self) -> None:
        """Ends the store. Idempotent."""
        handle, self._handle = self._handle, c_void_p()
        if handle:
            lib.tferry_store_free(handle)

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()
