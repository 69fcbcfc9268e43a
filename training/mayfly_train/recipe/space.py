"""The parameters of task i, computed from the seed and i alone: a million cost no memory.

Every draw is a hash of (seed, parameter, i), so that no task depends on another, on the number of
samples, or on the order in which they are asked for. The product is walked in an order that is a
permutation of it, a new one each time round, so that n samples take every combination k or k + 1
times.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Union

from mayfly_train.recipe.document import Parameter

Value = Union[str, int, float, bool]
# The values of a block of tasks, from their numbers and their places in the product.
Column = Callable[[range, Sequence[int]], list[Value]]

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_ROUNDS = 4
_TABLE = 1 << 16
_DIGITS = 6


def mix(number: int) -> int:
    """64 well mixed bits of a number: the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def key_of(*parts: object) -> int:
    """A 64-bit key from words and numbers, the same on every machine."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Permutation:
    """A bijection of 0 … size - 1 in constant memory.

    A short one is a table, sorted by hashes. A long one is a Feistel network over pairs below
    √size, walked until it is below size again (Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002, the generalised Feistel cipher).
    """

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        self._table: list[int] = []
        if size <= _TABLE:
            hashes = _hashes(range(size), key)
            self._table = sorted(range(size), key=hashes.__getitem__)
            return
        self._side = math.isqrt(size - 1) + 1
        self._keys = _hashes(range(1, _ROUNDS + 1), key)

    def part(self, start: int, stop: int) -> list[int]:
        """Where start … stop - 1 go."""
        return self._table[start:stop] or [self._walk(index) for index in range(start, stop)]

    def _walk(self, index: int) -> int:
        side = self._side
        while True:
            left, right = divmod(index, side)
            for key in self._keys:
                left, right = right, (left + mix(key ^ right)) % side
            index = left * side + right
            if index < self._size:
                return index


class Space:
    """All parameters of one experiment; globs are resolved already, to `values`.

    Tasks are computed by the block and by the column, which is several times faster.
    """

    def __init__(self, parameters: Sequence[Parameter], samples: int, seed: int) -> None:
        self.names = tuple(parameter.name for parameter in parameters)
        self._samples = samples
        self._columns: list[Column] = []
        stride = 1
        for parameter in reversed(parameters):  # the last one that is listed varies fastest
            if parameter.drawn:
                self._columns.append(_drawn(parameter, key_of(seed, parameter.name)))
            else:
                values = _listed(parameter)
                self._columns.append(_chosen(values, stride))
                stride *= len(values)
        self._columns.reverse()
        self.product = stride
        self.count = samples or stride
        self._key = key_of(seed, "order")
        self._round, self._order = -1, Permutation(1, 0)

    def columns(self, start: int, stop: int) -> list[list[Value]]:
        """The values of tasks start … stop - 1: one list for each parameter."""
        numbers = range(start, stop)
        combinations = self._combinations(numbers) if self._samples else numbers
        return [column(numbers, combinations) for column in self._columns]

    def values(self, number: int) -> list[Value]:
        """The values of one task, in the order of `names`."""
        return [column[0] for column in self.columns(number, number + 1)]

    def _combinations(self, numbers: range) -> list[int]:
        """Places in the product: round after round of all of them, each in an order of its own."""
        found: list[int] = []
        number = numbers.start
        while number < numbers.stop:
            turn, position = divmod(number, self.product)
            if turn != self._round:
                self._round = turn
                self._order = Permutation(self.product, mix(self._key + turn * _STEP & _MASK))
            end = min(self.product, position + numbers.stop - number)
            found += self._order.part(position, end)
            number += end - position
        return found


def _listed(parameter: Parameter) -> Sequence[Value]:
    if parameter.kind == "integers":
        return range(int(parameter.low), int(parameter.high) + 1)
    return parameter.values


def _chosen(values: Sequence[Value], stride: int) -> Column:
    size = len(values)
    if size == 1:
        return lambda _, combinations: [values[0]] * len(combinations)
    return lambda _, combinations: [values[one // stride % size] for one in combinations]


def _drawn(parameter: Parameter, key: int) -> Column:
    """The function that draws a parameter for a block of tasks."""
    low, high, values = parameter.low, parameter.high, parameter.values
    digits = _digits(low, high)

    def parts(numbers: range) -> list[float]:
        return [(bits >> 11) * 2.0**-53 for bits in _hashes(numbers, key)]  # [0, 1)

    def uniform(numbers: range, _: Sequence[int]) -> list[Value]:
        span = high - low
        return [_short(low + span * part, low, high, digits) for part in parts(numbers)]

    def loguniform(numbers: range, _: Sequence[int]) -> list[Value]:
        ratio = high / low
        return [_short(low * ratio**part, low, high, digits) for part in parts(numbers)]

    def whole(numbers: range, _: Sequence[int]) -> list[Value]:
        first, size = int(low), int(high - low) + 1
        return [first + int(size * part) for part in parts(numbers)]

    def choice(numbers: range, _: Sequence[int]) -> list[Value]:
        size = len(values)
        return [values[int(size * part)] for part in parts(numbers)]

    kinds: dict[str, Column] = {"uniform": uniform, "loguniform": loguniform, "int": whole}
    return kinds.get(parameter.kind, choice)


def _hashes(numbers: range, key: int) -> list[int]:
    """64 bits for each number: `mix`, written out, because calls are what costs."""
    found = []
    for number in numbers:
        bits = key + number * _STEP & _MASK
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _MASK
        found.append(bits ^ bits >> 31)
    return found


def _digits(low: float, high: float) -> int:
    """Six significant digits, which people can read and type again; more for a range that is
    narrow and far from zero, whose numbers have the first ones in common."""
    span, most = high - low, max(abs(low), abs(high))
    return min(_DIGITS + max(0, int(math.log10(most / span))), 17) if span > 0 else _DIGITS


def _short(value: float, low: float, high: float, digits: int) -> float:
    """A number with so many digits, and never out of range."""
    short = float(f"{value:.{digits}g}")
    return short if low <= short <= high else min(max(short, low), high)


def texts_of(column: Sequence[Value]) -> list[str]:
    """Values as they stand in commands: true and false as in YAML, numbers without loss."""
    if bool in set(map(type, column)):
        return [str(one).lower() if isinstance(one, bool) else str(one) for one in column]
    return list(map(str, column))
