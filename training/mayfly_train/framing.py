"""TFRecord framing looked at in passing: does a file end where a record ends?

Only lengths are followed, no checksum is computed: that costs a node next to nothing, needs no
library, and finds a file that was cut. `convert.tfrecord` checks everything, on the control side.
"""

from __future__ import annotations

import struct

SUFFIXES = (".tfrecords", ".tfrecord")
_LENGTH = struct.Struct("<Q")
_HEADER_BYTES = 12  # length and its checksum
_AROUND_BYTES = _HEADER_BYTES + 4  # and the checksum of the data
_GZIP = b"\x1f\x8b"
_ZLIB = (b"\x78\x01", b"\x78\x9c", b"\x78\xda")


class Framing:
    """Follows the records of one file of `size` bytes, fed in pieces.

    A file that TensorFlow compressed as a whole has no framing outside, and counts as whole.
    """

    def __init__(self, size: int):
        self._size = size
        self._held, self._skip = b"", 0
        self._started = self._compressed = False

    def feed(self, chunk: bytes) -> None:
        """Look at the next bytes."""
        if self._compressed:
            return
        data = self._held + chunk if self._held else chunk
        if not self._started and len(data) >= _LENGTH.size:
            self._started, self._compressed = True, is_compressed(data, self._size)
        position = self._skip
        while position + _HEADER_BYTES <= len(data):
            position += _LENGTH.unpack_from(data, position)[0] + _AROUND_BYTES
        self._held, self._skip = data[position:], max(0, position - len(data))

    @property
    def whole(self) -> bool:
        """Whether what was fed ends where a record ends."""
        return self._compressed or not (self._held or self._skip)


def is_compressed(start: bytes, size: int) -> bool:
    """Whether a file that begins so is a compressed one; no record is longer than its file."""
    if len(start) < _LENGTH.size or _LENGTH.unpack_from(start)[0] <= size:
        return False
    return start[:2] == _GZIP or start[:2] in _ZLIB
