"""Backends: which kernels run a layer of given weight and activation formats, on which architecture.

A registry that an engine fills, or takes from here. `select_backend` returns the best one for a layer, or says which
activations would have been accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import attrs

from quant_spec.arguments import check_choice, check_instance, check_strings
from quant_spec.dtypes import FP8_E4M3, FP32
from quant_spec.errors import QuantSpecError, nearest, shown
from quant_spec.formats import get_format
from quant_spec.granularity import PerTensor
from quant_spec.layer_config import LayerQuantConfig, word
from quant_spec.quant_key import MXFP4, QuantKey, ScaleDesc
from quant_spec.unset import UNSET

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LayerKind: TypeAlias = Literal["linear", "moe"]
LAYER_KINDS: Final[tuple[LayerKind, ...]] = ("linear", "moe")
ANY_ARCHITECTURE: Final = "any"


class BackendError(QuantSpecError, LookupError):
    """No registered backend runs a layer; the message says what would be run."""


def _words(keys: Iterable[QuantKey | None]) -> str:
    return ", ".join(word(key) for key in keys)


@attrs.frozen
class Backend:
    """Kernels for one kind of layer, one weight format, and the activations that they take.

    Attributes:
        name: unique in a registry.
        kind: `linear` or `moe`.
        weight: format of the weight; None: unquantized.
        activations: formats of the activation, as the kernels take it; None among them: unquantized. The first is the
            one they prefer.
        architectures: GPU or CPU architectures as compilers name them (`gfx950`, `sm_90`, `x86_64`), or `any`.
        priority: of the backends that fit, the greatest wins; equal ones by name.
    """

    name: str
    kind: LayerKind
    weight: QuantKey | None
    activations: tuple[QuantKey | None, ...]
    architectures: tuple[str, ...] = (ANY_ARCHITECTURE,)
    priority: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse a backend that nothing could select.

        Raises:
            QuantSpecError: unknown kind, no activation, no architecture.
        """
        check_instance("name", self.name, str)
        check_instance("weight", self.weight, QuantKey, none=True)
        check_instance("activations", self.activations, tuple, list)
        for index, key in enumerate(self.activations):
            check_instance(f"activations[{index}]", key, QuantKey, none=True)
        check_strings("architectures", self.architectures)
        check_instance("priority", self.priority, int)
        if self.kind not in LAYER_KINDS:
            near = nearest(self.kind, LAYER_KINDS)
            hint = f"; did you mean {near!r}?" if near else ""
            message = f"backend {self.name!r}: unknown layer kind {shown(self.kind)}; allowed: linear, moe{hint}"
            raise QuantSpecError(message)
        if not self.activations or not self.architectures:
            message = f"backend {self.name!r}: needs at least one activation (None: unquantized) and one architecture"
            raise QuantSpecError(message)

    def takes(self, activation: QuantKey | None) -> bool:
        """Tell whether the kernels take this activation."""
        return any(_same(activation, each) for each in self.activations)

    def runs_on(self, architecture: str) -> bool:
        """Tell whether the kernels run on this architecture."""
        return ANY_ARCHITECTURE in self.architectures or architecture in self.architectures

    def __str__(self) -> str:
        """Return one line: name, kind, formats, architectures."""
        return (
            f"{self.name} ({self.kind}: {word(self.weight)} x {_words(self.activations)};"
            f" {', '.join(self.architectures)})"
        )


def _same(one: QuantKey | None, other: QuantKey | None) -> bool:
    """Compare formats as they print: scale containers that a document leaves open do not count."""
    return one is other if one is None or other is None else one.same_format(other)


class BackendRegistry:
    """Backends by name. Order of registration does not count."""

    def __init__(self, backends: Iterable[Backend] = ()) -> None:
        """Start with the given backends.

        Raises:
            QuantSpecError: two of them have one name and differ.
        """
        self._backends: dict[str, Backend] = {}
        for backend in backends:
            self.register(backend)

    def register(self, backend: Backend) -> Backend:
        """Add a backend and return it.

        Raises:
            QuantSpecError: another backend has that name.
        """
        check_instance("backend", backend, Backend)
        known = self._backends.setdefault(backend.name, backend)
        if known != backend:
            message = f"backend {backend.name!r} is registered already, as {known}"
            raise QuantSpecError(message)
        return backend

    def unregister(self, name: str) -> None:
        """Forget a backend.

        Raises:
            KeyError: none has that name.
        """
        del self._backends[name]

    def __iter__(self) -> Iterator[Backend]:
        """Iterate over the backends, greatest priority first, then by name."""
        return iter(sorted(self._backends.values(), key=lambda backend: (-backend.priority, backend.name)))

    def __len__(self) -> int:
        """Return the number of backends."""
        return len(self._backends)

    def select(self, config: LayerQuantConfig, *, kind: LayerKind, architecture: str) -> Backend:
        """Return the backend for a layer; see `select_backend`."""
        weight = config.weight_key
        here = [each for each in self if each.kind == kind and each.runs_on(architecture)]
        fitting = [each for each in here if _same(weight, each.weight)]
        if config.activation is UNSET:
            return self._by_default(config, fitting, kind, architecture)
        wanted = config.activation
        found = next((each for each in fitting if each.takes(wanted)), None)
        if found is None:
            raise BackendError(self._refusal(weight, word(wanted), kind, architecture))
        return found

    def _by_default(
        self, config: LayerQuantConfig, fitting: list[Backend], kind: LayerKind, architecture: str
    ) -> Backend:
        """Return the first that takes the format's default activation, else the first of all: it may choose."""
        default = config.activation_key
        if not fitting:
            raise BackendError(self._refusal(config.weight_key, "default", kind, architecture))
        return next((each for each in fitting if each.takes(default)), fitting[0])

    def _refusal(self, weight: QuantKey | None, activation: str, kind: str, architecture: str) -> str:
        asked = f"no backend runs a {kind} layer of weight {word(weight)} and activation {activation} on {architecture}"
        same = [each for each in self if each.kind == kind and _same(weight, each.weight)]
        here = [each for each in same if each.runs_on(architecture)]
        if here:
            accepted = dict.fromkeys(word(key) for each in here for key in each.activations)
            near = nearest(activation, accepted)
            hint = f"; did you mean {near!r}?" if near else ""
            return f"{asked}; accepted activations: {', '.join(accepted)}{hint}"
        if same:
            known = dict.fromkeys(name for each in same for name in each.architectures)
            return f"{asked}; that weight runs on {', '.join(known)}"
        weights = dict.fromkeys(word(each.weight) for each in self if each.kind == kind and each.runs_on(architecture))
        return f"{asked}; accepted weights there: {', '.join(weights) or 'none'}"


_AITER_MXFP4: Final = ("gfx950", "gfx1250")
_FP8_STATIC: Final = QuantKey(FP8_E4M3, ScaleDesc(FP32, PerTensor(), dynamic=False))
_FP8_DYNAMIC: Final = QuantKey(FP8_E4M3, ScaleDesc(FP32, PerTensor(), dynamic=True))


def _torch() -> Iterator[Backend]:
    """Yield what plain torch runs: the unquantized layer, and any weight dequantized first."""
    for kind in LAYER_KINDS:
        yield Backend(f"torch_{kind}", kind, None, (None,), priority=-10)
        for name in ("ptpc_fp8", "per_block_fp8", "fp8_per_tensor", "mxfp8", "mxfp4", "nvfp4"):
            yield Backend(f"torch_dequantized_{name}_{kind}", kind, get_format(name).weight, (None,), priority=-20)


def default_backends() -> tuple[Backend, ...]:
    """Return the backends that come with the library: AITER's fused MoE kernels for MXFP4 weights, and torch.

    AITER's three differ in what they take beside MXFP4 weights: activations quantized to MXFP4 at run time, to FP8 with
    one scale a tensor, or left in bf16. All need the block-scaled instructions of gfx950 and gfx1250.
    """
    return (
        Backend("aiter_mxfp4_mxfp4", "moe", MXFP4, (MXFP4.as_activation(dynamic=True),), _AITER_MXFP4, 30),
        Backend("aiter_mxfp4_fp8", "moe", MXFP4, (_FP8_STATIC, _FP8_DYNAMIC), _AITER_MXFP4, 20),
        Backend("aiter_mxfp4_bf16", "moe", MXFP4, (None,), _AITER_MXFP4, 10),
        *_torch(),
    )


BACKENDS: Final = BackendRegistry(default_backends())
"""The registry that `select_backend` looks in unless it is given another."""


def select_backend(
    config: LayerQuantConfig, *, kind: LayerKind, architecture: str, registry: BackendRegistry | None = None
) -> Backend:
    """Return the backend that runs a layer.

    Args:
        config: the layer's formats, as `QuantizationConfig.resolve` gives them or as a document asks for them. An
            activation that is UNSET leaves the choice to the backend: one that takes the format's default, else the
            one of the greatest priority.
        kind: `linear` or `moe`.
        architecture: as compilers name it, as `gfx950`.
        registry: an engine's own; None: `BACKENDS`.

    Raises:
        BackendError: none fits; says which activations, architectures or weights would.
        ArgumentError: an argument is something else.
    """
    check_instance("config", config, LayerQuantConfig)
    check_choice("kind", kind, LAYER_KINDS)
    check_instance("architecture", architecture, str)
    check_instance("registry", registry, BackendRegistry, none=True)
    return (BACKENDS if registry is None else registry).select(config, kind=kind, architecture=architecture)
