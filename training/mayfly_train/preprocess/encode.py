"""Images and labels as the bytes of a file: TFRecords, or one NumPy array of float32 tensors."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from mayfly_train.convert import tfrecord
from mayfly_train.preprocess.options import TENSORS, Options

# Images uint8 [n, channels, rows, columns] and their labels int64 [n].
Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]
Shape = tuple[int, int, int]


def encode(
    batches: Iterable[Batch], examples: int, shape: Shape, options: Options
) -> Iterator[bytes]:
    """The content of a file with that many examples, in pieces of a batch each.

    A file of tensors is one structured array: field `image`, float32 of `shape`, and field
    `label`, int64. Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
    """
    if options.to == TENSORS:
        dtype = tensor_dtype(shape)
        yield _array_header(dtype, examples)
        for images, labels in batches:
            rows = np.empty(len(labels), dtype)
            rows["image"], rows["label"] = scale(images, options), labels
            yield rows.tobytes()
    else:
        encode_one = tfrecord.encode_float_example if options.floats else tfrecord.encode_example
        for images, labels in batches:
            values = scale(images, options) if options.floats else images
            yield b"".join(
                tfrecord.frame(encode_one(image.tobytes(), int(label)))
                for image, label in zip(values, labels)
            )


def scale(images: NDArray[np.uint8], options: Options) -> NDArray[np.float32]:
    """Pixels / 255, less the mean, by the standard deviation: little-endian float32.

    Exactly what programs compute from the IDX files, as there are only 256 values.
    """
    mean, std = options.normalise or (0.0, 1.0)
    values = (np.arange(256, dtype=np.float32) / 255 - np.float32(mean)) / np.float32(std)
    scaled: NDArray[np.float32] = values.astype("<f4")[images]
    return scaled


def tensor_dtype(shape: Shape) -> np.dtype[np.void]:
    """The type of one example in a file of tensors."""
    return np.dtype([("image", "<f4", shape), ("label", "<i8")])


def _array_header(dtype: np.dtype[np.void], examples: int) -> bytes:
    header = io.BytesIO()
    about = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": (examples,),
    }
    np.lib.format.write_array_header_1_0(header, about)
    return header.getvalue()
