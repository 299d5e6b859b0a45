"""vLLM: `--quantization quant_spec` quantizes a checkpoint while vLLM loads it.

vLLM finds `register` by the entry point `vllm.general_plugins`, in every process that it starts. The request is given
through vLLM's own options, in one of these ways:

- `--hf-overrides '{"quantization_config_dict_json": "<the request as JSON text>"}'`
- `--hf-overrides '{"quantization_config_file": "request.json"}'`
- `--quantization-config '{"targets": {"*.mlp.*": "mxfp4"}, "ignore": ["*.gate"]}'`, whose keys and words are vLLM's.

The report goes to `$QUANT_SPEC_REPORT_DIR`, as everywhere.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig as VllmQuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from quant_kernels.integrations.engine import EngineQuantizer
from quant_kernels.integrations.vllm_checkpoint import check_checkpoint, stored_block
from quant_kernels.integrations.vllm_methods import (
    ConvertedExperts,
    ConvertedLinear,
    KeptExperts,
    KeptLinear,
    check_experts,
)
from quant_spec import ConfigError, Defect, ModelFacts, QuantizationConfig
from quant_spec.documents import load_json, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from transformers import PretrainedConfig
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.model_executor.models.utils import WeightsMapper

METHOD: Final = "quant_spec"
"""What `--quantization` takes."""
TESTED: Final = ("0.32.0",)
"""Versions of vLLM that the tests have seen."""
_KEYS: Final = ("quantization_config_dict_json", "quantization_config_file")
_HELP: Final = (
    'no request: give it as --hf-overrides \'{"quantization_config_dict_json": "…"}\' (JSON text),'
    ' \'{"quantization_config_file": "request.json"}\', or --quantization-config \'{"targets": {…}}\''
)
_log = logging.getLogger("quant_kernels")


def register() -> None:
    """Make `quant_spec` known to vLLM; calling it again does nothing."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS  # noqa: PLC0415  (as it is at the call)
    from vllm.version import __version__  # noqa: PLC0415  (needed here alone)

    if METHOD in QUANTIZATION_METHODS:
        return
    if not any(__version__.startswith(each) for each in TESTED):
        _log.warning("vLLM %s: the integration was tested with %s", __version__, ", ".join(TESTED))
    register_quantization_config(METHOD)(QuantSpecConfig)


class QuantSpecConfig(VllmQuantizationConfig):
    """vLLM's view of a request: asked for each module's method while the model is built."""

    def __init__(self, request: object = None, *, checkpoint: Mapping[str, object] | None = None) -> None:
        """Take a request; None: it comes later, from the options.

        Args:
            request: an `online_quant_config`, or an object of `targets`.
            checkpoint: the `quantization_config` of the checkpoint.

        Raises:
            ConfigError: with every defect of the request.
        """
        super().__init__()
        if request is not None:
            QuantizationConfig.from_online(request)  # refused where the user sees it, before any worker starts
        self.request = request
        self.checkpoint = checkpoint
        self.model = ""
        self.hf_config: PretrainedConfig | None = None
        self._quantizer: EngineQuantizer | None = None
        self._renames: dict[str, str] = {}

    @classmethod
    def get_name(cls) -> str:
        """Return the method's name."""
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the dtypes that a model may compute in."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least CUDA capability: any, since kernels fall back to plain torch."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no file: the request is no part of a checkpoint."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, object]) -> QuantSpecConfig:
        """Return the config over a checkpoint that says how it is quantized."""
        return cls(checkpoint=config)

    @classmethod
    def from_config_dict_json(cls, text: str) -> QuantSpecConfig:
        """Return the config of a request given as JSON text.

        Raises:
            ConfigError: with every defect of it.
        """
        return cls(load_json(text, _KEYS[0]))

    @classmethod
    def from_config_file(cls, path: str) -> QuantSpecConfig:
        """Return the config of a request in a file.

        Raises:
            ConfigError: with every defect of it, or the file cannot be read.
        """
        return cls(read_json(path))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, object], user_quant: str | None, hf_config: object = None
    ) -> str | None:
        """Take over a quantized checkpoint if the user asked for it by name."""
        del hf_quant_cfg, hf_config
        return METHOD if user_quant == METHOD else None

    @property
    def online_quantization_config(self) -> None:
        """None: vLLM's own online methods have no part in this."""
        return

    @online_quantization_config.setter
    def online_quantization_config(self, given: OnlineQuantizationConfig) -> None:
        """Take the request from `--quantization-config`."""
        from quant_kernels.integrations.vllm_request import request_of  # noqa: PLC0415  (this option alone)

        if self.request is not None:
            raise ConfigError(Defect("$", "two requests: --hf-overrides and --quantization-config; give one of them"))
        request = request_of(given.args)
        QuantizationConfig.from_online(request)
        self.request = request

    def maybe_update_config(
        self, model_name: str, hf_config: PretrainedConfig | None = None, revision: str | None = None
    ) -> None:
        """Learn the model's name and config."""
        del revision
        self.model, self.hf_config = model_name, hf_config

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Learn how the checkpoint's names become module names."""
        renames = {f"{old}": new or "" for old, new in hf_to_vllm_mapper.orig_to_new_prefix.items()}
        renames |= {f".{old.strip('.')}.": new or "" for old, new in hf_to_vllm_mapper.orig_to_new_substr.items()}
        self._renames = renames

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return how a module keeps and applies its weight.

        Raises:
            ConfigError, ResolveError: the request is refused, or shards of a fused module disagree.
        """
        if not prefix or not isinstance(layer, (LinearBase, RoutedExperts, ParallelLMHead)):
            return None
        if isinstance(layer, ParallelLMHead) and getattr(self.hf_config, "tie_word_embeddings", False):
            return None
        quantizer = self.quantizer()
        quantizer.map_packed(self.packed_modules_mapping)
        experts = isinstance(layer, RoutedExperts)
        wanted = quantizer.add(prefix, layer, kind="moe" if experts else "linear")
        source = stored_block(quantizer.config, prefix)
        ours = source is not None or (wanted is not None and wanted.quant_method == "online" and wanted.is_quantized)
        if experts:
            if not ours:
                return KeptExperts(layer.moe_config, quantizer, prefix)
            check_experts(layer, prefix)
            return ConvertedExperts(layer.moe_config, quantizer, prefix, source)
        if isinstance(layer, ParallelLMHead) and not ours:
            return None
        return ConvertedLinear(quantizer, prefix, source) if ours else KeptLinear(quantizer, prefix)

    def quantizer(self) -> EngineQuantizer:
        """Return the quantizer of this process, made when it is first asked for.

        Raises:
            ConfigError: there is no request, or with every defect of it.
        """
        if self._quantizer is None:
            request = self.request if self.request is not None else _request_of_options()
            check_checkpoint(self.checkpoint)
            source = QuantizationConfig.from_dict(self.checkpoint, facts=self._facts()).remapped(self._renames)
            config = QuantizationConfig.from_online(request, source=source)
            group = get_tp_group()
            ranks = None
            if group.world_size > 1:
                ranks = group.device_group if torch.cuda.is_available() else group.cpu_group
            self._quantizer = EngineQuantizer(config, model=self.model, group=ranks)
        return self._quantizer

    def _facts(self) -> ModelFacts:
        """Return what config.json says beside the checkpoint's `quantization_config`."""
        dtype = getattr(self.hf_config, "dtype", None) or getattr(self.hf_config, "torch_dtype", None) or "bfloat16"
        return ModelFacts(
            model_type=getattr(self.hf_config, "model_type", None),
            torch_dtype=str(dtype).removeprefix("torch."),
            expert_dtype=getattr(self.hf_config, "expert_dtype", None),
        )


def _request_of_options() -> object:
    """Return the request in the `hf_overrides` of the model that is being built."""
    overrides = get_current_vllm_config().model_config.hf_overrides
    given = overrides if isinstance(overrides, dict) else {}
    text, path = (given.get(key) for key in _KEYS)
    if isinstance(text, str):
        return load_json(text, _KEYS[0])
    if isinstance(path, str):
        return read_json(path)
    raise ConfigError(Defect("$", _HELP))
