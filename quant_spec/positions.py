r"""An engine for look-around, word bounds and flags that never backtracks: it computes with sets of positions.

A set of positions 0 … n of a name is one integer. What a sequence does to the set of positions at which it may begin is
found item by item: a character moves the positions at which it stands by one, an alternation unites, a repeat goes on
until nothing new is reached. Look-ahead asks the same backwards (from where can its body end anywhere?), look-behind
forwards (where can its body end, begun anywhere?): both become a set of positions that stay. Work is counted, so that
no expression and no name can take longer than `MAX_WORK` says.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from quant_spec.character_tests import character_test
from quant_spec.errors import TooMuchWorkError
from quant_spec.regex_tree import LOOKS, ONE_CHARACTER, Item, constants, inside, repeat_of

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_WORK: Final = 300_000
"""Operations on sets of positions, and tests of single characters, that one name may take."""

_AHEAD: Final = 1
_BOUNDS: Final = frozenset({constants.AT_BOUNDARY, constants.AT_NON_BOUNDARY})
_AT_START: Final = frozenset({constants.AT_BEGINNING, constants.AT_BEGINNING_STRING})


class Work:
    """Counts down what may still be done for one name."""

    def __init__(self, allowed: int = MAX_WORK) -> None:
        """Take the number of operations that are allowed."""
        self._left = allowed

    def spend(self, amount: int = 1) -> None:
        """Take off `amount`.

        Raises:
            TooMuchWorkError: less than that is left.
        """
        self._left -= amount
        if self._left < 0:
            raise TooMuchWorkError


class Positions:
    """The positions of one name, and what items do to sets of them. The name holds no line break."""

    def __init__(self, name: str, work: Work) -> None:
        """Take the name and what its matching may cost."""
        self._work = work
        work.spend(len(name))
        places: dict[str, int] = {}
        for index, character in enumerate(name):
            places[character] = places.get(character, 0) | 1 << index
        self._places = places
        self._length = len(name)
        self._all = (1 << (len(name) + 1)) - 1
        self._known: dict[tuple[int, int], int] = {}

    def match(self, items: tuple[Item, ...], flags: int) -> bool:
        """Tell whether the items match at the start of the name, as `re.match` does.

        Args:
            items: a parse tree without back-references, conditions and atomic groups; it must outlive this object.
            flags: the flags of `re` that hold outside groups that change them.

        Raises:
            TooMuchWorkError: it takes more than is left for this name.
        """
        return bool(self._after(items, 1, flags))

    # -- sets of positions ------------------------------------------------------------------------------------------

    def _accepted(self, item: Item, flags: int) -> int:
        """Return the positions whose character an item accepts."""
        key = (id(item), flags)
        found = self._known.get(key)
        if found is None:
            self._work.spend(len(self._places))
            test = character_test(item, flags)
            found = 0
            for character, positions in self._places.items():
                if test(character):
                    found |= positions
            self._known[key] = found
        return found

    def _fixed(self, item: Item, flags: int) -> int | None:
        """Return the positions at which an item without characters of its own holds; None for any other item."""
        operation, argument = item
        if operation not in LOOKS and operation is not constants.AT and operation is not constants.FAILURE:
            return None
        key = (id(item), flags)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._holds(operation, argument, flags)
        return found

    def _holds(self, operation: object, argument: object, flags: int) -> int:
        if operation is constants.FAILURE:
            return 0
        if operation is constants.AT:
            if argument in _BOUNDS:
                word = self._accepted(_WORD, flags)
                bound = word ^ (word << 1)
                return bound if argument is constants.AT_BOUNDARY else self._all & ~bound
            return 1 if argument in _AT_START else 1 << self._length
        assert isinstance(argument, tuple)  # noqa: S101  (shape of the parse tree)
        direction, body = argument[0], tuple(argument[1])
        walk = self._before if direction == _AHEAD else self._after
        # The body's items are kept by the tree, but not the tuple: what is known of them is keyed by item.
        found = walk(body, self._all, flags)
        return found if operation is constants.ASSERT else self._all & ~found

    def _after(self, items: tuple[Item, ...], starts: int, flags: int) -> int:
        """Return where a sequence can end that begins at one of `starts`."""
        for item in items:
            if not starts:
                break
            starts = self._through(item, starts, flags, self._after)
        return starts

    def _before(self, items: tuple[Item, ...], ends: int, flags: int) -> int:
        """Return where a sequence can begin that ends at one of `ends`."""
        for item in reversed(items):
            if not ends:
                break
            ends = self._through(item, ends, flags, self._before)
        return ends

    def _through(
        self, item: Item, positions: int, flags: int, walk: Callable[[tuple[Item, ...], int, int], int]
    ) -> int:
        """Return `positions` moved through one item, forwards or backwards as `walk` does."""
        self._work.spend()
        operation, argument = item
        if operation in ONE_CHARACTER:
            accepted = self._accepted(item, flags)
            return (positions & accepted) << 1 if walk == self._after else (positions >> 1) & accepted
        fixed = self._fixed(item, flags)
        if fixed is not None:
            return positions & fixed
        repeat = repeat_of(item)
        if repeat is not None:
            return self._repeated(*repeat, positions, lambda body, given: walk(body, given, flags))
        if operation is constants.SUBPATTERN:
            assert isinstance(argument, tuple)  # noqa: S101  (shape of the parse tree)
            flags = _within(flags, argument[1], argument[2])
        found = 0
        for each in inside(item):
            found |= walk(each, positions, flags)
        return found

    @staticmethod
    def _repeated(
        least: int,
        most: int | None,
        body: tuple[Item, ...],
        positions: int,
        walk: Callable[[tuple[Item, ...], int], int],
    ) -> int:
        for _ in range(least):
            moved = walk(body, positions)
            if moved == positions:
                break
            positions = moved
        reached = fresh = positions
        rounds = 0
        while fresh and (most is None or rounds < most - least):
            fresh = walk(body, fresh) & ~reached
            reached |= fresh
            rounds += 1
        return reached


def _within(flags: int, added: int, removed: int) -> int:
    """Return the flags inside a group that changes them; ASCII and Unicode exclude each other."""
    if added & _TYPES:
        flags &= ~_TYPES
    return (flags | added) & ~removed


_TYPES: Final = int(re.ASCII | re.UNICODE)
_WORD: Final[Item] = (constants.IN, [(constants.CATEGORY, constants.CATEGORY_WORD)])
