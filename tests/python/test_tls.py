"""Agents in processes of their own, whose TCP connections use TLS."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import tensorferry
import torch

KEY = "the cluster key of these tests"
OPTIONS = {"key": KEY, "tls": "key", "unix_sockets": False, "shared_memory": False}

PEER = textwrap.dedent(
    """
    import sys
    import tensorferry
    port, tls = int(sys.argv[1]), sys.argv[2]
    key = "the cluster key of these tests"
    store = tensorferry.connect_store("127.0.0.1", port, key, tls="key")
    with tensorferry.Agent("peer", store=store, key=key, tls=tls, unix_sockets=False, shared_memory=False):
        print("ready", flush=True)
        sys.stdin.read()
    """
)


@pytest.fixture
def server() -> tensorferry.StoreServer:
    return tensorferry.StoreServer("127.0.0.1", 0, KEY, tls="key")


def start(server: tensorferry.StoreServer, tls: str) -> subprocess.Popen[str]:
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, str(server.port), tls], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert peer.stdout is not None
    assert peer.stdout.readline() == "ready\n"
    return peer


def end(peer: subprocess.Popen[str]) -> None:
    peer.communicate(timeout=180)
    assert peer.returncode == 0


def test_calls_with_tensors_go_over_tls(server: tensorferry.StoreServer) -> None:
    peer = start(server, "key")
    store = tensorferry.connect_store("127.0.0.1", server.port, KEY, tls="key")
    with tensorferry.Agent("me", store=store, **OPTIONS) as me:
        assert me.rpc_sync("peer", max, args=(1, 2)) == 2
        tensor = torch.arange(4_000_000, dtype=torch.float32)
        assert torch.equal(me.rpc_sync("peer", torch.neg, args=(tensor,)), -tensor)
        assert me.explain("peer").transport == "tcp"
    end(peer)


def test_a_peer_without_tls_is_refused_by_name(server: tensorferry.StoreServer) -> None:
    peer = start(server, "off")
    store = tensorferry.connect_store("127.0.0.1", server.port, KEY, tls="key")
    with (
        tensorferry.Agent("me", store=store, **OPTIONS) as me,
        pytest.raises(tensorferry.errors.Unauthenticated, match=r'"peer".*127\.0\.0\.1:.*the peer does not.*tls='),
    ):
        me.rpc_sync("peer", max, args=(1, 2))
    end(peer)


def test_a_store_without_tls_is_refused_by_name() -> None:
    server = tensorferry.StoreServer("127.0.0.1", 0, KEY)
    with pytest.raises(tensorferry.errors.Unauthenticated, match="this process uses TLS, and the peer does not"):
        tensorferry.connect_store("127.0.0.1", server.port, KEY, timeout=60, tls="key")


def test_an_option_that_makes_no_sense_is_refused(server: tensorferry.StoreServer) -> None:
    store = tensorferry.connect_store("127.0.0.1", server.port, KEY, tls="key")
    with pytest.raises(tensorferry.errors.InvalidArgument, match="certificate=FILE"):
        tensorferry.Agent("me", store=store, key=KEY, tls="yes")
