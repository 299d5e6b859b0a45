"""Globs over dotted module names: `*` (dots too), `?`, `[...]`, `[!...]`; case-sensitive, over the whole string."""

from __future__ import annotations

import fnmatch
import functools
import re


@functools.lru_cache(maxsize=65_536)
def compile_glob(text: str) -> re.Pattern[str]:
    """Return the regular expression of a glob. Compiled once: `fnmatch` itself remembers 256 on Python 3.10."""
    return re.compile(fnmatch.translate(text))
