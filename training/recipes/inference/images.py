"""Put one folder of real images where the run keeps its data: the part that is not trained on."""

from __future__ import annotations

import argparse
import io
import sys

from digits import held_out
from PIL import Image

from mayfly_train.recipe.store import open_store


def main() -> int:
    """Write PNG files named by their number and label."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=int, required=True)
    parser.add_argument("--folders", type=int, required=True)
    parser.add_argument("--data", required=True)
    args = parser.parse_args()
    store = open_store(args.data, None)
    images, labels = held_out()
    for number in range(args.folder, len(images), args.folders):
        file = io.BytesIO()
        Image.fromarray(images[number]).save(file, "PNG")
        name = f"images/{args.folder:03d}/{number:05d}-{labels[number]}.png"
        store.write(name, file.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main())
