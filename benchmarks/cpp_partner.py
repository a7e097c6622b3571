"""The Python process of cpp_typed: serves its calls, or makes them and prints their samples.

python -m benchmarks.cpp_partner serve|call PORT KIND BYTES SECONDS; it ends when its standard input closes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import tensorferry
import torch


def empty() -> None:
    """What an empty call runs."""


def echo(value: object) -> object:
    return value


def repeat(once: Callable[[], object], seconds: float) -> list[int]:
    """Nanoseconds of each call, of which those of the first fifth are not counted: as samples.h does it."""
    begin = time.perf_counter_ns()
    counted, end = begin + int(seconds * 0.2e9), begin + int(seconds * 1e9)
    samples: list[int] = []
    before = begin
    while before < end or len(samples) < 20:
        once()
        after = time.perf_counter_ns()
        if before >= counted:
            samples.append(after - before)
        before = after
    return samples


def main(role: str, port: str, kind: str, size: str, seconds: str) -> None:
    store = tensorferry.connect_store("127.0.0.1", int(port))
    if role == "serve":
        tensorferry.rpc.expose(empty)
        tensorferry.rpc.expose(echo, name="text")
        tensorferry.rpc.expose(echo, name="tensor")
        with tensorferry.Agent("callee", store=store):
            sys.stdin.read()
        return
    with tensorferry.Agent("caller", store=store) as agent:
        arguments: dict[str, tuple[object, ...]] = {
            "empty": (),
            "text": ("x" * 64,),
            "tensor": (torch.zeros(int(size) // 4),),
        }
        args = arguments[kind]
        agent.rpc_sync("callee", kind, args=args)
        print(json.dumps({"samples_ns": repeat(lambda: agent.rpc_sync("callee", kind, args=args), float(seconds))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
