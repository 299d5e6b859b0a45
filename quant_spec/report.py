"""QuantReport: what was quantized to what, by which rule, what was kept and why.

The file's first four keys, and the first three of each layer, are those that serving engines already write; tools that
read them keep working. Everything else is added. Described by `schemas/report.schema.json`.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from quant_spec.errors import QuantSpecError

if TYPE_CHECKING:
    from rich.console import RenderableType

REPORT_DIR_VARIABLES: Final = ("QUANT_SPEC_REPORT_DIR", "ATOM_TORCH_PROFILER_DIR")
"""Environment variables that name the folder of reports, the first that is set and not empty counts."""

_SHOWN_VALUE: Final = 100
"""Characters of a value in lines and tables; a request's are shorter, a checkpoint's own may be long."""


def layer_type(name: str) -> str:
    """Return a layer's name without the block that it stands in: what follows the last number, or all of it.

    >>> layer_type("model.layers.3.mlp.experts"), layer_type("lm_head"), layer_type("model.layers.0")
    ('mlp.experts', 'lm_head', 'model.layers.0')
    """
    segments = name.split(".")
    for index in range(len(segments) - 2, -1, -1):
        if segments[index].isdigit():
            return ".".join(segments[index + 1 :])
    return name


@attrs.frozen
class Rule:
    """The entry of a document that decided about a layer.

    Attributes:
        why: `exclude`, `pattern`, `global`, `unsupported` or `already`.
        entry: the entry as written; None if no single entry decided.
        path: its JSON path in the document; None likewise.
        value: what the document says there, if the entry is the key of an object.
    """

    why: str
    entry: str | None = None
    path: str | None = None
    value: object = None

    @property
    def section(self) -> str:
        """The document's top-level key, as `layer_quant_config`; empty if unknown."""
        return (self.path or "").removeprefix("$").lstrip(".").partition("[")[0].partition(".")[0]

    def __str__(self) -> str:
        """Return `SECTION: ENTRY, VALUE` as far as known, else the word `why`."""
        parts = [] if self.entry is None else [self.entry]
        if self.value is not None:
            compact = json.dumps(self.value, separators=(",", ":"), ensure_ascii=False)
            text = self.value if isinstance(self.value, str) else compact
            parts.append(text if len(text) <= _SHOWN_VALUE else f"{text[: _SHOWN_VALUE - 1]}…")
        said = ", ".join(parts) or self.why
        return f"{self.section}: {said}" if self.section else said


@attrs.frozen
class LayerReport:
    """One quantized layer.

    Attributes:
        layer: module name; for routed experts the container, `….experts`.
        quant_type: granularity in the engines' words, as `per_1x32`.
        quant_dtype: torch dtype of the stored codes as text; MXFP4 is `torch.uint8`.
        source: format before: a key's word (`fp8_e4m3/block_128x128`) or an element type (`bf16`).
        target: the weight's key now.
        activation: word of the activation; `none` if unquantized.
        rule: what decided.
        shapes: distinct shapes of its weights, in elements.
        weights: number of weight tensors (1 but for experts).
        bytes_before: bytes of weights and scales in the source.
        bytes_after: bytes of codes and scales now.
        kernel: `native` or `reference`.
        seconds: time spent converting it, reading and writing included.
        sqnr_db: signal to quantization noise, 10·log10(Σ w² / Σ (w − ŵ)²) in dB; None if not measured.
        experts: global indices of the experts of all ranks, as `0-63, 70`, where whole experts are spread over ranks.
    """

    layer: str
    quant_type: str
    quant_dtype: str
    source: str
    target: str
    activation: str
    rule: Rule
    shapes: tuple[tuple[int, ...], ...]
    weights: int
    bytes_before: int
    bytes_after: int
    kernel: str
    seconds: float
    sqnr_db: float | None = None
    experts: str | None = None


@attrs.frozen
class KeptLayer:
    """One layer that could have been quantized and was not.

    Attributes:
        layer: module name.
        source: its format, as in `LayerReport.source`.
        rule: what decided.
        reason: why, in words and with the numbers.
        shapes: distinct shapes of its weights, in elements.
        nbytes: bytes of weights and scales.
    """

    layer: str
    source: str
    rule: Rule
    reason: str
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int


@attrs.frozen
class OtherModules:
    """Modules of a kind that is never quantized, counted.

    Attributes:
        kind: `embedding`, `norm` or `conv`.
        modules: how many.
        nbytes: bytes of their weights.
        reason: why they stay, in words.
    """

    kind: str
    modules: int
    nbytes: int
    reason: str


@attrs.frozen
class LoadingFacts:
    """What loading a model in memory took, beside the conversions themselves.

    Attributes:
        ranks: processes that the model is spread over.
        load_seconds: wall time from the first weight to the last conversion, the longest of the ranks.
        bytes_read: bytes of the tensors that were loaded, over all ranks; 0 for a model that held its weights before.
        peak_bytes: greatest memory in use on a rank: allocated on its device, or resident in its process.
        sent_bytes: bytes that the ranks put into collectives.
    """

    ranks: int
    load_seconds: float
    bytes_read: int
    peak_bytes: int
    sent_bytes: int


@attrs.frozen
class UnmatchedEntry:
    """An entry of the request that fits no module.

    Attributes:
        entry: the entry as written.
        path: its JSON path.
        nearest: entries that it may have been meant for, see `name_hints.NameHints`.
    """

    entry: str
    path: str
    nearest: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the warning of the log."""
        near = f"; nearest names: {', '.join(self.nearest)}" if self.nearest else ""
        return f"{self.path}: the pattern {self.entry!r} matches no module{near}"


class ReportError(QuantSpecError):
    """The job is done, and its report cannot be written.

    Attributes:
        report: what could not be written.
    """

    def __init__(self, message: str, report: QuantReport) -> None:
        """Take the message and the report."""
        super().__init__(message)
        self.report = report


@attrs.frozen
class QuantReport:
    """What a whole job did.

    Attributes:
        model: folder or name of the model.
        online_quant_config: the request as given.
        elapsed_seconds: wall time of the job; of a model in memory, that of the conversions alone.
        layers: the quantized layers, in model order.
        kept: layers that stay as they are, in model order.
        unmatched: entries of the request that fit no module.
        warnings: risky or surprising things, one sentence each.
        bytes_before: bytes of all tensors of the source.
        bytes_after: bytes of all tensors now.
        versions: package -> version.
        digest: digest of the configuration that was applied.
        output: folder that was written; None for a model in memory or a plan.
        loading: for a model in memory, what loading took; None for a checkpoint job or a plan.
        others: embeddings, norms and convolutions, which are never quantized, counted by kind; a checkpoint job's.
        saved_to: the report's file, if one was written; not part of the file itself.
    """

    model: str
    online_quant_config: object
    elapsed_seconds: float
    layers: tuple[LayerReport, ...]
    kept: tuple[KeptLayer, ...] = ()
    unmatched: tuple[UnmatchedEntry, ...] = ()
    warnings: tuple[str, ...] = ()
    bytes_before: int = 0
    bytes_after: int = 0
    versions: Mapping[str, str] = attrs.field(factory=dict)
    digest: str = ""
    output: str | None = None
    loading: LoadingFacts | None = None
    others: tuple[OtherModules, ...] = ()
    saved_to: Path | None = None

    @property
    def num_layers(self) -> int:
        """Number of quantized layers."""
        return len(self.layers)

    def to_dict(self) -> dict[str, object]:
        """Return the JSON object of the report's file."""
        return {
            "model": self.model,
            "online_quant_config": self.online_quant_config,
            "elapsed_seconds": self.elapsed_seconds,
            "num_layers": self.num_layers,
            "layers": [_plain(layer) for layer in self.layers],
            "kept": [_plain(layer) for layer in self.kept],
            "unmatched": [_plain(entry) for entry in self.unmatched],
            "warnings": list(self.warnings),
            "totals": {
                "layers_quantized": self.num_layers,
                "layers_kept": len(self.kept),
                "weights_quantized": sum(layer.weights for layer in self.layers),
                "bytes_before": self.bytes_before,
                "bytes_after": self.bytes_after,
                "quantized_bytes_before": sum(layer.bytes_before for layer in self.layers),
                "quantized_bytes_after": sum(layer.bytes_after for layer in self.layers),
            },
            "versions": dict(self.versions),
            "digest": self.digest,
            "output": self.output,
            "loading": _plain(self.loading),
            "others": _plain(self.others),
        }

    def write(self, folder: Path | str | None = None) -> Path:
        """Write `online_quant_info_<timestamp>_<ns>.json` and return its path.

        Args:
            folder: where to; None: `$QUANT_SPEC_REPORT_DIR`, `$ATOM_TORCH_PROFILER_DIR` or the current folder. It is
                made if it is missing.

        Raises:
            ReportError: the folder cannot be made or written to; what the job made is complete.
        """
        target = report_folder(folder)
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        now = time.time_ns()
        stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(now // 10**9))
        path = target / f"online_quant_info_{stamp}_{now % 10**9:09d}.json"
        return self._written(path, text)

    def page(self) -> str:
        """Return an HTML page: totals, pictures of sizes and errors, a table with a search; it needs no network."""
        from quant_spec.page import report_page  # noqa: PLC0415  (for those who ask for a page)

        return report_page(self)

    def write_page(self, path: Path | str) -> Path:
        """Write the page to a new file and return its path.

        Raises:
            ReportError: it exists or cannot be written; what the job made is complete.
        """
        return self._written(Path(path), self.page())

    def _written(self, path: Path, text: str) -> Path:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as stream:
                stream.write(text)
        except OSError as error:
            done = f"{self.output} is complete, but " if self.output else ""
            message = f"{path.parent}: {done}the report cannot be written: {path.name}: {error.strerror or error}"
            raise ReportError(message, self) from error
        return path

    def summary(self) -> str:
        """Return the log line that counts the quantized layers by type and rule."""
        groups = Counter((layer_type(layer.layer), str(layer.rule)) for layer in self.layers)
        listed = ", ".join(f"{kind}: {count} (from {rule})" for (kind, rule), count in groups.items())
        return f"Quantized {self.num_layers} layers of types: {listed}"

    def log_lines(self) -> tuple[str, ...]:
        """Return the lines of the log; the last says where the report's file is, if there is one."""
        done = f"Weight post-processing done: {self.elapsed_seconds:.2f} seconds"
        lines = [f"{done}, {self.num_layers} layers online-quantized", self.summary()]
        if self.saved_to is not None:
            lines.append(f"Online quantization info saved to {self.saved_to}")
        return tuple(lines)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        from quant_spec.html import report_html  # noqa: PLC0415  (for notebooks only)

        return report_html(self)

    def __rich__(self) -> RenderableType:
        """Return the terminal table (80 columns wide at least)."""
        from quant_spec.report_table import render  # noqa: PLC0415  (rich is needed on a terminal alone)

        return render(self)


def report_folder(given: Path | str | None = None) -> Path:
    """Return the folder of reports: the one given, else that of the environment, else the current one."""
    if given is not None:
        return Path(given)
    named = next((os.environ[name] for name in REPORT_DIR_VARIABLES if os.environ.get(name)), ".")
    return Path(named)


def check_report_folder(given: Path | str | None = None) -> None:
    """Refuse a folder of reports that cannot be made or written to; makes nothing.

    Raises:
        QuantSpecError: it cannot.
    """
    folder = report_folder(given)
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        problem = "is no folder" if not existing.is_dir() else "cannot be written to"
        message = f"{folder}: no report can be written there: {existing} {problem}"
        raise QuantSpecError(message)


def _plain(value: object) -> object:
    """Return attrs values as JSON objects, tuples as lists."""
    if attrs.has(type(value)):
        fields = attrs.fields(type(value))  # type: ignore[arg-type]  # attrs.has has just said so
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return value
