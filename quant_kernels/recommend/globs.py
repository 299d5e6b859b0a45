"""Writes a choice as a request: as few entries as cover it, checked name by name."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final

from quant_spec import QuantizationConfig, get_format
from quant_spec.globs import compile_glob

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from quant_kernels.recommend.choose import Chosen
    from quant_kernels.recommend.measure import Measured

KEEP: Final = None
_INDEX: Final = re.compile(r"(?<=\.)\d+(?=\.)")


def request_of(measured: Measured, chosen: Chosen) -> dict[str, object]:
    """Return an `online_quant_config` that gives each layer its chosen format, and leaves everything else as it is.

    The format of most layers becomes the global one; entries for the others follow, the narrow before the wide, since
    the first that fits decides.
    """
    wanted = {module: chosen.options[unit.name].format for unit in measured.units for module in unit.modules}
    wanted |= dict.fromkeys(measured.left_out, KEEP)
    counts = Counter(format_name for format_name in wanted.values() if format_name is not None)
    usual = counts.most_common(1)[0][0] if counts else None
    patterns: dict[str, str] = {}
    excludes: list[str] = []
    for glob, format_name in _entries(wanted, usual):
        if format_name is None:
            excludes.append(glob)
        else:
            patterns[glob] = format_name
    document: dict[str, object] = {}
    if usual is not None:
        document["global_quant_config"] = usual
    if patterns:
        document["layer_quant_config"] = patterns
    if excludes:
        document["exclude_layer"] = excludes
    return document if _gives(document, wanted) else _by_name(wanted, usual)


def _by_name(wanted: Mapping[str, str | None], usual: str | None) -> dict[str, object]:
    """Return the request with one entry a layer."""
    document: dict[str, object] = {} if usual is None else {"global_quant_config": usual}
    patterns = {name: word for name, word in wanted.items() if word not in (usual, None)}
    if patterns:
        document["layer_quant_config"] = patterns
    excludes = [name for name, word in wanted.items() if word is None]
    if excludes:
        document["exclude_layer"] = excludes
    return document


def _gives(document: dict[str, object], wanted: Mapping[str, str | None]) -> bool:
    """Tell whether a request gives every layer what is wanted."""
    config = QuantizationConfig.from_online(document)
    keys = {name: str(get_format(name).weight) for name in set(wanted.values()) if name is not None}
    for name, answer in config.resolve_many(wanted).items():
        word = wanted[name]
        if (str(answer.weight) if answer.is_quantized else None) != (None if word is None else keys[word]):
            return False
    return True


def _entries(wanted: Mapping[str, str | None], usual: str | None) -> Iterator[tuple[str, str | None]]:
    """Yield globs and formats for the layers that are not of the usual one."""
    by_template: dict[str, dict[str, str | None]] = defaultdict(dict)
    for name, word in wanted.items():
        by_template[_INDEX.sub("*", name, count=1)][name] = word
    whole: dict[str, str | None] = {}
    narrow: list[tuple[str, str | None]] = []
    for template, layers in by_template.items():
        words = [word for word in layers.values() if word is not None]  # an exclude would dominate: narrow ones only
        most = Counter(words).most_common(1)[0][0] if words else None
        whole[template] = most
        for word in dict.fromkeys(layers.values()):
            if word == most:
                continue
            names = [name for name, own in layers.items() if own == word]
            narrow += [(glob, word) for glob in _ranges(template, names)]
    yield from _fused(narrow)
    left = {template: word for template, word in whole.items() if word != usual}
    while left:
        glob, covered = _widest(left, whole, list(by_template))
        yield glob, left[covered[0]]
        for template in covered:
            del left[template]


def _fused(entries: Sequence[tuple[str, str | None]]) -> Iterator[tuple[str, str | None]]:
    """Yield entries, those for q, k and v of the same blocks as one."""
    known = set(entries)
    for glob, word in entries:
        stem, letter = glob[:-6], glob[-6:-5]
        if not glob.endswith("_proj") or letter not in "qkv" or not stem.endswith("."):
            yield glob, word
        elif all((f"{stem}{each}_proj", word) in known for each in "qkv"):
            if letter == "q":
                yield f"{stem}[qkv]_proj", word
        else:
            yield glob, word


def _ranges(template: str, names: Iterable[str]) -> Iterator[str]:
    """Yield globs over the block indices of some layers of a template, one for each ten blocks.

    >>> list(_ranges("h.*.down_proj", ["h.3.down_proj", "h.4.down_proj", "h.12.down_proj"]))
    ['h.[34].down_proj', 'h.12.down_proj']
    """
    tens: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found = _INDEX.search(name)
        if found is None:
            yield name
            continue
        tens[found[0][:-1]].append(found[0][-1])
    for head, digits in tens.items():
        ordered = "".join(sorted(digits))
        run = len(ordered) > 2 and ord(ordered[-1]) - ord(ordered[0]) == len(ordered) - 1  # noqa: PLR2004
        inside = f"{ordered[0]}-{ordered[-1]}" if run else ordered
        yield template.replace("*", f"{head}[{inside}]" if len(ordered) > 1 else f"{head}{ordered}", 1)


def _widest(
    left: Mapping[str, str | None], whole: Mapping[str, str | None], templates: Sequence[str]
) -> tuple[str, list[str]]:
    """Return the glob that covers most of the templates left, and none of another format."""
    best: tuple[str, list[str]] | None = None
    for template, word in left.items():
        for glob in _candidates(template):
            pattern = compile_glob(glob)
            covered = [each for each in templates if pattern.fullmatch(each.replace("*", "0"))]
            if any(whole[each] != word for each in covered):
                continue
            fresh = [each for each in covered if each in left]
            if best is None or (len(fresh), -len(glob)) > (len(best[1]), -len(best[0])):
                best = glob, fresh
    if best is None:
        first = next(iter(left))
        return first, [first]
    return best


def _candidates(template: str) -> Iterator[str]:
    """Yield globs for a template: of a parent, and of its own last segments, the short ones first."""
    segments = template.split(".")
    for at in range(len(segments) - 2, 0, -1):
        if segments[at] != "*":
            yield f"*.{segments[at]}.*"
    for count in range(1, len(segments)):
        tail = segments[-count:]
        if "*" in tail:
            break
        yield f"*.{'.'.join(tail)}"
        fused = re.fullmatch(r"[qkv]_proj", tail[-1])
        if fused:
            yield f"*.{'.'.join([*tail[:-1], '[qkv]_proj'])}"
    yield template
