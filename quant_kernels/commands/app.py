"""The commands of `quant-spec` and their options; each body is a module of its own, imported when it is called."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Final

import typer

from quant_kernels.commands.console import refusals

app: Final = typer.Typer(
    name="quant-spec",
    help="Plan, explain and carry out the quantization of checkpoints.",
    epilog="Exit codes: 0 done, 1 input refused, 2 wrong usage, 3 self-test failed, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ModelDir = Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Folder with config.json and safetensors files.")]
Request = Annotated[
    str,
    typer.Option(
        "--online-quant-config", metavar="JSON|FILE|-", help="The request: JSON text, a file, or - for stdin."
    ),
]
OptionalRequest = Annotated[
    str | None,
    typer.Option("--online-quant-config", metavar="JSON|FILE|-", help="The request; without it, the checkpoint's own."),
]
Shorthand = Annotated[
    str | None, typer.Option("--quantization", metavar="WORD", help="vLLM's shorthand beside the request.")
]
Unsupported = Annotated[
    str, typer.Option("--on-unsupported", metavar="keep|error", help="What to do with layers that cannot be converted.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document to standard output.")]
SourceDocument = Annotated[
    str | None, typer.Option("--source", metavar="JSON|FILE", help="The checkpoint's config below a request.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            found = version("quant-spec")
        except PackageNotFoundError:
            found = "unknown (not installed)"
        typer.echo(f"quant-spec {found}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Plan, explain and carry out the quantization of checkpoints."""


@app.command()
def quantize(
    model_dir: ModelDir,
    request: Request,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Folder to be written; must not exist.")],
    report_dir: Annotated[
        Path | None, typer.Option("--report-dir", metavar="DIR", help="Folder of the report's file.")
    ] = None,
    scale_rounding: Annotated[
        str | None,
        typer.Option("--scale-rounding", metavar="even|floor|rceil", help="Rounding of power-of-two scales."),
    ] = None,
    quantization: Shorthand = None,
    on_unsupported: Unsupported = "keep",
    measure: Annotated[bool, typer.Option("--measure", help="Measure each layer's signal to noise ratio.")] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")] = False,
) -> None:
    """Quantize a checkpoint folder into another one, and write a report.

    OUTPUT appears when it is complete. An interruption leaves OUTPUT.partial, which the same command takes up again.
    The report goes to --report-dir, else $QUANT_SPEC_REPORT_DIR, else $ATOM_TORCH_PROFILER_DIR, else the current
    folder.
    """
    with refusals(as_json=as_json):
        from quant_kernels.commands import quantize as command

        command.run(
            model_dir,
            request,
            output,
            report_dir=report_dir,
            scale_rounding=scale_rounding,
            quantization=quantization,
            on_unsupported=on_unsupported,
            measure=measure,
            as_json=as_json,
            quiet=quiet,
        )


@app.command()
def plan(
    model_dir: ModelDir,
    request: Request,
    quantization: Shorthand = None,
    on_unsupported: Unsupported = "keep",
    verbose: Annotated[bool, typer.Option("--verbose", help="One line a module, embeddings and norms too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a request makes of a checkpoint; reads config.json and safetensors headers only."""
    with refusals(as_json=as_json):
        from quant_kernels.commands import plan as command

        command.run_plan(
            model_dir,
            request,
            quantization=quantization,
            on_unsupported=on_unsupported,
            as_json=as_json,
            verbose=verbose,
        )


@app.command()
def explain(
    model_dir: ModelDir,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A module of the checkpoint.")],
    request: OptionalRequest = None,
    quantization: Shorthand = None,
    as_json: AsJson = False,
) -> None:
    """Say what one module of a checkpoint becomes, why, and which entry decided."""
    with refusals(as_json=as_json):
        from quant_kernels.commands import plan as command

        command.run_explain(model_dir, name, request, quantization=quantization, as_json=as_json)


@app.command()
def validate(
    document: Annotated[
        str,
        typer.Argument(metavar="FILE|-|JSON", help="A request, a quantization_config, or a config.json."),
    ],
    source: SourceDocument = None,
    quantization: Shorthand = None,
    as_json: AsJson = False,
) -> None:
    """Check a document and say what it means; all defects at once."""
    with refusals(as_json=as_json):
        from quant_kernels.commands import documents as command

        command.run_validate(document, source=source, quantization=quantization, as_json=as_json)


@app.command()
def resolve(
    config: Annotated[
        str, typer.Argument(metavar="FILE|JSON", help="A request, a quantization_config, or a config.json.")
    ],
    source: SourceDocument = None,
    quantization: Shorthand = None,
    as_json: AsJson = False,
) -> None:
    """Print the format of each module named on standard input: name, weight, activation, why, entry."""
    with refusals(as_json=as_json):
        from quant_kernels.commands import documents as command

        command.run_resolve(config, source=source, quantization=quantization, as_json=as_json)


@app.command()
def kernels(
    self_test: Annotated[bool, typer.Option("--self-test", help="Compare all conversions with the reference.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what this machine and build can do."""
    with refusals(as_json=as_json):
        from quant_kernels.commands import kernels as command

        command.run(self_test=self_test, as_json=as_json)
