"""Two agents of one process call each other: a test of an installed wheel, without torch."""

import threading

import numpy as np
import tensorferry_core as tf


def main() -> None:
    sums: list[np.ndarray] = []

    def reduce(agent: tf.Agent) -> None:
        sums.append(agent.group("ab").all_reduce(np.ones(3)).result())

    with tf.StoreServer() as store, tf.Agent("a", rendezvous=store.url) as a, tf.Agent("b", rendezvous=store.url) as b:
        b.expose(lambda array: array * 2, name="double")
        assert (a.call("b", "double", (np.ones(100_000),)) == 2).all()
        threads = [threading.Thread(target=reduce, args=(agent,)) for agent in (a, b)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(sums) == 2 and all((total == 2).all() for total in sums)
    print(f"tensorferry-core {tf.__version__} works")


if __name__ == "__main__":
    main()
