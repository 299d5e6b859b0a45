"""The commands of `quant-spec` and their options; each body is a module of its own, imported when it is called."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Final

import typer

from quant_kernels.commands.console import refusals

EXIT_CODES: Final = (
    "Exit codes: 0 done; 1 input refused, nothing was made; 2 wrong usage; 3 self-test failed; 4 the work is done and"
    " complete, but its report or the answer could not be written; 130 interrupted; 143 terminated."
)
app: Final = typer.Typer(
    name="quant-spec",
    help="Plan, explain and carry out the quantization of checkpoints.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _examples(*lines: str) -> str:
    """Return the end of a command's help: examples, each on a line of its own."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


ModelDir = Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Folder with config.json and safetensors files.")]
Request = Annotated[
    str,
    typer.Option(
        "--online-quant-config", metavar="REQUEST", help="The request: JSON text, a file, or - for standard input."
    ),
]
OptionalRequest = Annotated[
    str | None,
    typer.Option("--online-quant-config", metavar="REQUEST", help="The request; without it, the checkpoint's own."),
]
Shorthand = Annotated[
    str | None, typer.Option("--quantization", metavar="WORD", help="vLLM's shorthand beside the request.")
]
Unsupported = Annotated[
    str,
    typer.Option(
        "--on-unsupported",
        metavar="keep|error",
        autocompletion=lambda: ["keep", "error"],
        help="Layers that cannot be converted: keep them and warn, or refuse.",
    ),
]
Unmatched = Annotated[
    str,
    typer.Option(
        "--on-unmatched",
        metavar="warn|error",
        autocompletion=lambda: ["warn", "error"],
        help="Entries that fit no module: warn, or refuse.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document to standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")]
SourceDocument = Annotated[
    str | None, typer.Option("--source", metavar="CONFIG", help="The checkpoint's config below a request.")
]
Document = Annotated[
    str,
    typer.Argument(metavar="DOCUMENT", help="A request, a quantization_config, or a config.json: text, a file, or -."),
]
Names = Annotated[
    str,
    typer.Argument(metavar="CONFIG", help="A request, a quantization_config, or a config.json: JSON text or a file."),
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


@app.command(
    short_help="What a request makes of a checkpoint.",
    epilog=_examples(
        "quant-spec plan Qwen3-8B --online-quant-config recipe.json",
        "quant-spec plan Qwen3-8B --online-quant-config recipe.json --quiet",
        """quant-spec plan Qwen3-8B --online-quant-config '{"linear": "mxfp8"}'""",
    ),
)
def plan(
    model_dir: ModelDir,
    request: Request,
    quantization: Shorthand = None,
    on_unsupported: Unsupported = "keep",
    on_unmatched: Unmatched = "warn",
    verbose: Annotated[bool, typer.Option("--verbose", help="One row a module, embeddings and norms too.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Say what a request makes of a checkpoint; reads config.json and safetensors headers only."""
    with refusals(as_json=as_json):
        from quant_kernels.commands import plan as command

        command.run_plan(
            model_dir,
            request,
            quantization=quantization,
            on_unsupported=on_unsupported,
            on_unmatched=on_unmatched,
            as_json=as_json,
            verbose=verbose,
            quiet=quiet,
        )


@app.command(
    short_help="What one module becomes, why, and by which entry.",
    epilog=_examples(
        "quant-spec explain Qwen3-8B lm_head --online-quant-config recipe.json",
        "quant-spec explain DeepSeek-R1 model.layers.3.mlp.experts",
    ),
)
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


@app.command(
    short_help="Quantize a checkpoint folder into another one.",
    epilog=_examples(
        "quant-spec quantize Qwen3-8B --online-quant-config recipe.json --output out",
        """quant-spec quantize Qwen3-8B --online-quant-config recipe.json \\""",
        "    --output out --report-dir reports --measure --html",
    ),
)
def quantize(
    model_dir: ModelDir,
    request: Request,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Folder to be written; must not exist.")],
    report_dir: Annotated[
        Path | None, typer.Option("--report-dir", metavar="DIR", help="Folder of the report's file.")
    ] = None,
    html: Annotated[
        bool, typer.Option("--html", help="Write the report as an HTML page too, beside its file.")
    ] = False,
    scale_rounding: Annotated[
        str | None,
        typer.Option(
            "--scale-rounding",
            metavar="WORD",
            autocompletion=lambda: ["even", "floor", "rceil"],
            help="Rounding of power-of-two scales: even, floor or rceil; else each format's own.",
        ),
    ] = None,
    export_format: Annotated[
        str,
        typer.Option(
            "--export-format",
            metavar="WORD",
            autocompletion=lambda: ["quark", "compressed-tensors"],
            help="Whose checkpoint it becomes: quark or compressed-tensors.",
        ),
    ] = "quark",
    quantization: Shorthand = None,
    on_unsupported: Unsupported = "keep",
    on_unmatched: Unmatched = "warn",
    measure: Annotated[bool, typer.Option("--measure", help="Measure each layer's signal to noise ratio.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all of it again and compare it with the source, converted once more.")
    ] = False,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove what an interrupted run left in OUTPUT.partial, and start anew.")
    ] = False,
    ranks: Annotated[
        str | None,
        typer.Option(
            "--ranks", metavar="RANK/WORLD", help="This process among several that share the work; torchrun says it."
        ),
    ] = None,
    rank_timeout: Annotated[
        float, typer.Option("--rank-timeout", metavar="SECONDS", help="When a process not heard of counts as dead.")
    ] = 120.0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Quantize a checkpoint folder into another one, and write a report.

    OUTPUT appears when it is complete. An interruption leaves OUTPUT.partial, which the same command takes up again.
    The report goes to --report-dir, else $QUANT_SPEC_REPORT_DIR, else $ATOM_TORCH_PROFILER_DIR, else the current
    folder. Under torchrun, or with --ranks, the shards are spread over the processes.
    """
    with refusals(as_json=as_json):
        from quant_kernels.commands import quantize as command

        command.run(
            model_dir,
            request,
            output,
            report_dir=report_dir,
            html=html,
            scale_rounding=scale_rounding,
            export_format=export_format,
            quantization=quantization,
            on_unsupported=on_unsupported,
            on_unmatched=on_unmatched,
            measure=measure,
            verify=verify,
            clean=clean,
            ranks=ranks,
            rank_timeout=rank_timeout,
            as_json=as_json,
            quiet=quiet,
        )


@app.command(
    short_help="Show a report's file again: as a table, or as an HTML page.",
    epilog=_examples(
        "quant-spec report online_quant_info_20260801_101500_123.json",
        "quant-spec report online_quant_info_20260801_101500_123.json --html a.html",
    ),
)
def report(
    file: Annotated[Path, typer.Argument(metavar="REPORT", help="An online_quant_info_*.json.")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write it as an HTML page; must not exist.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show the file of a report, of whichever job: as a table, and on request as an HTML page."""
    with refusals(as_json=as_json):
        from quant_kernels.commands import report as command

        command.run(file, html=html, as_json=as_json, quiet=quiet)


@app.command(
    short_help="How far one checkpoint's weights are from another's.",
    epilog=_examples(
        "quant-spec compare Qwen3-8B Qwen3-8B-quantized",
        "quant-spec compare Qwen3-8B Qwen3-8B-quantized --html compared.html",
    ),
)
def compare(
    left: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="The checkpoint whose values are the signal.")],
    right: Annotated[Path, typer.Argument(metavar="OTHER_DIR", help="The checkpoint compared with it.")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write it as an HTML page; must not exist.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="List all layers, those that are the same too.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Print SQNR, largest error and cosine of each layer, the worst first; either may be quantized or not."""
    with refusals(as_json=as_json):
        from quant_kernels.commands import compare as command

        command.run(left, right, html=html, verbose=verbose, as_json=as_json, quiet=quiet)


@app.command(
    short_help="The request that makes the best of a number of bytes.",
    epilog=_examples(
        "quant-spec recommend Qwen3-8B --max-bytes 0.35 > recipe.json",
        "quant-spec recommend Qwen3-8B --min-sqnr 20 --svg curve.svg --json",
    ),
)
def recommend(
    model_dir: ModelDir,
    max_bytes: Annotated[
        float | None,
        typer.Option("--max-bytes", metavar="FRACTION", help="Size of the result, as a fraction of the source's."),
    ] = None,
    min_sqnr: Annotated[
        float | None,
        typer.Option("--min-sqnr", metavar="DB", help="Signal-to-noise ratio that no layer may fall below."),
    ] = None,
    formats: Annotated[
        str, typer.Option("--formats", metavar="NAMES", help="Formats to weigh, with commas between.")
    ] = "mxfp4,mxfp8,ptpc_fp8",
    objective: Annotated[
        str, typer.Option("--objective", metavar="relative|absolute|output", help="The error that is made small.")
    ] = "absolute",
    granularity: Annotated[
        str, typer.Option("--granularity", metavar="kind|layer", help="One format a kind of layer, or each by itself.")
    ] = "kind",
    scale_rounding: Annotated[
        str | None, typer.Option("--scale-rounding", metavar="even|floor|rceil", help="For power-of-two scales.")
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the trade-off as a picture.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure a checkpoint's weights, and print the online_quant_config that makes the best of its bytes."""
    with refusals(as_json=as_json):
        from quant_kernels.commands import recommend as command

        command.run(
            model_dir,
            max_bytes=max_bytes,
            min_sqnr=min_sqnr,
            formats=formats,
            objective=objective,
            granularity=granularity,
            scale_rounding=scale_rounding,
            svg=svg,
            as_json=as_json,
            quiet=quiet,
        )


@app.command(
    short_help="Check a document, and say what it means.",
    epilog=_examples(
        "quant-spec validate recipe.json",
        "quant-spec validate recipe.json --source DeepSeek-R1/config.json",
        """quant-spec validate '{"exclude_layers": ["lm_head"]}'""",
    ),
)
def validate(
    document: Document,
    source: SourceDocument = None,
    quantization: Shorthand = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check a document and say what it means; all defects at once."""
    with refusals(as_json=as_json):
        from quant_kernels.commands import documents as command

        command.run_validate(document, source=source, quantization=quantization, as_json=as_json, quiet=quiet)


@app.command(
    short_help="The format of each module named on standard input.",
    epilog=_examples(
        "echo model.layers.0.mlp.up_proj | quant-spec resolve recipe.json",
        "quant-spec resolve recipe.json --source R1/config.json < names.txt",
    ),
)
def resolve(
    config: Names,
    source: SourceDocument = None,
    quantization: Shorthand = None,
    as_json: AsJson = False,
) -> None:
    """Print the format of each module named on standard input: name, weight, activation, why, entry."""
    with refusals(as_json=as_json):
        from quant_kernels.commands import documents as command

        command.run_resolve(config, source=source, quantization=quantization, as_json=as_json)


@app.command(
    short_help="What this machine and build can do.",
    epilog=_examples("quant-spec kernels", "quant-spec kernels --self-test --quiet"),
)
def kernels(
    self_test: Annotated[bool, typer.Option("--self-test", help="Compare all conversions with the reference.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Print what this machine and build can do."""
    with refusals(as_json=as_json):
        from quant_kernels.commands import kernels as command

        command.run(self_test=self_test, as_json=as_json, quiet=quiet)
