#!/usr/bin/env python3
"""Writes the seeds of frame_fuzz and session_fuzz anew: tests/fuzz/seeds.py. Their formats are those fuzzers' own."""

import struct
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
HELLO, REQUEST, REPLY, CANCEL, RELEASE, CONTROL, PING, PONG, GOODBYE, BULK = range(1, 11)
INLINE, ERROR, SPILLED = 255, 1, 2


def extension(number, data):
    return struct.pack("<HH", number, len(data)) + data


def record(channel=0, size=0, ticket=b"", release=0, after=0):
    length = 0 if channel == INLINE else len(ticket)
    return struct.pack("<BBBBBBHQQQ", channel, 0, 0, 0, 0, 0, length, size, release, after) + ticket


def frame(kind, payload=b"", extensions=b"", records=(), trailing=0, call=0, flags=0, descriptors=0, function=0):
    body = extensions + b"".join(records) + payload
    counts = (len(records), len(extensions), descriptors, 0, len(body))
    return struct.pack("<BBHHBBIIQIIQ", kind, flags, *counts, function, call, 1000, 0, trailing) + body


def sized(data):
    return bytes([len(data)]) + data


def hello():
    device = b"\0\0"
    driver = sized(b"basic") + b"\1" + device + sized(b"")
    return b"\1" + sized(b"peer") + struct.pack("<iQQ", -1, 77, 0) + b"\1" + device + b"\1" + driver


def frame_seeds():
    named = extension(1, b"echo") + extension(2, b"\7\0\0\0") + extension(3, struct.pack("<QQ", 1, 2))
    records = [record(INLINE, 3, b"abc"), record(0, 10, b"\1"), record(1, 300000, b"\2\5", 9, 3)]
    request = frame(REQUEST, b"payload", named, records, trailing=10)
    spill = struct.pack("<I", 3) + b"".join(records) + b"payload"
    yield "request", b"\0" + request
    yield "spilled", b"\0" + frame(REQUEST, b"", b"", [record(INLINE, len(spill), spill)], flags=SPILLED)
    yield "hello", b"\1" + hello()
    yield "error", b"\2\x08" + sized(b"it is gone")
    yield "spill", b"\3" + spill
    # Behind the ending's byte and the sizes of pieces; what the sink does stands in each call id.
    behind = bytes(range(100))
    talk = frame(HELLO, hello()) + frame(REQUEST, b"one", named, records, trailing=100, call=1) + behind
    talk += frame(CONTROL, b"\4\0\0\0\0two", descriptors=1, call=0x100)
    parts = frame(REPLY, b"", b"", [record(0, 100, b"\1")], trailing=100, call=0xF5) + behind + frame(PING, call=1)
    yield "whole", b"\4\1\x7f" + talk + parts
    yield "pieces", b"\4\3\x27\x40\xc6" + talk + parts
    yield "dropped", b"\4\1\x3f" + parts.replace(b"\xf5", b"\2", 1) + frame(GOODBYE)
    yield "too_much", b"\4\1\x3f" + parts.replace(b"\xf5", b"\3", 1)
    yield "closed", b"\4\1\x3f" + frame(PING, call=0xE000) + frame(PING)
    yield "bulk", b"\5\2\x27\x7f" + b"".join(frame(BULK, trailing=100, call=call) + behind for call in (1, 0x105, 2))


# session_fuzz: steps as Session::step and frame_from read them.
ECHO, LATER, WAIT, BACK = range(4)
ASKED, REPLIED, CANCELLED, CONTROLLED, RELEASED, LEFT, PINGED, SENT_BULK = 0, 4, 8, 10, 14, 16, 18, 20
RAW, ANSWER, DROP, CALL, GIVE_UP, HALF_CLOSE, AWAIT, PAUSE = range(24, 32)
MAIL, XTH, BASIC, INSIDE = 0, 1, 2, 4
ON_BULK, SPILLED_BODY, LIES = 1 << 5, 0x30, 0xC0


def payload(data=b""):
    return sized(data)


def buffer(channel, size, way=0, *more, release=0):
    return bytes([channel | release << 6, size, way, *more])


def request(function, call, buffers=(), data=b"", form=0, order=0, lie=None):
    lies = b"" if lie is None else bytes([lie])
    form |= 1 | (0 if lie is None else LIES)
    return (
        bytes([ASKED, form])
        + lies
        + bytes([function, 0x80 | call, order, len(buffers)])
        + b"".join(buffers)
        + payload(data)
    )


def reply(call, buffers=(), data=b"", form=0):
    return bytes([REPLIED, form, call, len(buffers)]) + b"".join(buffers) + payload(data)


def control(operation, channel=MAIL, data=b"", descriptors=0):
    return bytes([CONTROLLED, 0, operation | channel << 6]) + payload(data) + bytes([descriptors])


def session_seeds():
    buffers = [buffer(INSIDE, 10), buffer(BASIC, 100), buffer(BASIC, 249, release=1)]
    wait = bytes([PAUSE])
    yield "echo", b"\0" + request(ECHO, 1, buffers, b"text") + wait + request(ECHO, 1)
    yield "spilled", b"\0" + request(ECHO, 1, [buffer(INSIDE, 10)], b"text", form=SPILLED_BODY) + wait
    yield (
        "ordered",
        b"\0" + b"".join(request(LATER, i, order=1) for i in range(3)) + bytes([ANSWER, DROP, ANSWER]) + wait,
    )
    yield "cancelled", b"\0" + request(WAIT, 1) + bytes([CANCELLED, 0, 0x81]) + payload()
    yield "device", b"\0" + request(ECHO, 1, [buffer(INSIDE, 10, 0xF0)])
    yield (
        "mail",
        b"\0"
        + control(1)
        + control(3, data=b"!*")
        + control(4, data=b"d\0\0\0\0abc")
        + request(ECHO, 1, [buffer(MAIL, 3, 0xD4, 3, 0)])
        + wait,
    )
    yield "mail_later", b"\0" + request(ECHO, 1, [buffer(MAIL, 3, 0xD4, 1, 0)]) + control(4, data=b"d\0\0\0\0abc")
    yield (
        "bulk",
        b"\4"
        + request(ECHO, 1, [buffer(BASIC, 99, 2, 1)])
        + bytes([ON_BULK | SENT_BULK, 0, 0])
        + payload()
        + bytes([99, 1])
        + wait,
    )
    yield (
        "called",
        b"\2\0" + reply(0, [buffer(INSIDE, 10)], b"text") + bytes([AWAIT, CALL, 9]) + reply(1) + bytes([AWAIT]),
    )
    yield "into", b"\2\1" + reply(0, [buffer(BASIC, 249)]) + bytes([AWAIT])
    yield "given_up", b"\2\x31" + bytes([GIVE_UP]) + reply(0, [buffer(BASIC, 249)], form=SPILLED_BODY) + reply(1)
    yield "back", b"\3\0" + request(BACK, 1) + b"\x24\0\0\0\0" + b"\x24\0\1\0\0" + wait
    yield "hello", b"\x40" + sized(hello()) + request(ECHO, 1)
    yield "hello_back", b"\x42\0" + sized(hello())
    yield "released", b"\0" + request(LATER, 1) + bytes([ANSWER, PAUSE, RELEASED, 2, 7, 0x80]) + payload()
    yield "left", b"\x80" + request(WAIT, 1) + bytes([LEFT, 0, 0]) + payload() + bytes([HALF_CLOSE])
    yield "raw", b"\0" + bytes([RAW]) + sized(frame(REQUEST, b"", extension(1, b"echo"), call=9)) + wait


def write(name, seeds):
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    for seed, data in seeds:
        (folder / seed).write_bytes(data)


if __name__ == "__main__":
    write("frame_fuzz", frame_seeds())
    write("session_fuzz", session_seeds())
