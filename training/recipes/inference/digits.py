"""The digits in two parts, as 8 x 8 images of bytes with their labels."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

TRAINED_ON = 1200

Part = tuple[np.ndarray, np.ndarray]


def trained_on() -> Part:
    """The first 1,200."""
    images, labels = _all()
    return images[:TRAINED_ON], labels[:TRAINED_ON]


def held_out() -> Part:
    """The other 597."""
    images, labels = _all()
    return images[TRAINED_ON:], labels[TRAINED_ON:]


def _all() -> Part:
    digits = load_digits()
    return (digits.images * (255 / 16)).astype(np.uint8), digits.target
