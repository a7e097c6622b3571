"""Runs programs as forks of one process that has imported torch, and returns what they print."""

import contextlib
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

OURS = "import tensorferry.rpc as rpc\n"
MODULES = {
    "tensorferry": OURS,
    "torch": "import torch.distributed.rpc as rpc\n",
    # torch's module on TensorFerry's backend. An installed package needs no import: test_torch_rpc.py checks that.
    "torch on tensorferry": "import tensorferry.torch\nimport torch.distributed.rpc as rpc\n",
}
FOLDER = Path(__file__).parent

_context = multiprocessing.get_context("forkserver")
# torch's optimizers import torch._dynamo on first use, which takes as long as torch itself.
_context.set_forkserver_preload(["torch.distributed.rpc", "torch._dynamo", "tensorferry.rpc"])


def _print_to(output):
    for number, kind in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(output + kind, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout.reconfigure(line_buffering=True)


def _run_script(script, arguments, environment, output):
    os.environ.update(environment)
    _print_to(output)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(FOLDER))
    runpy.run_path(script, run_name="__main__")


def run_ranks(script, arguments, environment, folder, timeout=300):
    """Runs a script of this folder, or of the folder in its path, once for each list of arguments, side by side.
    Returns how they ended."""
    files = [Path(folder) / f"rank{rank}" for rank in range(len(arguments))]
    processes = [
        _context.Process(target=_run_script, args=(str(FOLDER / script), each, environment, str(file)))
        for each, file in zip(arguments, files)
    ]
    _wait(processes, timeout)
    return [
        subprocess.CompletedProcess(
            each, process.exitcode, *(file.with_suffix(k).read_text() for k in (".out", ".err"))
        )
        for each, process, file in zip(arguments, processes, files)
    ]


def execute(code, folder, timeout=120):
    """What ``code`` prints in a process of its own; ``folder`` is for it and its output. Fails if the process does."""
    script = Path(folder) / "program.py"
    script.write_text(code)
    (ended,) = run_ranks(script, [[]], {}, folder, timeout)
    assert ended.returncode == 0, f"ended with {ended.returncode}:\n{ended.stderr}"
    return ended.stdout


def _wait(processes, timeout):
    """Starts the processes, and ends those that have not ended in time."""
    for process in processes:
        process.start()
    until = time.monotonic() + timeout
    try:
        for process in processes:
            process.join(max(0, until - time.monotonic()))
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in processes:
            process.join()


def _work(folder, name, rank, environment, output):
    os.environ.update(environment)
    _print_to(output)
    sys.path.insert(0, folder)
    program = importlib.import_module(name)
    program.run(rank, len(program.NAMES))


def names_of(program):
    """Its processes, as the program says; read there without importing it."""
    scope = {}
    for line in (FOLDER / f"{program}.py").read_text().splitlines():
        if line.startswith(("TRAINERS =", "OBSERVERS =", "NAMES =")):
            exec(line, scope)
    return scope["NAMES"]


def launch(program, module, folder, timeout=60):
    """The output of ``program`` with ``module``, one of MODULES, in its one import; ``folder`` is for the copy that has
    that line. Runs the program up to three times if it fails on TensorPipe, which aborts now and then on busy cores."""
    for _ in range(3):
        codes, output, errors = _run(program, module, folder, timeout)
        if module != "torch" or codes == [0] * len(codes):
            break
    assert codes == [0] * len(codes), f"{program} on {module} ended with {codes}:\n{errors}"
    return output


def _run(program, module, folder, timeout):
    text = (FOLDER / f"{program}.py").read_text()
    assert text.count(OURS) == 1, f"{program}.py has no line, or more than one, that imports the module"
    folder = Path(folder) / module
    folder.mkdir(exist_ok=True)
    (folder / f"{program}.py").write_text(text.replace(OURS, MODULES[module]))
    # As torchrun does it. A store of rank 0's ends with it, while others are still in torch's shutdown and ask for it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "TENSORFERRY_TORCH_RPC": "1" if module == "torch on tensorferry" else "",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    files = [folder / f"{program}-{name}" for name in names_of(program)]
    processes = [
        _context.Process(target=_work, args=(str(folder), program, rank, environment, str(file)), daemon=True)
        for rank, file in enumerate(files)
    ]
    _wait(processes, timeout)
    codes = [process.exitcode for process in processes]
    errors = [text.read_text() for file in files if (text := file.with_suffix(".err")).exists()]
    return codes, files[0].with_suffix(".out").read_text(), "\n".join(errors)
