"""Prefill writes key-value blocks into the paged cache of decode, which waits for notifications: python main.py"""

import multiprocessing
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes share this machine's cores

import tensorferry
import tensorferry.rpc as rpc
import torch

BLOCKS, LAYERS, TOKENS, WIDTH = 512, 4, 16, 64  # a block has the keys and values of 16 tokens
REQUESTS = 24
free: list[int] = []


def allocate(count: int) -> list[int]:
    """Decode gives prefill the blocks of a request: the one call that a request needs."""
    taken = free[-count:]
    del free[-count:]
    return taken


def prefill(port: int) -> None:
    rpc.init_rpc("prefill", store=tensorferry.connect_store("127.0.0.1", port))
    cache = rpc.find_region("decode", "kv")
    random = torch.Generator().manual_seed(5)
    for request in range(REQUESTS):
        count = int(torch.randint(1, 9, (), generator=random))
        indices = rpc.rpc_sync("decode", allocate, args=(count,))
        blocks = torch.full((count, 2, LAYERS, TOKENS, WIDTH), float(request + 1), dtype=torch.bfloat16)
        for place, block in enumerate(blocks):
            block[0, 0, 0, 0] = place
        # The number tells decode which request it is, and where its blocks are: they have neighbouring numbers.
        cache.write_blocks(torch.tensor(indices), blocks, notify=request << 32 | indices[0] << 8 | count)
    some = torch.tensor([BLOCKS - 1, 0, 7])
    assert cache.read_blocks(some).shape == (3, 2, LAYERS, TOKENS, WIDTH)
    print(f"prefill wrote {REQUESTS} requests, {cache.carried()}", flush=True)
    rpc.shutdown()


def main() -> None:
    server = tensorferry.StoreServer("127.0.0.1")
    rpc.init_rpc("decode", store=tensorferry.connect_store("127.0.0.1", server.port))
    free.extend(range(BLOCKS))
    cache = rpc.region(
        tensorferry.empty((BLOCKS, 2, LAYERS, TOKENS, WIDTH), dtype=torch.bfloat16), "kv", write=True, peers=["prefill"]
    )
    process = multiprocessing.get_context("spawn").Process(target=prefill, args=(server.port,))
    process.start()
    tokens = 0
    for expected in range(REQUESTS):
        number = cache.await_notification(timeout=60).number
        request, first, count = number >> 32, number >> 8 & 0xFFFFFF, number & 0xFF
        assert request == expected
        mine = cache.tensor[first : first + count]
        for place, block in enumerate(mine):  # every block is there, before its notification
            assert block[0, 0, 0, 0].eq(place).all() and block[1].eq(request + 1).all(), (request, place)
        tokens += count * TOKENS
    process.join(60)
    assert process.exitcode == 0
    print(f"decode read {tokens} tokens of {REQUESTS} requests from its cache of {cache.nbytes >> 20} MB")
    cache.drop()
    rpc.shutdown()


if __name__ == "__main__":
    main()
