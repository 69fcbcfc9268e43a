"""Classify every image of a folder with a saved model; one line of CSV an image."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from mayfly_train.recipe.store import open_store


def main() -> int:
    """Classify one folder, which is a directory or a prefix in S3."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = np.load(args.model / "model.npz")
    store = open_store(args.folder, None)
    names = [name for name in store.names("") if name.endswith(".png")]
    pixels = np.stack([_pixels(store.read(name)) for name in names])
    classes = (pixels @ model["weights"].T + model["bias"]).argmax(axis=1)
    lines = [f"{name},{label}\n" for name, label in zip(names, classes)]
    (args.out / "classes.csv").write_text("".join(lines), encoding="utf-8")
    print(json.dumps({"images": len(names)}))
    return 0


def _pixels(file: bytes | None) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file or b"")), dtype=np.float64).reshape(-1) / 255


if __name__ == "__main__":
    sys.exit(main())
