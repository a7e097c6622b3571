"""A program without torch sends an array of 338 KB there and back: tensorferry_core to a server with torch, beside gRPC
and pyzmq, in turns.

    python -m benchmarks.without_torch [--server PYTHON] [--placement "two cores"]

PYTHON is an interpreter with torch and tensorferry; this one has numpy, tensorferry_core, and grpcio and pyzmq if they
are to be measured. Prints the median and the least time of each, in microseconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .placement import Placement, place

BYTES = 338_000
ROUNDS, CALLS = 20, 50

TENSORFERRY_SERVER = """
import sys, tensorferry, torch
torch.set_num_threads(1)
store = tensorferry.StoreServer()
agent = tensorferry.Agent("server", store=tensorferry.connect_store("127.0.0.1", store.port))
agent.expose(lambda tensor: tensor, name="same")
print(store.port, flush=True)
sys.stdin.read()
agent.leave()
"""

GRPC_SERVER = """
import concurrent.futures, sys, grpc
class Same(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)
server = grpc.server(concurrent.futures.ThreadPoolExecutor(2), options=[("grpc.max_receive_message_length", -1)])
server.add_generic_rpc_handlers((Same(),))
address = "unix-abstract:tensorferry-bench-" + sys.argv[1]
server.add_insecure_port(address)
server.start()
print(address, flush=True)
sys.stdin.read()
"""

ZMQ_SERVER = """
import sys, zmq
socket = zmq.Context().socket(zmq.REP)
address = "ipc://@tensorferry-bench-zmq-" + sys.argv[1]
socket.bind(address)
print(address, flush=True)
while True:
    socket.send(socket.recv(copy=False), copy=False)
"""


def start(python: str, program: str, started: list[subprocess.Popen[str]]) -> str:
    """Starts a server, and returns the line that it prints when it is up."""
    command = [python, "-c", program, str(time.time_ns())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit("a server has ended: its error is above")
    return line


def tensorferry_call(python: str, started: list[subprocess.Popen[str]]) -> Callable[[Any], Any]:
    import tensorferry_core

    port = start(python, TENSORFERRY_SERVER, started)
    agent = tensorferry_core.Agent("client", rendezvous=f"store://127.0.0.1:{port}")
    return lambda array: agent.call("server", "same", (array,))


def grpc_call(started: list[subprocess.Popen[str]]) -> Callable[[Any], Any]:
    import grpc

    address = start(sys.executable, GRPC_SERVER, started)
    channel = grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])
    same = channel.unary_unary("/Same/same")
    return lambda array: np.frombuffer(same(array.tobytes()), array.dtype)


def zmq_call(started: list[subprocess.Popen[str]]) -> Callable[[Any], Any]:
    import zmq

    socket = zmq.Context().socket(zmq.REQ)
    socket.connect(start(sys.executable, ZMQ_SERVER, started))

    def call(array: Any) -> Any:
        socket.send(array, copy=False)
        return np.frombuffer(socket.recv(copy=False).buffer, array.dtype)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default=sys.executable, help="an interpreter with torch and tensorferry")
    parser.add_argument("--placement", default="unpinned", choices=[each.value for each in Placement])
    options = parser.parse_args()
    cpus = Placement(options.placement).cpus()
    if cpus is None:
        raise SystemExit("this machine has one core")
    started: list[subprocess.Popen[str]] = []
    calls: dict[str, Callable[[Any], Any]] = {}
    try:
        calls["tensorferry-core"] = tensorferry_call(options.server, started)
        for name, make in (("gRPC", grpc_call), ("pyzmq", zmq_call)):
            try:
                calls[name] = make(started)
            except ImportError as error:
                print(f"{name} is left out: {error}")
        place(os.getpid(), cpus[0])
        for process in started:
            place(process.pid, cpus[1])
        array = np.arange(BYTES // 4, dtype=np.float32)
        took: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(ROUNDS):
            for name, call in calls.items():
                for _ in range(CALLS):
                    began = time.perf_counter()
                    back = call(array)
                    ended = time.perf_counter()
                    assert back.shape == array.shape
                    if turn > 0:
                        took[name].append((ended - began) * 1e6)
        for name, samples in took.items():
            print(f"{name:17} median {statistics.median(samples):6.1f} us, least {min(samples):6.1f} us")
    finally:
        for process in started:
            process.kill()


if __name__ == "__main__":
    main()
