"""QuantizationConfig: the frozen, long-lived object that engines ask for the format of every layer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from quant_spec.account import document_account
from quant_spec.answers import Answers
from quant_spec.arguments import check_count, check_instance, check_strings, wrong_argument
from quant_spec.decision import Decision, ModuleInfo, meet
from quant_spec.digest import digest_of
from quant_spec.errors import ConfigError, Defect, ResolveError, shown, wrong_type
from quant_spec.layer_config import UNQUANTIZED, LayerQuantConfig
from quant_spec.mapping import NameRules
from quant_spec.matching import Matcher, Outcome, check_name
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, PatternSpecs, get_parser
from quant_spec.patterns import Pattern
from quant_spec.quant_key import QuantKey

_NO_NAMES = NameRules()
_NO_FACTS = ModelFacts()


def _copied(value: object) -> object:
    """Return a copy of a document of which nothing is shared with it.

    Raises:
        ConfigError: it holds what JSON cannot say.
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(Defect("$", f"key {shown(key)} is no string", key))
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [each if type(each) is str else _copied(each) for each in value]
    raise ConfigError(Defect("$", f"holds a {type(value).__name__}, which JSON cannot say", value))


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Parse one document: what it spends on patterns is counted, and the end of the interpreter's stack refuses it."""
    try:
        with document_account():
            yield
    except RecursionError:
        raise ConfigError(Defect("$", "nested too deeply")) from None


@attrs.frozen
class QuantizationConfig:
    """How each layer of a model is quantized: by its checkpoint, or by a request over a checkpoint.

    Build it with `from_dict` or `from_online`. Every change returns a new object.

    Attributes:
        quant_method: `online` for a request, else the checkpoint's method; None: nothing is quantized.
        global_spec: format of a linear module that no entry names.
        layer_pattern_specs: entries with their formats; the first that covers a module wins.
        exclude_layers: entries that leave a module alone; they come before all others.
        class_specs: formats by class, after the patterns.
        kv_cache: format of the KV cache, or None.
        tensor_names: last parts of the names of the tensors that a quantized layer stores.
        source_dtype: dtype of unquantized weights, as torch names it.
        names: renames, fused modules, expert containers.
        source: for a request, the config of the checkpoint below it.
    """

    quant_method: str | None = None
    global_spec: LayerQuantConfig = UNQUANTIZED
    layer_pattern_specs: PatternSpecs = ()
    exclude_layers: tuple[Pattern, ...] = ()
    class_specs: PatternSpecs = ()
    kv_cache: QuantKey | None = None
    tensor_names: tuple[str, ...] = ("weight",)
    source_dtype: str = "bfloat16"
    names: NameRules = _NO_NAMES
    source: QuantizationConfig | None = None
    _document: object = attrs.field(default=None, repr=False, eq=False, alias="document")

    # -- making -----------------------------------------------------------------------------------------------------

    @classmethod
    @_bounded()
    def from_dict(
        cls,
        quantization_config: Mapping[str, object] | None,
        *,
        facts: ModelFacts = _NO_FACTS,
        names: NameRules = _NO_NAMES,
    ) -> QuantizationConfig:
        """Return the config of a checkpoint.

        Args:
            quantization_config: the object itself (with its `quant_method`), not all of config.json; None: unquantized.
            facts: what the parser may ask of config.json.
            names: renames from checkpoint to module spelling, fused modules, experts.

        Raises:
            ConfigError: with every defect of the object.
            ArgumentError: `facts` or `names` is something else.
        """
        check_instance("facts", facts, ModelFacts)
        check_instance("names", names, NameRules)
        if quantization_config is None:
            return cls(source_dtype=facts.torch_dtype, names=names)
        from quant_spec.parsers.detect import detect_method  # noqa: PLC0415  (parsers load when first needed)

        if not isinstance(quantization_config, Mapping):
            raise ConfigError(wrong_type("$", quantization_config, "object", "null"))
        method = detect_method(quantization_config, facts)
        if method is None:
            return cls(source_dtype=facts.torch_dtype, names=names, document=_copied(quantization_config))
        parsed = get_parser(method).parse(quantization_config, facts)
        return cls._from_parsed(parsed, quantization_config, facts.torch_dtype, names)

    @classmethod
    @_bounded()
    def from_online(
        cls,
        request: object,
        *,
        source: QuantizationConfig | None = None,
        shorthand: str | None = None,
        names: NameRules | None = None,
    ) -> QuantizationConfig:
        """Return a request layered over a checkpoint's config.

        Args:
            request: an `online_quant_config`, or an object of `targets` or `linear` and `moe`; {} or None: the source.
            source: the checkpoint's config; None: unquantized.
            shorthand: vLLM's word beside the object.
            names: fused modules and experts; None: those of the source.

        Raises:
            ConfigError: with every defect of the request, or the source's method cannot be converted.
            ArgumentError: another argument is something else.
        """
        check_instance("source", source, QuantizationConfig, none=True)
        check_instance("shorthand", shorthand, str, none=True)
        check_instance("names", names, NameRules, none=True)
        from quant_spec.parsers.requests import parse_request  # noqa: PLC0415  (parsers load when first needed)

        below = source if source is not None else cls(names=names or _NO_NAMES)
        if below.source is not None:
            raise ConfigError(Defect("$", "a request cannot be layered over another request"))
        parsed = parse_request(request, shorthand=shorthand)
        if parsed is None:
            return below if names is None else attrs.evolve(below, names=names)
        if below.quant_method is not None and not get_parser(below.quant_method).convertible:
            message = f"the checkpoint's quant_method {below.quant_method!r} cannot be converted by an online request"
            raise ConfigError(Defect("$", message, below.quant_method))
        document = {"request": request, "shorthand": shorthand}
        made = cls._from_parsed(parsed, document, below.source_dtype, names or below.names)
        source = attrs.evolve(below, names=names) if names else below
        return attrs.evolve(made, source=source, kv_cache=below.kv_cache)

    @classmethod
    def _from_parsed(
        cls, parsed: ParsedQuantConfig, document: object, dtype: str, names: NameRules
    ) -> QuantizationConfig:
        return cls(
            quant_method=parsed.quant_method,
            global_spec=parsed.global_spec,
            layer_pattern_specs=parsed.layer_pattern_specs,
            exclude_layers=parsed.exclude_layers,
            class_specs=parsed.class_specs,
            kv_cache=parsed.kv_cache,
            tensor_names=parsed.tensor_names,
            source_dtype=dtype,
            names=names,
            document=_copied(document),
        )

    def remapped(
        self,
        name_mapping: Mapping[str, str] | None = None,
        packed_modules_mapping: Mapping[str, Iterable[str]] | None = None,
    ) -> QuantizationConfig:
        """Return a config with these renames of checkpoint entries and these fused modules; None: as before.

        What engines call `remap_layer_name`. Doing it twice changes nothing. Requests are written in module names and
        are not renamed; the checkpoint below a request is.

        Raises:
            ConfigError: one of them is no such mapping.
        """
        changes: dict[str, Any] = {}
        if name_mapping is not None:
            changes["name_mapping"] = name_mapping
        if packed_modules_mapping is not None:
            changes["packed_modules_mapping"] = packed_modules_mapping
        return self.with_names(self.names.with_modules(**changes))

    def with_names(self, names: NameRules) -> QuantizationConfig:
        """Return a config, and the checkpoint below it, with other name rules.

        Raises:
            ArgumentError: `names` is something else.
        """
        check_instance("names", names, NameRules)
        source = None if self.source is None else self.source.with_names(names)
        return attrs.evolve(self, names=names, source=source)

    def with_excludes(self, *entries: str) -> QuantizationConfig:
        """Return a config that also leaves alone what `entries` cover (literals, globs, `re:`).

        Raises:
            ConfigError: an expression does not compile.
            ArgumentError: an entry is no string.
        """
        check_strings("entries", entries)
        added = tuple(Pattern.parse(text, f"with_excludes[{index}]") for index, text in enumerate(entries))
        return attrs.evolve(self, exclude_layers=(*self.exclude_layers, *added))

    def to_dict(self) -> dict[str, object] | None:
        """Return the document that was parsed (a request: under `request`); parsed again it gives an equal config."""
        found = _copied(self._document)
        assert found is None or isinstance(found, dict)  # noqa: S101  (only objects and null are parsed)
        return found

    # -- asking -----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def matcher(self) -> Matcher:
        """The entries, compiled once."""
        return Matcher(
            self.exclude_layers,
            self.layer_pattern_specs,
            self.class_specs,
            self.global_spec,
            self.names,
            mapped=self.source is None,
            below=None if self.source is None else self.source.matcher,
        )

    @functools.cached_property
    def _answers(self) -> Answers:
        return Answers(self)

    @functools.cached_property
    def _met(self) -> dict[tuple[int, int | None], LayerQuantConfig]:
        return {}

    def resolve(self, prefix: str) -> LayerQuantConfig:
        """Return the format of the module `prefix`: exclude, then the first pattern, then global.

        Raises:
            ResolveError: the name is empty, or the shards or experts of a fused module disagree.
            ArgumentError: it is no string.
        """
        try:
            return self._answers[prefix]
        except TypeError:
            check_instance("prefix", prefix, str)
            raise

    def resolve_afresh(self, name: str) -> LayerQuantConfig:
        """Return what `resolve` returns, without looking at or keeping earlier answers."""
        check_name(name)
        matcher = self.matcher
        if not matcher.is_plain(name):
            return self.explain(name).config
        source_index = None if self.source is None else self.source.matcher.first(name)
        try:
            return self.plain_format(matcher.first(name), source_index)
        except ResolveError:
            return self.explain(name).config  # raises again, with the name

    def plain_format(self, index: int, source_index: int | None) -> LayerQuantConfig:
        """Return the format of a module that is neither fused nor a container, by the entries that come first for it.

        Args:
            index: the least index of an entry of this config that covers it.
            source_index: likewise in the checkpoint's config; None: no entry covers it there.

        Raises:
            ResolveError: an activation is asked for alone, and the checkpoint has another one.
        """
        # All excludes leave a module alone in the same way.
        key = (0 if index < self.matcher.exclude_count else index, source_index)
        found = self._met.get(key)
        if found is None:
            found = self._met[key] = self._met_afresh(*key)
        return found

    def _met_afresh(self, index: int, source_index: int | None) -> LayerQuantConfig:
        outcome = self.matcher.outcomes[min(index, self.matcher.default_class)]
        if self.source is None:
            return outcome.spec.resolved()
        default = self.source.matcher.default_class
        below = self.source.plain_format(default if source_index is None else source_index, None)
        return meet("", outcome, below, None).config

    def resolve_many(self, names: Iterable[str]) -> dict[str, LayerQuantConfig]:
        """Return the format of each of `names`, the whole model in one pass.

        Raises:
            ResolveError: as `resolve`, for the first name that has no answer.
            ArgumentError: that is no collection of strings.
        """
        if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
            raise wrong_argument("names", names, "a collection of strings")
        return self._answers.of_many(names)

    def explain(self, prefix: str, module: ModuleInfo | None = None, *, tp: int = 1) -> Decision:
        """Return what the module becomes, why, and which entry (with its JSON path) said so.

        Args:
            prefix: the module's name.
            module: kind, class and shape where they are known; then what cannot be quantized is kept and says why.
            tp: tensor-parallel ranks.

        Raises:
            ResolveError: as `resolve`.
            ArgumentError: an argument is something else.
        """
        check_instance("prefix", prefix, str)
        check_instance("module", module, ModuleInfo, none=True)
        check_count("tp", tp, least=1)
        check_name(prefix)
        kind = module.kind_of(prefix) if module else None
        class_name = module.class_of(prefix) if module else None
        outcome = self.matcher.outcome(prefix, kind=kind, class_name=class_name)
        return self._decide(prefix, outcome, module, tp)

    def _decide(self, name: str, outcome: Outcome, module: ModuleInfo | None, tp: int) -> Decision:
        if self.source is not None:
            below = self.source.explain(name, module).config if module else self.source.resolve(name)
            return meet(name, outcome, below, module, tp)
        if module is not None and module.is_stored_unquantized:
            return Decision(name, UNQUANTIZED, outcome.why, outcome.entry, outcome.spec, UNQUANTIZED)
        return self._stored(name, outcome)

    def _stored(self, name: str, outcome: Outcome) -> Decision:
        stored = outcome.spec.resolved()
        return Decision(name, stored, outcome.why, outcome.entry, outcome.spec, stored, members=outcome.members)

    def global_decision(self) -> Decision:
        """Return what a linear module gets that no entry names; a requested format is given as if it could be made."""
        outcome = self.matcher.outcomes[self.matcher.default_class]
        if self.source is None:
            stored = outcome.spec.resolved()
            return Decision("", stored, outcome.why, None, outcome.spec, stored)
        if outcome.spec.weight_key is not None:
            return meet("", outcome, UNQUANTIZED, None)
        return meet("", outcome, self.source.global_decision().config, None)

    def unmatched(self, modules: Iterable[str]) -> tuple[Pattern, ...]:
        """Return the entries that fit none of `modules`: most are misspelt.

        Raises:
            ArgumentError: `modules` is no collection of strings.
            ResolveError: one of them cannot be a module's name.
        """
        fitting: set[int] = set()
        for name in check_strings("modules", modules):
            check_name(name)
            fitting |= self.matcher.survey(name)[0]
        entries = self.matcher.entries
        return tuple(entry for index, entry in enumerate(entries) if index not in fitting and entry.text)

    def digest(self) -> str:
        """Return a SHA-256 that changes whenever an answer can: a key for compile caches.

        The order of excludes does not count, that of patterns does; it is the same on every Python and torch.
        """
        return digest_of(self)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        from quant_spec.html import config_html  # noqa: PLC0415  (for notebooks only)

        return config_html(self)
