"""recommend: measured errors, the choice against brute force, requests that give exactly what was chosen, refusals."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import quant_kernels
from quant_kernels.loading.folder import open_folder
from quant_kernels.recommend.choose import Chosen, Objective, choose_by_bytes, choose_by_sqnr, cost_function
from quant_kernels.recommend.globs import request_of
from quant_kernels.recommend.measure import Measured, Option, Unit, measure, template_of
from quant_kernels.recommend.picture import curve_svg
from quant_kernels.recommend.recommendation import recommend
from quant_spec import ConfigError, LoadError, PlanError, QuantizationConfig, get_format

if TYPE_CHECKING:
    from pathlib import Path

LEAVES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three blocks with weights of very different spread, a router and a head."""
    folder = tmp_path_factory.mktemp("model")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for block in range(3):
        for index, leaf in enumerate(LEAVES):
            heavy = torch.randn(64, 64, generator=generator) ** (1 + 2 * (index % 2))
            tensors[f"model.layers.{block}.{leaf}.weight"] = (heavy * 10.0 ** -(block + 1)).bfloat16()
        tensors[f"model.layers.{block}.mlp.gate.weight"] = torch.randn(8, 64, generator=generator).bfloat16()
    tensors["model.embed_tokens.weight"] = torch.randn(32, 64, generator=generator).bfloat16()
    tensors["lm_head.weight"] = torch.randn(32, 64, generator=generator).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))
    return folder


@pytest.fixture(scope="module")
def measured(checkpoint: Path) -> Measured:
    return measure(open_folder(checkpoint))


def test_units_share_what_engines_fuse(measured: Measured) -> None:
    names = [unit.name for unit in measured.units]
    assert len(names) == 3 * 4
    qkv = next(unit for unit in measured.units if unit.name == "model.layers.0.self_attn.qkv_proj")
    assert len(qkv.modules) == 3
    assert qkv.template == "model.layers.*.self_attn.qkv_proj"
    assert set(measured.left_out) == {"lm_head", *(f"model.layers.{block}.mlp.gate" for block in range(3))}


def test_errors_and_bytes_are_those_of_the_conversions(checkpoint: Path, measured: Measured) -> None:
    from safetensors.torch import load_file

    tensors = load_file(checkpoint / "model.safetensors")
    for unit in measured.units:
        weights = [tensors[f"{module}.weight"] for module in unit.modules]
        assert unit.signal == pytest.approx(sum(float(w.double().square().sum()) for w in weights), rel=1e-5)
        for option in unit.options[:-1]:
            done = [quant_kernels.quantize(w, option.format) for w in weights]
            noise = sum(
                float((w.double() - quant_kernels.dequantize(q, torch.float32).double()).square().sum())
                for w, q in zip(weights, done, strict=True)
            )
            assert option.noise == pytest.approx(noise, rel=1e-4)
            assert option.nbytes == sum(each.nbytes for each in done)
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert measured.nbytes == total


options = st.lists(
    st.tuples(st.integers(1, 60), st.floats(0.0, 50.0)), min_size=1, max_size=3, unique_by=lambda pair: pair[0]
)


@st.composite
def small_models(draw: st.DrawFn) -> Measured:
    """Units with any bytes and errors; the last option of each has no error."""
    units = []
    for index, found in enumerate(draw(st.lists(options, min_size=1, max_size=4))):
        ordered = sorted(found)
        made = tuple(Option(f"f{number}", nbytes, noise) for number, (nbytes, noise) in enumerate(ordered))
        kept = Option(None, ordered[-1][0] + 1, 0.0)
        name = f"model.layers.{index}.mlp.down_proj"
        units.append(Unit(name, template_of(name), (name,), 1, 1.0, (*made, kept)))
    return Measured(tuple(units), {}, draw(st.integers(0, 20)))


@given(small_models(), st.integers(0, 300), st.sampled_from(["relative", "absolute", "output"]))
@settings(max_examples=150, deadline=None)
def test_the_choice_fits_and_only_its_last_step_can_be_missed(
    measured: Measured, limit: int, objective: Objective
) -> None:
    """No choice within the bytes beats ours by more than one step of the hull: the bound of greedy on convex hulls."""
    cost = cost_function(objective)
    combinations = list(itertools.product(*(unit.options for unit in measured.units)))
    sizes = [measured.other_nbytes + sum(option.nbytes for option in each) for each in combinations]
    fitting = [each for each, size in zip(combinations, sizes, strict=True) if size <= limit]
    if min(sizes) > limit:
        with pytest.raises(PlanError, match="max_bytes"):
            choose_by_bytes(measured, limit, objective=objective, granularity="layer")
        return
    found = choose_by_bytes(measured, limit, objective=objective, granularity="layer")
    assert found.nbytes <= limit
    assert found.error == pytest.approx(sum(cost(unit, found.options[unit.name]) for unit in measured.units))
    best = min(sum(cost(unit, option) for unit, option in zip(measured.units, each, strict=True)) for each in fitting)
    largest = max(cost(unit, unit.options[0]) for unit in measured.units)
    assert best - 1e-9 <= found.error <= best + largest + 1e-9
    errors = [point.error for point in found.curve]
    assert errors == sorted(errors, reverse=True)


@given(small_models(), st.floats(-10, 60))
@settings(max_examples=100, deadline=None)
def test_a_bound_on_the_ratio_holds_for_every_unit_with_the_fewest_bytes(measured: Measured, bound: float) -> None:
    found = choose_by_sqnr(measured, bound)
    for unit in measured.units:
        option = found.options[unit.name]
        assert unit.sqnr_db(option) >= bound
        assert all(unit.sqnr_db(each) < bound for each in unit.options if each.nbytes < option.nbytes)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_request_gives_every_layer_what_was_chosen(data: st.DataObject) -> None:
    words = ["mxfp4", "mxfp8", "ptpc_fp8", None]
    blocks = data.draw(st.integers(1, 13))
    per_kind = data.draw(st.booleans())
    units = []
    chosen = {}
    for leaf in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.down_proj", "experts"):
        usual = data.draw(st.sampled_from(words))
        for block in range(blocks):
            name = f"model.layers.{block}.{leaf}"
            parent = name.rpartition(".")[0]
            shards = tuple(f"{parent}.{each}_proj" for each in "qkv") if leaf.endswith("qkv_proj") else (name,)
            made = tuple(Option(word, size, 1.0) for word, size in zip(words[:3], (1, 2, 3), strict=True))
            unit = Unit(name, template_of(name), shards, 1, 1.0, (*made, Option(None, 4, 0.0)))
            units.append(unit)
            chosen[name] = unit.option(usual if per_kind else data.draw(st.sampled_from(words)))
    measured = Measured(tuple(units), {"lm_head": "head"}, 0)
    request = request_of(measured, Chosen(chosen, 0, 0.0, ()))
    if all(option.format is None for option in chosen.values()):
        assert "global_quant_config" not in request
        return
    config = QuantizationConfig.from_online(request)
    assert not config.resolve("lm_head").is_quantized
    for unit in units:
        for module in unit.modules:
            word = chosen[unit.name].format
            answer = config.resolve(module)
            assert (str(answer.weight) if answer.is_quantized else None) == (word and str(get_format(word).weight))


def test_few_entries_where_few_do(measured: Measured) -> None:
    """Kinds of layers are one entry each at most, the usual format none."""
    found = recommend(measured, max_bytes=0.55, granularity="kind")
    names = [module for unit in measured.units for module in unit.modules]
    entries = found.request.get("layer_quant_config", {})
    assert len(entries) <= len({unit.template for unit in measured.units}) + 3
    assert QuantizationConfig.from_online(found.request).unmatched([*names, *measured.left_out]) == ()
    assert found.fraction <= 0.55


def test_more_bytes_never_mean_more_error(measured: Measured) -> None:
    errors = [recommend(measured, max_bytes=share).chosen.error for share in (0.4, 0.5, 0.6, 0.8, 1.0)]
    assert errors == sorted(errors, reverse=True)


def test_the_picture_is_a_whole_document(measured: Measured) -> None:
    from xml.etree import ElementTree as ET

    found = recommend(measured, max_bytes=0.5)
    root = ET.fromstring(curve_svg(measured, found.chosen, found.whole, title="<a> & b"))  # noqa: S314  (our own)
    assert root.tag.endswith("svg")
    assert "http" not in ET.tostring(root, "unicode").replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "give one of them"),
        ({"max_bytes": 0.5, "min_sqnr": 20}, "give one of them"),
        ({"max_bytes": 0.0}, "fraction"),
        ({"max_bytes": math.nan}, "fraction"),
        ({"max_bytes": 1.5}, "fraction"),
        ({"max_bytes": 0.01}, "the smallest formats take"),
        ({"min_sqnr": math.inf}, "finite"),
        ({"max_bytes": 0.5, "objective": "abslute"}, "did you mean 'absolute'"),
        ({"max_bytes": 0.5, "granularity": "kinds"}, "did you mean 'kind'"),
    ],
)
def test_refusals(measured: Measured, arguments: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        recommend(measured, **arguments)


def test_unknown_formats_and_quantized_checkpoints_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = open_folder(checkpoint)
    with pytest.raises(ConfigError, match="mxfp5"):
        measure(folder, ["mxfp5"])
    with pytest.raises(PlanError, match="formats"):
        measure(folder, [])
    save_file({"a.weight": torch.zeros(32, 32, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadError, match="no unquantized layer"):
        measure(open_folder(tmp_path))


def test_command(checkpoint: Path, tmp_path: Path) -> None:
    """The request goes to standard output, so that it can be piped into `quantize`; the rest elsewhere."""
    picture = tmp_path / "curve.svg"
    command = [sys.executable, "-m", "quant_kernels.cli", "recommend", str(checkpoint), "--max-bytes", "0.6"]
    done = subprocess.run([*command, "--svg", str(picture)], capture_output=True, text=True, check=True)
    QuantizationConfig.from_online(json.loads(done.stdout))
    assert "layers of the kind" in done.stderr
    assert picture.read_text().startswith("<svg")
