"""Whatever stops a job, wherever it does: each layer is either untouched or quantized in full."""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from small_models import PACKED, Engine, checkpoint, filled, state
from torch.utils._python_dispatch import TorchDispatchMode

from quant_kernels import OnlineQuantizer, quantize_model
from quant_kernels.loading import conversion_queue
from quant_spec import LoadError, NameRules, QuantizationConfig

if TYPE_CHECKING:
    from types import FrameType

    from torch import nn

REQUEST = QuantizationConfig.from_online(
    {"global_quant_config": "nvfp4", "exclude_layer": ["lm_head", "*.gate.*"]},
    names=NameRules(packed_modules_mapping=PACKED),
)
FILES = {str(Path(conversion_queue.__file__).with_name(name)) for name in ("layer.py", "install.py")}


@pytest.fixture(scope="module")
def source() -> Engine:
    model = filled(Engine(1, 2, 64, 32, (64, 32, 32)))
    assert isinstance(model, Engine)
    return model


@pytest.fixture(scope="module")
def quantized(source: Engine) -> Engine:
    model = deepcopy(source)
    quantize_model(model, REQUEST, write_report=False)
    return model


def layers_of(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Return the bytes of each layer: a Linear, or a container of experts."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state(model).items():
        found.setdefault(name.rpartition(".")[0], {})[name] = tensor
    return found


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_whole_layers(model: nn.Module, source: nn.Module, quantized: nn.Module) -> int:
    """Compare each layer with what it was and with what it becomes; return how many are quantized."""
    before, after = layers_of(source), layers_of(quantized)
    done = 0
    for name, tensors in layers_of(model).items():
        if is_same(tensors, before[name]):
            assert not hasattr(model.get_submodule(name), "quant_type"), name
            continue
        assert is_same(tensors, after[name]), name
        assert model.get_submodule(name).quant_type == quantized.get_submodule(name).quant_type
        done += 1
    return done


class Interrupted:
    """Raises KeyboardInterrupt at the n-th line that is executed in the files that change modules."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.raised = False

    def __call__(self, frame: FrameType, event: str, _: object) -> Interrupted | None:
        if frame.f_code.co_filename not in FILES or self.raised:
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                self.raised = True
                raise KeyboardInterrupt
        return self


def interrupted(model: nn.Module, at: int) -> bool:
    """Quantize a model, interrupted at a line; return whether there was such a line."""
    harm = Interrupted(at)
    before = sys.gettrace()
    sys.settrace(harm)
    try:
        quantize_model(model, REQUEST, write_report=False)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return harm.raised


def test_ctrl_c_between_lines_that_change_a_module(source: Engine, quantized: Engine) -> None:
    seen = set()
    at = 0
    while True:
        model = deepcopy(source)
        if not interrupted(model, at):
            break
        seen.add(assert_whole_layers(model, source, quantized))
        at += 2
    assert at > 100
    assert seen == {0, 1, 2, 3}


class Starved(TorchDispatchMode):
    """Lets the n-th operation that takes memory fail."""

    TAKES = ("empty", "zeros", "clone", "cat", "stack", "full", "new_empty", "_to_copy")

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(
        self, function: torch._ops.OpOverload, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        if function.name().removeprefix("aten::").partition(".")[0] in self.TAKES:
            self.left -= 1
            if self.left < 0:
                message = "no memory is left, says the test"
                raise torch.OutOfMemoryError(message)
        return function(*args, **(kwargs or {}))


def starved(model: nn.Module, at: int) -> Exception | None:
    """Quantize a model, starved at an allocation; return the error, None if there was none."""
    try:
        with Starved(at):
            quantize_model(model, REQUEST, write_report=False)
    except (LoadError, torch.OutOfMemoryError) as error:
        return error
    return None


def test_memory_runs_out_at_every_allocation(source: Engine, quantized: Engine) -> None:
    seen = set()
    model, at = deepcopy(source), 0
    while (error := starved(model, at)) is not None:
        done = assert_whole_layers(model, source, quantized)
        assert "no memory is left" in str(error)
        assert f"{done} of 3 layers were quantized" in str(error) or not isinstance(error, LoadError)
        seen.add(done)
        model, at = deepcopy(source), at + 1
    assert seen >= {0, 1, 2}


@pytest.mark.parametrize("at", range(3))
def test_memory_runs_out_while_streaming(
    source: Engine, quantized: Engine, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(100))
    original = conversion_queue.LayerConverter._agreed

    def once(*given: object) -> object:
        if next(calls) == at:
            message = "no memory is left, says the test"
            raise torch.OutOfMemoryError(message)
        return original(*given)

    monkeypatch.setattr(conversion_queue.LayerConverter, "_agreed", once)
    model = Engine(1, 2, 64, 32, (64, 32, 32), "meta")
    with (
        pytest.raises(LoadError, match=rf"OutOfMemoryError: no memory is left, says the test\n{at} of 3 layers"),
        OnlineQuantizer(model, REQUEST, write_report=False) as quantizer,
    ):
        quantizer.load_all(checkpoint(source))
    after = state(quantized)
    for name, module in model.named_modules():
        if hasattr(module, "quant_type"):
            for leaf, tensor in state(module).items():
                assert torch.equal(tensor, after[f"{name}.{leaf}"])


def test_memory_runs_out_when_a_tensor_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Engine(1, 2, 64, 32, (64, 32, 32), "meta")
    quantizer = OnlineQuantizer(model, REQUEST, write_report=False)

    def never(*_: object) -> object:
        message = "no memory is left, says the test"
        raise torch.OutOfMemoryError(message)

    monkeypatch.setattr(quantizer._stager, "bring", never)
    with pytest.raises(LoadError, match=r"(?s)o_proj.weight: OutOfMemoryError: no memory.*0 of 3 layers"), quantizer:
        quantizer.load("model.layers.0.self_attn.o_proj.weight", torch.ones(64, 64))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_ctrl_c_while_loading_ends_the_thread(source: Engine) -> None:
    model = Engine(1, 2, 64, 32, (64, 32, 32), "meta")
    tensors = list(checkpoint(source))
    quantizer = OnlineQuantizer(model, REQUEST, write_report=False)

    def load_and_stop() -> None:
        with quantizer:
            quantizer.load_all(tensors[:5])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_and_stop()
    assert not quantizer._queue._thread.is_alive()
    with pytest.raises(KeyboardInterrupt):
        quantizer.load(*tensors[5])
