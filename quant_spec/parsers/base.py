"""What a parser is, what it returns, and the registry by `quant_method`."""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, TypeAlias, TypeVar

import attrs

from quant_spec.arguments import check_instance, check_strings, wrong_argument
from quant_spec.errors import ConfigError, Defect, QuantSpecError, nearest, shown
from quant_spec.layer_config import UNQUANTIZED, LayerQuantConfig
from quant_spec.patterns import Pattern
from quant_spec.quant_key import QuantKey

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ENTRY_POINT_GROUP: Final = "quant_spec.parsers"

REQUEST_SHAPES: Final = ("online", "targets")
"""Parsers of an operator's request: no checkpoint's `quant_method`."""

_GENERIC: Final = "quant_spec.parsers.generic"
BUILTIN_MODULES: Final[dict[str, str]] = {
    "online": "quant_spec.parsers.online",
    "targets": "quant_spec.parsers.targets",
    "quark": "quant_spec.parsers.quark",
    "auto-round": f"{_GENERIC}.auto_round",
    "awq": f"{_GENERIC}.awq",
    "bitsandbytes": f"{_GENERIC}.bitsandbytes",
    "compressed-tensors": f"{_GENERIC}.compressed_tensors",
    "fbgemm_fp8": f"{_GENERIC}.fbgemm",
    "fp8": f"{_GENERIC}.fp8",
    "fp_quant": f"{_GENERIC}.fp_quant",
    "gptq": f"{_GENERIC}.gptq",
    "hqq": f"{_GENERIC}.hqq",
    "modelopt": f"{_GENERIC}.modelopt",
    "mxfp4": f"{_GENERIC}.mxfp",
    "mxfp8": f"{_GENERIC}.mxfp",
    "torchao": f"{_GENERIC}.torchao",
    "w4afp8": f"{_GENERIC}.w4afp8",
}
"""Module of each parser that comes with the library; imported when its method is first asked for."""

PatternSpecs: TypeAlias = "tuple[tuple[Pattern, LayerQuantConfig], ...]"


@attrs.frozen
class ModelFacts:
    """What the parser of a checkpoint's document may ask of the model's config.json.

    Attributes:
        model_type: as in config.json, or None.
        torch_dtype: dtype of unquantized weights (`bfloat16` if config.json does not say).
        expert_dtype: DeepSeek-V4 says the format of its experts outside the quantization object.
        config_file: file in which the object was found (`hf_quant_config.json` for modelopt's sibling layout).
    """

    model_type: str | None = None
    torch_dtype: str = "bfloat16"
    expert_dtype: str | None = None
    config_file: str = "config.json"

    def __attrs_post_init__(self) -> None:
        """Refuse what config.json cannot say.

        Raises:
            ArgumentError: an attribute is no string.
        """
        for name in ("model_type", "torch_dtype", "expert_dtype", "config_file"):
            check_instance(name, getattr(self, name), str, none=name in {"model_type", "expert_dtype"})


@attrs.frozen
class ParsedQuantConfig:
    """The typed contract that every parser returns.

    Attributes:
        quant_method: the method that the document names.
        global_spec: format of a linear module that no entry names.
        layer_pattern_specs: per-layer entries with their formats, in order of precedence: the first that covers wins.
        exclude_layers: modules left alone (a checkpoint: stored unquantized; a request: kept at source).
        class_specs: formats by module class, after the patterns; they count as the document's global.
        kv_cache: format of the KV cache, or None.
        tensor_names: last parts of the names of the tensors that a quantized layer stores.
    """

    quant_method: str | None
    global_spec: LayerQuantConfig = UNQUANTIZED
    layer_pattern_specs: PatternSpecs = ()
    exclude_layers: tuple[Pattern, ...] = ()
    class_specs: PatternSpecs = ()
    kv_cache: QuantKey | None = None
    tensor_names: tuple[str, ...] = ("weight",)


class QuantParser(Protocol):
    """Reads the quantization object of one family of documents.

    Attributes:
        convertible: True if an online request over a checkpoint of this method can convert its weights.
    """

    convertible: ClassVar[bool]

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:
        """Return the parsed document.

        Raises:
            ConfigError: with every defect of the document.
        """
        ...


ParserClass = TypeVar("ParserClass", bound="Callable[[], QuantParser]")


class ParserRegistry:
    """The parsers by `quant_method`. Third parties register by decorator or by entry point."""

    def __init__(self) -> None:
        """Start empty; a built-in parser is read when asked for, entry points on the first unknown method."""
        self._parsers: dict[str, QuantParser] = {}
        self._loaded_plugins = False
        # A thread must not see the registry while another one fills it; re-entrant, since a plug-in may ask it too.
        self._lock = threading.RLock()

    def register(self, methods: tuple[str, ...], parser: QuantParser) -> None:
        """Add a parser under each of `methods`.

        Raises:
            QuantSpecError: one of them has a parser already.
        """
        for method in methods:
            if method in BUILTIN_MODULES and type(parser).__module__ != BUILTIN_MODULES[method]:
                message = f"quant_method {method!r} already has the parser of {BUILTIN_MODULES[method]}"
                raise QuantSpecError(message)
            if method in self._parsers and type(self._parsers[method]) is not type(parser):
                message = f"quant_method {method!r} already has the parser {type(self._parsers[method]).__name__}"
                raise QuantSpecError(message)
        self._parsers.update(dict.fromkeys(methods, parser))

    def unregister(self, method: str) -> None:
        """Forget the parser of a method (for tests that define one)."""
        del self._parsers[method]

    def _load_builtin(self, method: str) -> None:
        module = BUILTIN_MODULES.get(method)
        if module is not None:
            importlib.import_module(module)

    def _load_plugins(self) -> None:
        with self._lock:
            if self._loaded_plugins:
                return
            self._loaded_plugins = True
            from importlib.metadata import entry_points  # noqa: PLC0415  (22 ms, for an unknown word only)

            for entry in entry_points(group=ENTRY_POINT_GROUP):
                parser_class = entry.load()
                if entry.name not in self._parsers:  # a decorated class has registered itself
                    self.register((entry.name,), parser_class())

    def find(self, method: str) -> QuantParser | None:
        """Return the parser of `method`, or None."""
        if method not in self._parsers:
            self._load_builtin(method)
        if method not in self._parsers:
            self._load_plugins()
        return self._parsers.get(method)

    def methods(self) -> tuple[str, ...]:
        """Return the known methods of checkpoints in order of name."""
        self._load_plugins()
        return tuple(sorted({*self._parsers, *BUILTIN_MODULES} - set(REQUEST_SHAPES)))


PARSERS: Final = ParserRegistry()


def register_quant_parser(*methods: str) -> Callable[[ParserClass], ParserClass]:
    """Register the decorated parser class under the given `quant_method` words.

    Raises:
        ArgumentError: a method is no string, or what is decorated no parser class.
        QuantSpecError: a method has a parser already.
    """
    check_strings("methods", methods)

    def decorate(parser_class: ParserClass) -> ParserClass:
        if not hasattr(parser_class, "parse"):
            raise wrong_argument("parser_class", parser_class, "a class with a method parse")
        PARSERS.register(methods, parser_class())
        return parser_class

    return decorate


def get_parser(method: str) -> QuantParser:
    """Return the parser of `quant_method` `method`.

    Raises:
        ConfigError: no parser is registered under that word; lists the methods and the nearest.
        ArgumentError: it is no string.
    """
    check_instance("method", method, str)
    parser = PARSERS.find(method)
    if parser is None:
        known = PARSERS.methods()
        near = nearest(method, known)
        hint = f"did you mean {near!r}?" if near else ""
        raise ConfigError(Defect("$.quant_method", f"unsupported quant_method {shown(method)}", method, known, hint))
    return parser
