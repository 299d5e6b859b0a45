"""One case: parse, resolve, plan, check tensors; then dump, parse again, and the same once more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from case_runner.building import modules_of, parse, parse_dumped, ranks_of, tensors_of
from case_runner.comparing import Differences, compare_config, compare_layers, compare_plan
from case_runner.loading import read_case
from case_runner.numerics import run_numeric
from quant_spec import QuantizationConfig, QuantSpecError, plan, scale_tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STAGES = ("parse", "resolve", "plan", "load")


def run_case(path: Path) -> None:
    """Run the case in the file `path`.

    Raises:
        AssertionError: something came out otherwise than the case says.
    """
    case = read_case(path)
    if case.is_numeric:
        run_numeric(case.data)
    elif case.error is not None:
        run_refused(case.data, case.error)
    else:
        config = parse(case.data)
        compare(config, case.data)
        again = parse_dumped(config, case.data)
        assert again == config
        compare(again, case.data)


def compare(config: QuantizationConfig, data: dict[str, Any]) -> None:
    differ = Differences()
    compare_config(config, data.get("expect") or {}, differ)
    compare_layers(config, data, differ)
    check_plan(config, data, differ)
    check_load(config, data, differ)
    differ.check()


def check_plan(config: QuantizationConfig, data: dict[str, Any], differ: Differences) -> None:
    modules = modules_of(data)
    if modules:
        made = plan(config, modules, tensors=data.get("tensors"), tp=ranks_of(data), runnable=data.get("runnable"))
        compare_plan(config, made, data, differ)


def check_load(config: QuantizationConfig, data: dict[str, Any], differ: Differences) -> None:
    tensors = tensors_of(data)
    if tensors:
        found = scale_tensors(config, tensors)
        for module, tensor in ((data.get("expect") or {}).get("scale_tensors") or {}).items():
            differ.equal(f"scale_tensors[{module}]", found.get(module), tensor)


def run_refused(data: dict[str, Any], error: dict[str, Any]) -> None:
    """The error must come at its stage or, with the same message, earlier; what comes before it must hold."""
    made: list[QuantizationConfig] = []
    differ = Differences()
    last = STAGES.index(error["at"])

    def at_parse() -> None:
        made.append(parse(data))
        again = parse_dumped(made[0], data)
        assert again == made[0]
        compare_config(again, data.get("expect") or {}, differ)

    def at_resolve() -> None:
        compare_layers(made[0], data, differ)
        if "name" in error:
            made[0].resolve(error["name"])

    stages: tuple[Callable[[], None], ...] = (
        at_parse,
        at_resolve,
        lambda: check_plan(made[0], data, differ),
        lambda: check_load(made[0], data, differ),
    )
    for name, stage in zip(STAGES[: last + 1], stages, strict=False):
        raised = error_of(stage)
        if raised is not None:
            missing = [text for text in error.get("must_name") or () if text.lower() not in str(raised).lower()]
            assert not missing, f"at {name}: the message does not name {missing}:\n{raised}"
            differ.check()
            return
    differ.check()
    message = f"no error up to {error['at']}"
    raise AssertionError(message)


def error_of(stage: Callable[[], None]) -> QuantSpecError | None:
    try:
        stage()
    except QuantSpecError as raised:
        return raised
    return None
