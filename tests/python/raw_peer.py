"""A peer that is no agent, for tests of what an agent makes of its bytes."""

from __future__ import annotations

import random
import socket
import struct


class RawPeer:
    """Speaks docs/protocol.md to an agent's unix socket, byte by byte. ``address``: its path, or an abstract name.
    ``patience``: for the agent's bytes, in seconds."""

    def __init__(self, address: str, name: str, incarnation: int = 0, patience: float = 30) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(patience)
        self.socket.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
        self.socket.sendall(b"TFRY" + struct.pack("<HHIB3x", 1, 1, 0, 0) + random.randbytes(32))
        self._read(48 + 32)
        self.socket.sendall(bytes(32))
        hello = self._frame()[1]
        at = 1 + 1 + hello[1] + 4  # purpose, name (short), rank
        (self.server,) = struct.unpack_from("<Q", hello, at)
        self.incarnation = incarnation or random.getrandbits(63) | 1
        body = b"\x01" + bytes([len(name)]) + name.encode() + struct.pack("<iQQ", -1, self.incarnation, self.server)
        self._send(1, 0, 0, body + bytes([1, 0, 0, 0]) + bytes(4) + bytes(8))  # a device, no channels, features, number
        go = 14
        if self.incarnation < self.server:
            self._send(go, 0, 1, b"")
        else:
            assert self._frame()[0][0] == go

    def call(self, function: str, payload: bytes) -> tuple[int, bytes]:
        """The flags and the payload of the reply."""
        record = struct.pack("<HH", 1, len(function)) + function.encode()
        self._send(2, len(record), 7, record + payload)
        while True:
            header, body = self._frame()
            if header[0] == 3:
                return header[1], body[struct.unpack_from("<H", header, 4)[0] :]

    def _send(self, kind: int, extensions: int, call: int, body: bytes) -> None:
        self.socket.sendall(struct.pack("<BBHHBxIIQIIQ", kind, 0, 0, extensions, 0, len(body), 0, call, 0, 0, 0) + body)

    def _frame(self) -> tuple[bytes, bytes]:
        header = self._read(40)
        return header, self._read(struct.unpack_from("<I", header, 8)[0])

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            got = self.socket.recv(count - len(data))
            assert got, "the agent closed the connection"
            data += got
        return data


def varint(n: int) -> bytes:
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])
