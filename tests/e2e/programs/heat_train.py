"""The test repository's entrypoint: mnist_lightning.py, which can be told to fail.

With `--fail-on-node N` as its first words, it exits with 1 there before anything is trained.
"""

from __future__ import annotations

import os
import sys

import mnist_lightning

# Under torchrun GROUP_RANK is the rank that it gave the node.
NODE = os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", "0"))


def main() -> None:
    words = sys.argv[1:]
    if words and words[0] == "--fail-on-node":
        if words[1] == NODE:
            print("RuntimeError: this node was told to fail", flush=True)
            sys.exit(1)
        words = words[2:]
    print("node", NODE, "words", words, flush=True)
    sys.argv[1:] = words
    mnist_lightning.main()


if __name__ == "__main__":
    main()
