"""TFRecord files of examples, most of them `image`/`label`, written and read without TensorFlow.

Framing: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
(length, masked CRC-32C of the length, data, masked CRC-32C of the data). Messages:
tensorflow/core/example/{example,feature}.proto. The few fields that we need are encoded here
because protobuf does not promise the order of map entries, and our output is deterministic.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import google_crc32c

from mayfly_train import framing
from mayfly_train.errors import BadInput

_MASK_DELTA = 0xA282EAD8
_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
# Wire types of protobuf: https://protobuf.dev/programming-guides/encoding/
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Writer:
    """Writes one TFRecord file; a context manager."""

    def __init__(self, path: Path):
        self._stream = path.open("wb", buffering=1 << 20)

    def write(self, record: bytes) -> None:
        """Append one record."""
        self._stream.write(frame(record))

    def close(self) -> None:
        """Write out what is buffered and close the file."""
        self._stream.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def frame(record: bytes) -> bytes:
    """A record as it stands in a file: length and data, each with its checksum."""
    length = struct.pack("<Q", len(record))
    return b"".join(
        (length, _FOOTER.pack(_masked_crc(length)), record, _FOOTER.pack(_masked_crc(record)))
    )


def read(path: Path) -> Iterator[bytes]:
    """The records of a file, in order. Raises BadInput where a checksum or the end is wrong."""
    with path.open("rb") as stream:
        while header := stream.read(_HEADER.size):
            if len(header) < _HEADER.size:
                raise BadInput(f"{path} ends within a record — copy it again")
            length, length_crc = _HEADER.unpack(header)
            if _masked_crc(header[:8]) != length_crc:
                raise BadInput(f"not a TFRecord file, or damaged: {path} — copy it again")
            body = stream.read(length + _FOOTER.size)
            if len(body) < length + _FOOTER.size:
                raise BadInput(f"{path} ends within a record — copy it again")
            record = body[:length]
            if _masked_crc(record) != _FOOTER.unpack(body[length:])[0]:
                raise BadInput(f"a record of {path} is damaged — copy it again")
            yield record


def require_whole(path: Path) -> None:
    """Raise BadInput unless every record of a file is whole; a compressed file is not looked into.

    TensorFlow reads compressed files when it is told to; their own checksums guard them.
    """
    with path.open("rb") as stream:
        start = stream.read(_HEADER.size)
    if not framing.is_compressed(start, path.stat().st_size):
        for _ in read(path):
            pass


def encode_example(image: bytes, label: int) -> bytes:
    """A tf.train.Example with features `image` (one bytes value) and `label` (one int64)."""
    return _example(_field(1, _field(1, image)), label)  # Feature.bytes_list { BytesList.value }


def encode_float_example(image: bytes, label: int) -> bytes:
    """The same with float32 values, given as little-endian bytes, as `image`."""
    return _example(_field(2, _field(1, image)), label)  # Feature.float_list { packed value }


def decode_example(record: bytes) -> tuple[bytes, int]:
    """The image bytes and the label of an example. Raises BadInput when one is missing."""
    found: dict[bytes, bytes] = {}
    try:
        for features in _values(record, 1):
            for entry in _values(features, 1):
                found[_values(entry, 1)[0]] = _values(entry, 2)[0]
        image = _values(_values(found[b"image"], 1)[0], 1)[0]
        numbers = _values(found[b"label"], 3)[0]
        packed = _values(numbers, 1)[0]
        return image, _read_varint(packed, 0)[0]
    except (IndexError, KeyError, struct.error):
        raise BadInput("not an example with features 'image' and 'label'") from None


def encode(features: Mapping[str, Sequence[bytes] | Sequence[int]]) -> bytes:
    """A tf.train.Example with these features: values of bytes, or whole numbers from 0 on. The same
    features give the same bytes, in whatever order they come."""
    return _field(1, b"".join(_entry(k.encode(), _feature(features[k])) for k in sorted(features)))


def decode(record: bytes) -> dict[str, list[bytes] | list[int]]:
    """The features of an example of bytes and of whole numbers. Raises BadInput when it is none."""
    found: dict[str, list[bytes] | list[int]] = {}
    try:
        for features in _values(record, 1):
            for entry in _values(features, 1):
                feature = _values(entry, 2)[0]
                texts, numbers = _values(feature, 1), _values(feature, 3)
                name = _values(entry, 1)[0].decode()
                found[name] = _unpacked(numbers[0]) if numbers else _values(texts[0], 1)
    except (IndexError, ValueError):
        raise BadInput("not an example with features of bytes and whole numbers") from None
    return found


def _feature(values: Sequence[bytes] | Sequence[int]) -> bytes:
    texts = [value for value in values if isinstance(value, bytes)]
    if texts or not values:
        return _field(1, b"".join(_field(1, text) for text in texts))
    packed = b"".join(_varint(value) for value in values if isinstance(value, int))
    return _field(3, _field(1, packed))


def _unpacked(int64_list: bytes) -> list[int]:
    """The numbers of an Int64List, whose values are packed."""
    found = []
    for packed in _values(int64_list, 1):
        position = 0
        while position < len(packed):
            value, position = _read_varint(packed, position)
            found.append(value)
    return found


def _masked_crc(data: bytes) -> int:
    crc = int(google_crc32c.value(data))
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def _example(image_feature: bytes, label: int) -> bytes:
    label_feature = _field(3, _field(1, _varint(label)))  # Feature.int64_list { packed value }
    features = _entry(b"image", image_feature) + _entry(b"label", label_feature)
    return _field(1, features)  # Example.features


def _entry(key: bytes, feature: bytes) -> bytes:
    return _field(1, _field(1, key) + _field(2, feature))  # one entry of Features.feature


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:  # noqa: PLR2004
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _values(message: bytes, number: int) -> list[bytes]:
    """The length-delimited values of one field, and varints as they are encoded."""
    values, position = [], 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        start = position
        kind = tag & 7
        if kind == _VARINT:
            _, position = _read_varint(message, position)
        elif kind == _BYTES:
            length, start = _read_varint(message, position)
            position = start + length
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        else:
            raise IndexError
        if position > len(message):
            raise IndexError
        if tag >> 3 == number:
            values.append(message[start:position])
    return values


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004
            return value, position
        shift += 7
