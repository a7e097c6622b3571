"""The command line: ``tensorferry doctor``, or ``python -m tensorferry doctor``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import bench, doctor, errors, explaining, key, top, trace, tune

COMMANDS = {
    "bench": (bench.main, "measure calls on this machine beside torch.distributed.rpc, in a minute"),
    "doctor": (doctor.main, "say what this host can do and what not, why, what it costs, and what to do"),
    "explain": (explaining.main, "say how tensors go between the agents of a running job, and why not faster"),
    "top": (top.main, "show the agents of a running job, their links, rates and slow calls"),
    "key": (key.main, "make the cluster key of a job, once, in a file that you copy to each host"),
    "tune": (tune.main, "measure which algorithm of a collective operation is fastest here, and keep the result"),
    "trace": (trace.main, "work on traces of calls"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command that the first argument names with the rest. Its error ends the program with one line."""
    parser = argparse.ArgumentParser(
        prog="tensorferry",
        epilog="\n".join(f"{name:8} {text}" for name, (_, text) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS)
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = parser.parse_args(given[:1]).command
    run, _ = COMMANDS[command]
    try:
        run(given[1:])
    except errors.Error as error:
        parser.exit(1, f"tensorferry {command}: {error}\n")
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell says of a command that Ctrl-C has ended


if __name__ == "__main__":
    main()
