"""Writes the table of docs/collectives.md that says which tensors each collective operation takes, beside Gloo.

Each cell is the outcome of the operation with two ranks: "yes" if the result is right at each rank, "no" if the call
raises an error, "nothing" if there are no values and no error, "WRONG" otherwise. It needs the package and torch:
`.venv/bin/python scripts/collective_values.py` writes the table, and `--print` prints it, with the errors.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs/collectives.md"
BEGIN, END = "<!-- written by scripts/collective_values.py -->\n\n", "<!-- the end of what it writes -->"
BACKENDS = "tensorferry", "gloo"


def outcomes_of(every: int, backends: list[str]) -> None:
    """Prints the outcome of each operation with each kind of tensor, for each backend, and each rank; of every n-th.

    Each cell has two processes of its own, forks of this one: what a backend gets wrong may harm what comes next.
    """
    import tensorferry.c10d  # noqa: F401, registers the backend
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = -1  # of a fork

    class Tagged(torch.Tensor):
        """A subclass as programs write them."""

    def plain(of: int) -> Any:
        return torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]) + 10 * of

    def strided(of: int) -> Any:
        return torch.zeros(2, 6)[:, ::2].copy_(plain(of))

    def in_inference(of: int) -> Any:
        with torch.inference_mode():
            return plain(of)

    kinds: dict[str, Callable[[int], Any]] = {
        "dense": plain,
        "every second element": strided,
        "transposed": lambda of: plain(of).t().contiguous().t(),
        "expanded": lambda of: plain(of)[:1].expand(2, 3),
        "without elements": lambda of: torch.zeros(2, 0),
        "conjugated view": lambda of: (plain(of) * 1j).conj(),
        "negated view": lambda of: torch._neg_view(plain(of)),
        "made in inference mode": in_inference,
        "leaf that requires grad": lambda of: plain(of).requires_grad_(),
        "subclass": lambda of: plain(of).as_subclass(Tagged),
        "sparse (COO)": lambda of: plain(of).to_sparse(),
        "sparse (CSR)": lambda of: plain(of).to_sparse_csr(),
        "quantized": lambda of: torch.quantize_per_tensor(plain(of), 1.0, 0, torch.qint8),
        "meta": lambda of: plain(of).to("meta"),
    }

    def values(tensor: Any) -> Any:
        """Returns an ordinary tensor of the same values."""
        tensor = tensor.detach()
        tensor = tensor.as_subclass(torch.Tensor) if isinstance(tensor, Tagged) else tensor
        tensor = tensor.dequantize() if tensor.is_quantized else tensor
        tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
        return tensor.resolve_conj().resolve_neg().clone()

    def empty(of: Any) -> Any:
        """An output for such a tensor: an ordinary one, if one can be made."""
        if of.device.type == "meta" or of.layout != torch.strided or of.is_quantized:
            return torch.empty_like(of)
        return torch.zeros(of.shape, dtype=of.dtype)

    # Each takes the tensors of both ranks, and returns what to compare at this rank: results, and what they should be.
    def broadcast(t: list[Any], v: list[Any], g: Any) -> Any:
        dist.broadcast(t[rank], 0, g)
        return [t[rank]], [v[0]]

    def all_reduce(t: list[Any], v: list[Any], g: Any) -> Any:
        dist.all_reduce(t[rank], group=g)
        return [t[rank]], [v[0] + v[1]]

    def reduce(t: list[Any], v: list[Any], g: Any) -> Any:
        dist.reduce(t[rank], 0, group=g)
        return ([t[rank]], [v[0] + v[1]]) if rank == 0 else ([], [])

    def all_gather(t: list[Any], v: list[Any], g: Any) -> Any:
        outs = [empty(t[0]), empty(t[1])]
        dist.all_gather(outs, t[rank], g)
        return outs, v

    def gather(t: list[Any], v: list[Any], g: Any) -> Any:
        outs = [empty(t[0]), empty(t[1])] if rank == 0 else []
        dist.gather(t[rank], outs or None, 0, g)
        return outs, v[: len(outs)]

    def scatter(t: list[Any], v: list[Any], g: Any) -> Any:
        out = empty(t[rank])
        dist.scatter(out, t if rank == 0 else None, 0, g)
        return [out], [v[rank]]

    def reduce_scatter(t: list[Any], v: list[Any], g: Any) -> Any:
        out = empty(t[rank])
        dist.reduce_scatter(out, [t[rank], t[rank]], group=g)
        return [out], [v[0] + v[1]]

    def all_to_all_single(t: list[Any], v: list[Any], g: Any) -> Any:
        out = empty(t[rank])
        dist.all_to_all_single(out, t[rank], group=g)
        return [out], [torch.stack([v[0][rank], v[1][rank]])]

    def send(t: list[Any], v: list[Any], g: Any) -> Any:
        out = empty(t[0])
        if rank == 0:
            dist.send(t[0], 1, g)
            return [], []
        dist.recv(out, 0, g)
        return [out], [v[0]]

    def recv(t: list[Any], v: list[Any], g: Any) -> Any:
        if rank == 0:
            dist.send(values(t[0]) if t[0].device.type != "meta" else plain(0), 1, g)
            return [], []
        dist.recv(t[1], 0, g)
        return [t[1]], [v[0]]

    operations = (
        broadcast, all_reduce, reduce, all_gather, gather, scatter, reduce_scatter, all_to_all_single, send, recv,
    )  # fmt: skip

    def outcome(operation: Callable[..., Any], make: Callable[[int], Any], group: Any) -> tuple[str, str]:
        try:
            tensors = [make(0), make(1)]
            meta = tensors[0].device.type == "meta"
            expected = [tensor if meta else values(tensor) for tensor in tensors]
            results, right = operation(tensors, expected, group)
            if meta:
                return "nothing", ""
            same = all(torch.equal(values(a), b) for a, b in zip(results, right, strict=True))
            return ("yes" if same else "WRONG"), ""
        except Exception as error:
            return "no", f"{type(error).__name__}: {error}".splitlines()[0]

    def run(backend: str, name: str, operation: Callable[..., Any], path: str) -> None:
        """One rank of one cell."""
        store, timeout = dist.FileStore(path, 2), timedelta(seconds=5)
        dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timeout)
        told = outcome(operation, kinds[name], dist.group.WORLD)
        os.write(1, f"{json.dumps([backend, name, operation.__name__, *told])}\n".encode())
        if told[0] != "no":  # else the other rank may wait for what does not come
            dist.barrier()

    with tempfile.TemporaryDirectory() as folder:
        cells = itertools.islice(itertools.product(backends, kinds, operations), 0, None, every)
        for number, (backend, name, operation) in enumerate(cells):
            children = []
            for rank in range(2):  # noqa: B007, of the functions above
                children.append(os.fork())
                if children[-1] == 0:
                    with contextlib.suppress(Exception):
                        run(backend, name, operation, f"{folder}/{number}")
                    os._exit(0)
            for child in children:
                os.waitpid(child, 0)


def measure(*backends: str, every: int = 1) -> dict[tuple[str, str, str], tuple[str, str]]:
    """Returns the outcome and the error of every n-th cell, by backend, kind of tensor and operation."""
    command = [sys.executable, "-W", "ignore", __file__, "--outcomes", str(every), *backends]
    said = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True).stdout
    cells: dict[tuple[str, str, str], tuple[str, str]] = {}
    for backend, name, operation, result, error in map(json.loads, said.splitlines()):
        before = cells.get((backend, name, operation), ("yes", ""))
        # The rank that succeeds where the other one fails has no part in it.
        worst = max(before, (result, error), key=lambda cell: ("yes", "nothing", "no", "WRONG").index(cell[0]))
        cells[backend, name, operation] = worst
    return cells


def table(cells: dict[tuple[str, str, str], tuple[str, str]]) -> str:
    """Returns the table, and below it what the errors say."""
    names = list(dict.fromkeys(name for _, name, _ in cells))
    operations = list(dict.fromkeys(operation for _, _, operation in cells))
    lines = [f"| tensor | {' | '.join(f'`{each}`' for each in operations)} |", "|---" * (len(operations) + 1) + "|"]
    for name in names:
        row = []
        for operation in operations:
            ours, theirs = (cells.get((backend, name, operation), ("?", ""))[0] for backend in BACKENDS)
            row.append(ours if ours == theirs else f"{ours} ({theirs})")
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n\n"


def on_the_page() -> str:
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def ours_on_the_page() -> dict[tuple[str, str], str]:
    """Returns what the page says of our backend, by kind of tensor and operation."""
    head, _, *rows = (line.strip("| ").split(" | ") for line in on_the_page().splitlines() if line)
    return {(row[0], name.strip("`")): cell.split(" ")[0] for row in rows for name, cell in zip(head[1:], row[1:])}


def page(text: str) -> str:
    head, _, rest = PAGE.read_text().partition(BEGIN)
    return head + BEGIN + text + rest[rest.index(END) :]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--outcomes"]:
        outcomes_of(int(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1:2] == ["--print"]:
        outcomes = measure(*BACKENDS)
        print(table(outcomes))
        for cell, (result, why) in outcomes.items():
            if result != "yes":
                print(*cell, result, why)
    else:
        PAGE.write_text(page(table(measure(*BACKENDS))))
