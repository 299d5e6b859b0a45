"""A checkpoint folder in the Hugging Face layout: config.json and safetensors files, with or without an index.

Only JSON and headers are read, and only of files that lie in the folder (see `within`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

import attrs

from quant_kernels.loading.headers import StoredTensor, check_name, load_object, read_header_and_stamp
from quant_kernels.loading.within import Stamp, allowed_roots, kind_of, read_plain, real_path
from quant_spec.errors import LoadError, nearest, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG_NAME: Final = "config.json"
SINGLE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
MODELOPT_NAME: Final = "hf_quant_config.json"
_LISTED: Final = 5


@attrs.frozen
class CheckpointFolder:
    """What a checkpoint folder says about itself.

    Attributes:
        path: the folder.
        config: the object of config.json.
        tensors: every stored tensor by name, in the order of files and of data.
        shards: names of the safetensors files, relative to `path`.
        indexed: True if an index names the shards.
        warnings: what looks wrong but does not stop anything.
        stamps: shard -> what tells whether it has changed since its header was read.
    """

    path: Path
    config: Mapping[str, object] = attrs.field(repr=False)
    tensors: Mapping[str, StoredTensor] = attrs.field(repr=False)
    shards: tuple[str, ...]
    indexed: bool
    warnings: tuple[str, ...] = ()
    stamps: Mapping[str, Stamp] = attrs.field(factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_folder(path: Path) -> CheckpointFolder:
    """Read config.json, the index and all safetensors headers of a checkpoint folder.

    Raises:
        LoadError: the folder or a file is missing, damaged, or points outside the folder.
        ConfigError: config.json is no valid JSON object.
    """
    if not path.is_dir():
        kind = "is a file" if path.exists() else "does not exist"
        message = f"{path}: {kind}; a checkpoint folder with {CONFIG_NAME} and safetensors files is required"
        raise LoadError(message)
    config = read_object(path, CONFIG_NAME)
    if os.path.lexists(path / INDEX_NAME):
        weight_map = _weight_map(read_object(path, INDEX_NAME))
        shards = tuple(dict.fromkeys(weight_map.values()))
    elif os.path.lexists(path / SINGLE_NAME):
        weight_map = None
        shards = (SINGLE_NAME,)
    else:
        raise LoadError(_no_weights(path))
    roots = allowed_roots(path)
    tensors: dict[str, StoredTensor] = {}
    stamps: dict[str, Stamp] = {}
    for shard in shards:
        if not shard.endswith(".safetensors"):
            message = f"{path}: the shard {shown(shard)} named by {INDEX_NAME} is no *.safetensors file"
            raise LoadError(message)
        stored, stamps[shard] = read_header_and_stamp(_shard_path(path, shard, roots), shard)
        found = {tensor.name: tensor for tensor in stored}
        twice = next(iter(tensors.keys() & found.keys()), None)
        if twice is not None:
            message = f"tensor {shown(twice)} is stored twice: in {tensors[twice].file} and in {shard}"
            raise LoadError(message)
        tensors.update(found)
    warnings = tuple(_check_index(weight_map, tensors)) if weight_map is not None else ()
    if not tensors:
        message = f"{path}: {', '.join(shards)} holds no tensor"
        raise LoadError(message)
    return CheckpointFolder(path, config, tensors, shards, weight_map is not None, warnings, stamps)


def read_object(folder: Path, name: str) -> dict[str, object]:
    """Return the JSON object in a file of a checkpoint folder.

    Raises:
        LoadError: the file is missing, no plain file, too large, or lies outside the folder; its content is no object.
        ConfigError: it is no valid JSON.
    """
    from quant_spec.documents import load_json  # noqa: PLC0415  (reading headers alone does not need it)

    path = folder / name
    try:
        raw = read_plain(real_path(folder, name, allowed_roots(folder)), str(path))
    except FileNotFoundError:
        message = f"{path}: missing; a checkpoint folder holds {CONFIG_NAME} and safetensors files"
        raise LoadError(message) from None
    if name == INDEX_NAME:
        # Large and written by machines: the plain parser is many times faster.
        return load_object(raw, str(path))
    document = load_json(raw, str(path))
    if not isinstance(document, dict):
        message = f"{path}: a JSON object is required, found {shown(document)}"
        raise LoadError(message)
    return document


def _weight_map(index: dict[str, object]) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        message = f"{INDEX_NAME}: weight_map must be an object {{tensor: file}}, found {shown(weight_map)}"
        raise LoadError(message)
    strange = next((name for name, file in weight_map.items() if type(file) is not str), None)
    if strange is not None:
        found = shown(weight_map[strange])
        message = f"{INDEX_NAME}: weight_map[{shown(strange)}]: a file name is required, found {found}"
        raise LoadError(message)
    for file in set(weight_map.values()):
        check_name(file, f"{INDEX_NAME}: weight_map")
        pure = PurePosixPath(file)
        if pure.is_absolute() or ".." in pure.parts or "\\" in file or ":" in file:
            message = f"{INDEX_NAME}: the shard {shown(file)} lies outside the checkpoint folder"
            raise LoadError(message)
    return weight_map


def _shard_path(path: Path, shard: str, roots: tuple[Path, ...]) -> Path:
    """Return where a shard really lies.

    Raises:
        LoadError: it is missing, no file, or a link that leaves the allowed folders.
    """
    file = path / shard
    with suppress(OSError):
        # The usual case, at the cost of one system call: a plain file that stands in the folder itself.
        if "/" not in shard and stat.S_ISREG(os.lstat(file).st_mode):
            return file
    real = real_path(path, shard, roots)
    try:
        mode = real.stat().st_mode
    except OSError:
        others = [each.name for each in path.glob("*.safetensors")]
        near = nearest(shard, others)
        hint = f"; did you mean {near!r}?" if near and near != shard else ""
        message = f"{path}: the shard {shown(shard)} named by {INDEX_NAME} is missing{hint}"
        raise LoadError(message) from None
    if not stat.S_ISREG(mode):
        message = f"{path}: the shard {shown(shard)} is no file: it is {kind_of(mode)}"
        raise LoadError(message)
    return real


def _check_index(weight_map: dict[str, str], tensors: dict[str, StoredTensor]) -> Iterator[str]:
    """Compare what the index says with what the files hold; yield warnings.

    Raises:
        LoadError: a tensor is not in the file that the index names.
    """
    for name, file in weight_map.items():
        stored = tensors.get(name)
        if stored is None or stored.file != file:
            found = "is not there" if stored is None else f"is in {stored.file}"
            message = f"{INDEX_NAME}: the tensor {shown(name)} should be in {file} and {found}"
            raise LoadError(message)
    if len(weight_map) != len(tensors):
        extra = [name for name in tensors if name not in weight_map]
        listed = ", ".join(map(shown, extra[:_LISTED])) + (", …" if len(extra) > _LISTED else "")
        yield f"{len(extra)} tensors are in the files but not in {INDEX_NAME}: {listed}"


def _no_weights(path: Path) -> str:
    found = sorted(
        each.name for each in path.iterdir() if each.suffix in {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
    )
    listed = f"; found {', '.join(found[:_LISTED])}" if found else ""
    return f"{path}: neither {SINGLE_NAME} nor {INDEX_NAME} is there{listed}"
