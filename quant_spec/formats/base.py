"""QuantFormat and its registry. A format is one file beside this one: nothing else has to know of it."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import attrs

from quant_spec.arguments import MAX_SIZE, check_count, check_instance, check_weight_shape
from quant_spec.errors import ConfigError, QuantSpecError, unknown
from quant_spec.granularity import PerBlock, PerGroup
from quant_spec.quant_key import QuantKey, ScaleDesc

Conversion: TypeAlias = Callable[..., object]
"""A plain-torch conversion; typed in `quant_kernels.reference`, since this package does not import torch."""

ENTRY_POINT_GROUP: Final = "quant_spec.formats"


@attrs.frozen
class QuantFormat:
    """A format that a request may name and a weight can be quantized to.

    Attributes:
        name: the canonical word of online requests.
        summary: one line for tables and editors.
        weight: key of the quantized weight.
        activation: key of the activation that goes with it when the request does not say; None: unquantized.
        aliases: other words of online requests.
        shorthands: words of vLLM requests (`targets`, `linear`, `moe`) that mean this format.
        slots: layer kinds (`linear`, `moe`) for which a shorthand may be used.
        allowed_activations: activations that some backend can run with this weight; the default is always among them.
        scale_roundings: ways to round a power-of-two scale, the default first; empty if scales are not powers of two.
        k_multiple: the input side, per rank, must be a multiple of this.
        reference: plain-torch quantizer `(weight, scale_rounding) -> (data, scale, second_scale or None)`, callable
            or `module:function`; None if no conversion to it exists.
        dequantize: plain-torch dequantizer `(data, scale, second_scale, dtype) -> weight`, likewise.
        requestable: False for formats known as sources only.
    """

    name: str
    summary: str
    weight: QuantKey
    activation: QuantKey | None
    aliases: tuple[str, ...] = ()
    shorthands: tuple[str, ...] = ()
    slots: tuple[str, ...] = ("linear", "moe")
    allowed_activations: tuple[QuantKey, ...] = ()
    scale_roundings: tuple[str, ...] = ()
    k_multiple: int = 1
    reference: str | Conversion | None = None
    dequantize: str | Conversion | None = None
    requestable: bool = True

    @property
    def activations(self) -> tuple[QuantKey | None, ...]:
        """Activations that go with this weight: unquantized, the default, and the other allowed ones."""
        found: list[QuantKey | None] = [None]
        for key in (self.activation, *self.allowed_activations):
            if key not in found:
                found.append(key)
        return tuple(found)

    def check_k(self, k: int) -> bool:
        """Tell whether an input side of `k` elements can be stored.

        Raises:
            ArgumentError: `k` is no size.
        """
        check_count("k", k, most=MAX_SIZE)
        return k % self.k_multiple == 0

    def data_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the stored codes of a weight of `shape` [.., N, K], in elements of the storage dtype.

        Raises:
            ArgumentError: that is no shape of a weight.
        """
        check_weight_shape(shape)
        return (*shape[:-1], -(-shape[-1] // self.weight.element.per_byte))

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight of `shape` [.., N, K].

        Raises:
            ArgumentError: that is no shape of a weight.
        """
        check_weight_shape(shape)
        return (*shape[:-2], *self.weight.scale.granularity.scale_shape(shape[-2], shape[-1]))

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of codes and scales of a weight of `shape` [.., N, K]."""
        return key_nbytes(self.weight, shape)


def _scale_bytes(scale: ScaleDesc | None, shape: tuple[int, ...], default_bits: int) -> int:
    if scale is None:
        return 0
    count = 1
    for size in scale.granularity.scale_shape(shape[-2], shape[-1]):
        count *= size
    for size in shape[:-2]:
        count *= size
    return count * (scale.dtype.bits if scale.dtype else default_bits) // 8


def key_nbytes(key: QuantKey, shape: tuple[int, ...]) -> int:
    """Return the bytes that a weight of `shape` [.., N, K] takes in the format `key`, scales included.

    Codes of odd widths count as if packed without gaps. A scale whose dtype is open counts as fp32.

    Raises:
        ArgumentError: `key` is no key, or `shape` no shape of a weight.
    """
    check_instance("key", key, QuantKey)
    check_weight_shape(shape)
    elements = 1
    for size in shape:
        elements *= size
    codes = -(-elements * key.element.bits // 8)
    return codes + _scale_bytes(key.scale, shape, 32) + _scale_bytes(key.second_scale, shape, 32)


def engine_quant_type(key: QuantKey | None) -> str:
    """Return the granularity as serving engines name it.

    `No`, `per_Tensor`, `per_Token` (per-channel weights too), `per_1xN` for groups of N, `per_1x128` for 128 x 128 and
    1 x 128 blocks, `per_RxC` for other blocks.
    """
    if key is None:
        return "No"
    granularity = key.scale.granularity
    if isinstance(granularity, PerGroup):
        return f"per_1x{granularity.group_size}"
    if isinstance(granularity, PerBlock):
        rows = 1 if (granularity.rows, granularity.cols) == (128, 128) else granularity.rows
        return f"per_{rows}x{granularity.cols}"
    return "per_Tensor" if str(granularity) == "per_tensor" else "per_Token"


class FormatRegistry:
    """The formats by name, alias and shorthand. Files beside this one are read at first use."""

    def __init__(self) -> None:
        """Start empty; built-in formats load on first look-up, entry points on the first unknown name."""
        self._formats: dict[str, QuantFormat] = {}
        self._words: dict[str, str] = {}
        self._by_key: dict[QuantKey, QuantFormat | None] = {}
        self._loaded_builtins = False
        self._loaded_plugins = False
        # Always taken for a look-up: a thread must not see the registry while another one fills it. Re-entrant, since
        # a plug-in may look formats up while it is loaded.
        self._lock = threading.RLock()

    def register(self, quant_format: QuantFormat) -> QuantFormat:
        """Add a format and return it.

        Raises:
            QuantSpecError: the name, or one of the words, already means another format.
        """
        for word in (quant_format.name, *quant_format.aliases, *quant_format.shorthands):
            owner = self._words.get(word)
            if owner is not None and self._formats[owner] != quant_format:
                message = f"format {quant_format.name!r}: the word {word!r} already means format {owner!r}"
                raise QuantSpecError(message)
        self._by_key.clear()
        self._formats[quant_format.name] = quant_format
        for word in (quant_format.name, *quant_format.aliases, *quant_format.shorthands):
            self._words[word] = quant_format.name
        return quant_format

    def unregister(self, name: str) -> None:
        """Forget a format (for tests that define one)."""
        self._by_key.clear()
        del self._formats[name]
        self._words = {word: owner for word, owner in self._words.items() if owner != name}

    def _load_builtins(self) -> None:
        with self._lock:
            if self._loaded_builtins:
                return
            self._loaded_builtins = True
            import pkgutil  # noqa: PLC0415  (when the first format is asked for)

            package = importlib.import_module("quant_spec.formats")
            for module in pkgutil.iter_modules(package.__path__, "quant_spec.formats."):
                importlib.import_module(module.name)

    def _load_plugins(self) -> None:
        with self._lock:
            if self._loaded_plugins:
                return
            self._loaded_plugins = True
            from importlib.metadata import entry_points  # noqa: PLC0415  (22 ms, for an unknown word only)

            for entry in entry_points(group=ENTRY_POINT_GROUP):
                entry.load()

    def find(self, word: str) -> QuantFormat | None:
        """Return the format that `word` (name, alias or shorthand; trimmed, any case) means, or None."""
        self._load_builtins()
        word = word.strip().lower()
        if word not in self._words:
            self._load_plugins()
        owner = self._words.get(word)
        return None if owner is None else self._formats[owner]

    def of_key(self, key: QuantKey) -> QuantFormat | None:
        """Return the format whose weight prints like `key`, or None."""
        if key not in self._by_key:
            self._by_key[key] = next((each for each in self if each.weight.same_format(key)), None)
        return self._by_key[key]

    def __iter__(self) -> Iterator[QuantFormat]:
        """Iterate over the formats in order of name."""
        self._load_builtins()
        self._load_plugins()
        return iter(sorted(self._formats.values(), key=lambda quant_format: quant_format.name))


FORMATS: Final = FormatRegistry()


def register_format(quant_format: QuantFormat) -> QuantFormat:
    """Register a format under its name, aliases and shorthands, and return it.

    Raises:
        QuantSpecError: one of its words already means another format.
        ArgumentError: it is no format.
    """
    check_instance("quant_format", quant_format, QuantFormat)
    return FORMATS.register(quant_format)


def get_format(word: str | QuantFormat, path: str = "$") -> QuantFormat:
    """Return the format that `word` (name, alias or shorthand; trimmed, any case) means.

    >>> get_format("PTPC_FP8 ").weight.scale.granularity
    PerChannel()

    Raises:
        ConfigError: no format has that name; lists the names and the nearest.
        ArgumentError: it is no string.
    """
    if isinstance(word, QuantFormat):
        return word
    check_instance("word", word, str, QuantFormat)
    found = FORMATS.find(word)
    if found is None:
        raise ConfigError(unknown(path, "format", word, request_words()))
    return found


def format_of_key(key: QuantKey) -> QuantFormat | None:
    """Return the registered format whose weight prints like `key`, or None.

    Raises:
        ArgumentError: it is no key.
    """
    check_instance("key", key, QuantKey)
    return FORMATS.of_key(key)


def formats() -> tuple[QuantFormat, ...]:
    """Return all registered formats in order of name."""
    return tuple(FORMATS)


def request_words() -> tuple[str, ...]:
    """Return the words that an `online_quant_config` may use, canonical names first."""
    known = [each for each in FORMATS if each.requestable]
    return (*(each.name for each in known), *(alias for each in known for alias in each.aliases))
