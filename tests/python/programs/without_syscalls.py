"""Runs a program with system calls forbidden, as a container's seccomp profile forbids them: they fail with EPERM.

python without_syscalls.py NUMBER,NUMBER,... PROGRAM ARGUMENT...
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, FILTER = 22, 38, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL_WITH_EPERM = 0x7FFF0000, 0x00050001


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def forbid(calls: list[int]) -> None:
    steps = [struct.pack("HBBI", LOAD, 0, 0, 0)]
    for left, number in zip(range(len(calls), 0, -1), calls, strict=True):
        steps.append(struct.pack("HBBI", JUMP_IF_EQUAL, left, 0, number))
    steps.append(struct.pack("HBBI", RETURN, 0, 0, ALLOW))
    steps.append(struct.pack("HBBI", RETURN, 0, 0, FAIL_WITH_EPERM))
    program = Program(len(steps), b"".join(steps))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(PR_SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    forbid([int(number) for number in sys.argv[1].split(",")])
    os.execvp(sys.argv[2], sys.argv[2:])
