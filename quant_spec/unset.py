"""UNSET: the third answer. A key that is absent, a key that is null and a key with a value are three inputs."""

from __future__ import annotations

import enum
from typing import Final, Literal, TypeAlias


class Unset(enum.Enum):
    """Type of the single value `UNSET`, which stands for a key that is absent from a document."""

    UNSET = "UNSET"

    def __bool__(self) -> Literal[False]:
        """Return False, so that `value or default` reads as for None."""
        return False

    def __repr__(self) -> str:
        """Return the name alone: it is what users see in a printed config."""
        return "UNSET"


UnsetType: TypeAlias = Literal[Unset.UNSET]
UNSET: Final[UnsetType] = Unset.UNSET
