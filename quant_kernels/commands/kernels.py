"""`quant-spec kernels`: what this machine and build can do, and whether hardware agrees with software."""

from __future__ import annotations

import importlib.util

import typer

from quant_kernels.commands.console import ExitCode, imports, print_json, print_line


def run(*, self_test: bool, as_json: bool) -> None:
    """Print the capabilities; with `self_test` compare every conversion with the reference."""
    found = capabilities()
    if self_test:
        found["self_test"] = _self_test()
    if as_json:
        print_json(found)
    else:
        for key, value in found.items():
            print_line(f"{key:<10} {_text(value)}")
    tested = found.get("self_test")
    if isinstance(tested, dict) and not tested["passed"]:
        raise typer.Exit(ExitCode.SELF_TEST_FAILED)


def capabilities() -> dict[str, object]:
    """Return the library in use, the devices it serves, and the formats with kernels. Imports torch."""
    with imports():
        import torch

        from quant_kernels.library import cpu_isa, library_path, load_library, native_on
        from quant_kernels.targets import TARGETS

    path = library_path()
    return {
        "torch": torch.__version__,
        "library": str(path) if path is not None and load_library() else None,
        "cpu": cpu_isa(),
        "cuda": torch.cuda.is_available() and native_on("cuda"),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "formats": sorted(TARGETS),
    }


def _self_test() -> dict[str, object]:
    if importlib.util.find_spec("quant_kernels.selftest") is None:
        return {"passed": False, "detail": "this build has no self-test"}
    selftest = importlib.import_module("quant_kernels.selftest")
    result = selftest.run()
    return {"passed": bool(result.passed), "detail": str(result)}


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return "; ".join(f"{key}: {each}" for key, each in value.items())
    if value is None:
        return "none: conversions run in plain torch"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
