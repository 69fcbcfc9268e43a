"""The test repository's entrypoint: mnist_lightning.py on nodes that share no file system.

With `--fail-on-node N` as its first words, it exits with 1 there before anything is trained.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import mnist_lightning
import torch.distributed as dist

own = mnist_lightning.last_checkpoint
# Under torchrun GROUP_RANK is the rank that it gave the node.
NODE = os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", "0"))


def shared_checkpoint(job_dir: str) -> str | None:
    """Rank 0's last checkpoint, brought to all: only rank 0 has written any."""
    found = own(job_dir)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return found
    if not dist.is_initialized():
        rank, world = int(os.environ.get("RANK", NODE)), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", rank=rank, world_size=world)
    box: list[tuple[str, bytes] | None] = [None]
    if dist.get_rank() == 0 and found:
        path = Path(found.removeprefix("file://"))
        box = [(path.name, path.read_bytes())]
    dist.broadcast_object_list(box, src=0)
    if box[0] is None:
        return None
    name, content = box[0]
    path = Path(job_dir, "checkpoints", name)
    if dist.get_rank() != 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(path)


def main() -> None:
    words = sys.argv[1:]
    if words and words[0] == "--fail-on-node":
        if words[1] == NODE:
            print("RuntimeError: this node was told to fail", flush=True)
            sys.exit(1)
        words = words[2:]
    print("node", NODE, "words", words, flush=True)
    sys.argv[1:] = words
    mnist_lightning.last_checkpoint = shared_checkpoint
    mnist_lightning.main()


if __name__ == "__main__":
    main()
