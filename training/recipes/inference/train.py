"""A linear model of the digits, saved as arrays; its accuracy is by cross-validation."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from digits import trained_on
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score


def main() -> int:
    """Train with one strength of regularisation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--c", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    images, labels = trained_on()
    pixels = images.reshape(len(images), -1) / 255
    model = LogisticRegression(C=args.c, max_iter=2000)
    accuracy = float(cross_val_score(model, pixels, labels, cv=3).mean())
    model.fit(pixels, labels)
    np.savez(args.out / "model.npz", weights=model.coef_, bias=model.intercept_)
    print(json.dumps({"accuracy": round(accuracy, 6)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
