"""The small values: UNSET, element types, granularities, keys, formats, layer configs."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING

import attrs
import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant_spec import (
    UNSET,
    ConfigError,
    LayerQuantConfig,
    QuantFormat,
    QuantKey,
    QuantSpecError,
    ScaleDesc,
    Unset,
    format_of_key,
    formats,
    get_format,
    register_format,
)
from quant_spec.dtypes import BF16, ELEMENT_TYPES, FP8_E4M3, FP32, element_type
from quant_spec.formats import base, engine_quant_type, key_nbytes, request_words
from quant_spec.formats.base import FORMATS, FormatRegistry
from quant_spec.granularity import (
    PerBlock,
    PerChannel,
    PerGroup,
    PerSuperBlock,
    PerTensor,
    PerToken,
    parse_granularity,
)
from quant_spec.layer_config import UNQUANTIZED, word
from quant_spec.quant_key import MXFP4, MXFP8, NVFP4, SHORT_KEYS
from quant_spec.testing import activation_keys, layer_configs, quant_formats, quant_keys, weight_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

settings = hypothesis.settings(deadline=None, max_examples=100)


@pytest.fixture
def registry() -> Iterator[FormatRegistry]:
    """The format registry; what a test adds is taken out again."""
    before = {each.name for each in FORMATS}
    yield FORMATS
    for name in {each.name for each in FORMATS} - before:
        FORMATS.unregister(name)


# -- UNSET ------------------------------------------------------------------------------------------------------------


def test_unset_is_one_false_value_that_survives_copying() -> None:
    assert not UNSET
    assert repr(UNSET) == "UNSET"
    assert [*Unset] == [UNSET]
    assert copy.deepcopy(UNSET) is UNSET
    assert pickle.loads(pickle.dumps(UNSET)) is UNSET  # noqa: S301  (made here)
    assert UNSET is not None


# -- element types ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENT_TYPES)
def test_element_types_agree_with_torch(name: str) -> None:
    element = element_type(name)
    assert str(element) == name
    dtype = element.torch_dtype
    assert dtype.itemsize * 8 >= element.bits
    if dtype.is_floating_point and name not in {"e8m0", "ue8m0"} and "x2" not in str(dtype):
        assert torch.finfo(dtype).max == element.max
    assert element.per_byte == (1 if element.bits > 4 or element.bits == 3 else 8 // element.bits)


def test_importing_types_leaves_torch_alone() -> None:
    code = "import sys, quant_spec.dtypes as d; assert 'torch' not in sys.modules; print(d.FP8_E4M3.torch_dtype)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "torch.float8_e4m3fn\n"


def test_an_unknown_element_type_says_what_is_known() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fp8_e4m3'") as caught:
        element_type("fp8_e4m4", "$.dtype")
    assert caught.value.path == "$.dtype"
    assert caught.value.value == "fp8_e4m4"
    assert set(caught.value.expected) == set(ELEMENT_TYPES)


def test_element_types_are_ordered_by_name_first() -> None:
    assert sorted([FP32, FP8_E4M3, BF16]) == [BF16, FP32, FP8_E4M3]


# -- granularities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("granularity", "text", "shape"),
    [
        (PerTensor(), "per_tensor", (1,)),
        (PerChannel(), "per_channel", (300, 1)),
        (PerToken(), "per_token", (300, 1)),
        (PerGroup(32), "group_32", (300, 5)),
        (PerBlock(128, 128), "block_128x128", (3, 2)),
        (PerBlock(1, 128), "block_1x128", (300, 2)),
    ],
)
def test_granularities_print_parse_and_shape_scales(granularity: PerTensor, text: str, shape: tuple[int, ...]) -> None:
    assert str(granularity) == text
    assert parse_granularity(text) == granularity
    assert granularity.scale_shape(300, 130) == shape
    assert pickle.loads(pickle.dumps(granularity)) == granularity  # noqa: S301  (made here)


def test_super_blocks_count_first_level_scales() -> None:
    assert PerSuperBlock(256).scale_shape(300, 2) == (3,)
    assert str(PerSuperBlock(256)) == "per 256 blocks"


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "32", None])
def test_sizes_are_positive_integers(size: object) -> None:
    for make in (PerGroup, lambda value: PerBlock(128, value), lambda value: PerBlock(value, 1), PerSuperBlock):
        with pytest.raises(ConfigError, match="must be a positive integer"):
            make(size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", "group_0", "group_032", "group_", "block_8", "block_8x0", "per_row", "group_\uff13"]
)
def test_unknown_granularities_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="unknown granularity") as caught:
        parse_granularity(text, "$.x")
    assert caught.value.path == "$.x"
    assert "group_N" in caught.value.expected


# -- keys -------------------------------------------------------------------------------------------------------------


@settings
@given(quant_keys())
def test_keys_print_and_parse_back(key: QuantKey) -> None:
    again = QuantKey.parse(str(key))
    assert again.same_format(key)
    assert str(again) == str(key)
    assert again.scale.dynamic == key.scale.dynamic
    assert again.symmetric == key.symmetric


@settings
@given(quant_keys(), quant_keys())
def test_keys_are_ordered_hashable_and_picklable(one: QuantKey, two: QuantKey) -> None:
    assert (one < two) + (two < one) + (one == two) == 1
    assert (hash(one) == hash(two)) or one != two
    assert sorted([one, two], key=str) in ([one, two], [two, one])
    assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301  (made here)
    assert copy.deepcopy(one) == one
    assert (one <= two) == (one < two or one == two)


@settings
@given(weight_keys(), st.booleans())
def test_a_weight_becomes_an_activation_and_back(key: QuantKey, dynamic: bool) -> None:  # noqa: FBT001
    activation = key.as_activation(dynamic=dynamic)
    assert activation.is_dynamic is dynamic
    assert str(activation) == f"{key}:{'dynamic' if dynamic else 'static'}"
    assert activation.as_weight() == key
    assert not key.is_dynamic


@pytest.mark.parametrize("name", SHORT_KEYS)
def test_short_names(name: str) -> None:
    key = SHORT_KEYS[name]
    assert str(key) == name
    assert QuantKey.parse(name) is key
    assert str(QuantKey.parse(f"{name}:static")) == f"{name}:static"
    assert key.group_size == (16 if name == "nvfp4" else 32)


def test_keys_compare_with_keys_alone() -> None:
    assert MXFP4.__lt__("mxfp4") is NotImplemented
    with pytest.raises(TypeError):
        assert MXFP4 < 1
    assert not MXFP4.same_format(None)
    assert QuantKey.parse("int4/per_channel").group_size is None


def test_open_scale_dtypes_do_not_count_in_the_format() -> None:
    stored = QuantKey(FP8_E4M3, ScaleDesc(FP32, PerChannel()))
    said = QuantKey(FP8_E4M3, ScaleDesc(None, PerChannel()))
    assert said != stored
    assert said.same_format(stored)
    assert str(said.scale) == "unknown per_channel"
    assert str(stored.scale) == "fp32 per_channel"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("mxfp5", "did you mean 'mxfp"),
        ("", "unknown quantization key"),
        ("mxfp4:fast", "unknown suffix ':fast'"),
        ("mxfp4:", "unknown suffix ':'"),
        ("fp9/per_tensor", "unknown element type"),
        ("fp8_e4m3/per_row", "unknown granularity"),
        ("fp8_e4m3", "unknown quantization key"),
        ("MXFP4", "unknown quantization key"),
    ],
)
def test_words_that_are_no_key(text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as caught:
        QuantKey.parse(text, "$.weight")
    assert caught.value.path == "$.weight"


# -- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant_format", formats(), ids=lambda each: each.name)
def test_registered_formats_hang_together(quant_format: QuantFormat) -> None:
    assert get_format(quant_format.name.upper() + " ") is quant_format
    assert get_format(quant_format) is quant_format
    assert format_of_key(quant_format.weight) is quant_format
    assert quant_format.weight.scale.dynamic is None
    assert quant_format.activations[0] is None
    assert quant_format.activation in quant_format.activations
    assert all(key is None or key.scale.dynamic is not None for key in quant_format.activations)
    assert len(set(quant_format.activations)) == len(quant_format.activations)
    assert quant_format.weight.scale.dtype is not None
    words = (quant_format.name, *quant_format.aliases, *quant_format.shorthands)
    assert all(get_format(each) is quant_format for each in words)
    assert quant_format.check_k(128)
    assert quant_format.check_k(7) == (quant_format.k_multiple == 1)
    assert bool(quant_format.scale_roundings) == (str(quant_format.weight.scale.dtype) == "e8m0")


@settings
@given(quant_formats(), st.integers(1, 5), st.integers(1, 300), st.integers(1, 8))
def test_storage_of_formats(quant_format: QuantFormat, experts: int, rows: int, groups: int) -> None:
    shape = (experts, rows, groups * 32)
    codes, scales = quant_format.data_shape(shape), quant_format.scale_shape(shape)
    assert codes[:2] == shape[:2]
    assert codes[2] * quant_format.weight.element.per_byte == shape[2]
    if str(quant_format.weight.scale.granularity) != "per_tensor":
        assert scales[0] == experts
    flat = quant_format.nbytes(shape[1:])
    assert quant_format.nbytes(shape) == experts * flat
    assert flat < 2 * rows * groups * 32 + 4 * rows + 8


def test_bytes_of_keys_by_hand() -> None:
    assert get_format("mxfp4").nbytes((64, 64)) == 64 * 32 + 64 * 2
    assert get_format("nvfp4").nbytes((2, 64, 64)) == 2 * (64 * 32 + 64 * 4 + 4)
    assert get_format("ptpc_fp8").nbytes((64, 64)) == 64 * 64 + 64 * 4
    assert key_nbytes(QuantKey.parse("int3/group_64"), (2, 64)) == 2 * 64 * 3 // 8 + 2 * 4


def test_request_words_name_what_can_be_requested() -> None:
    words = request_words()
    assert {"ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "per_block128_fp8", "nvfp4"} <= set(words)
    assert "fp8_per_tensor" not in words
    with pytest.raises(ConfigError, match="did you mean 'mxfp4'") as caught:
        get_format("mxpf4", "$.global_quant_config")
    assert caught.value.expected == words


@pytest.mark.parametrize(
    ("key", "engine"),
    [
        (None, "No"),
        (get_format("ptpc_fp8").weight, "per_Token"),
        (get_format("per_block_fp8").weight, "per_1x128"),
        (QuantKey.parse("fp8_e4m3/block_1x128"), "per_1x128"),
        (QuantKey.parse("fp8_e4m3/block_64x128"), "per_64x128"),
        (QuantKey.parse("fp8_e4m3/group_128"), "per_1x128"),
        (QuantKey.parse("fp8_e4m3/per_tensor"), "per_Tensor"),
        (QuantKey.parse("fp8_e4m3/per_token:dynamic"), "per_Token"),
        (MXFP4, "per_1x32"),
        (MXFP8, "per_1x32"),
        (NVFP4, "per_1x16"),
    ],
)
def test_words_of_engines(key: QuantKey | None, engine: str) -> None:
    assert engine_quant_type(key) == engine


def _format(name: str, **changes: object) -> QuantFormat:
    made = QuantFormat(name, "a test's", QuantKey(FP8_E4M3, ScaleDesc(FP32, PerGroup(64))), None)
    return attrs.evolve(made, **changes)


@pytest.mark.usefixtures("registry")
def test_registering_twice_is_fine_and_another_value_is_not() -> None:
    first = register_format(_format("test_fp8", aliases=("test_eight",)))
    assert register_format(_format("test_fp8", aliases=("test_eight",))) == first
    assert get_format("TEST_EIGHT") is FORMATS.find("test_fp8")
    for other in (
        _format("test_fp8", k_multiple=2),
        _format("test_other", aliases=("mxfp4",)),
        _format("test_other", shorthands=("test_eight",)),
    ):
        with pytest.raises(QuantSpecError, match="already means format"):
            register_format(other)
    assert FORMATS.find("test_other") is None


@pytest.mark.usefixtures("registry")
def test_a_forgotten_format_is_unknown() -> None:
    register_format(_format("test_fp8", aliases=("test_eight",)))
    FORMATS.unregister("test_fp8")
    for name in ("test_fp8", "test_eight"):
        with pytest.raises(ConfigError):
            get_format(name)


def test_formats_of_entry_points_load_when_a_word_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = FormatRegistry()
    loaded: list[str] = []

    class Entry:
        """What `entry_points` returns."""

        def load(self) -> None:
            loaded.append("once")
            registry.register(_format("plugged"))

    def entry_points(*, group: str) -> list[Entry]:
        assert group == base.ENTRY_POINT_GROUP
        return [Entry()]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    assert not loaded
    assert registry.find("plugged") is not None
    assert registry.find("nothing") is None
    assert [each.name for each in registry] == ["plugged"]
    assert loaded == ["once"]


# -- layer configs ----------------------------------------------------------------------------------------------------


@settings
@given(layer_configs())
def test_layer_configs_resolve_once(config: LayerQuantConfig) -> None:
    resolved = config.resolved()
    assert resolved.weight is not UNSET
    assert resolved.activation is not UNSET
    assert resolved.resolved() == resolved
    assert config.quant_method != ""
    assert config.is_quantized == (resolved.weight is not None)
    assert (config.quant_type == "No") == (not config.is_quantized)
    assert config.is_dynamic == (resolved.activation is not None and resolved.activation.is_dynamic)
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301  (made here)
    assert hash(copy.copy(config)) == hash(config)


@settings
@given(weight_keys(), activation_keys())
def test_a_named_activation_is_kept(weight: QuantKey, activation: QuantKey) -> None:
    config = LayerQuantConfig(weight, activation)
    assert config.resolved() is config
    assert config.activation_key == activation
    assert str(config) == f"{weight} x {activation}"


def test_what_engines_read() -> None:
    config = LayerQuantConfig(MXFP4, UNSET, "")
    assert config.quant_method is None
    assert config.quant_dtype is torch.float4_e2m1fn_x2
    assert config.quant_type == "per_1x32"
    assert config.is_dynamic
    assert str(config) == "mxfp4 x default"
    assert str(UNQUANTIZED) == "none x none"
    assert UNQUANTIZED.quant_dtype is torch.bfloat16
    assert not UNQUANTIZED.is_dynamic
    assert (word(None), word(UNSET), word(MXFP8)) == ("none", "default", "mxfp8")


def test_an_absent_activation_of_an_unknown_format_is_none() -> None:
    assert LayerQuantConfig(QuantKey.parse("int4/group_32"), UNSET).activation_key is None


@pytest.mark.parametrize("value", [UNQUANTIZED, MXFP4, MXFP4.scale, FP32, PerGroup(32), get_format("mxfp4")])
def test_values_are_frozen(value: object) -> None:
    field = attrs.fields(type(value))[0].name
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(value, field, None)
