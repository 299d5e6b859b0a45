"""Reports to look at: one of an ordinary job, one in which every text is hostile."""

from __future__ import annotations

import attrs

from quant_spec.report import KeptLayer, LayerReport, LoadingFacts, OtherModules, QuantReport, Rule, UnmatchedEntry

MLP = Rule("pattern", "*.mlp.*", "$.layer_quant_config['*.mlp.*']", "mxfp4")
GLOBAL = Rule("global", None, "$.global_quant_config", "ptpc_fp8")
LAYERS = 6


def mlp_layer(block: int) -> LayerReport:
    """Return an MXFP4 layer; the first block is the worst."""
    before, after = 2 * 512 * 256, 512 * 256 // 2 + 512 * 8
    name = f"model.layers.{block}.mlp.up_proj"
    sqnr = 17.0 if block == 0 else 18.0 + 0.1 * block
    shapes = ((512, 256),)
    return LayerReport(
        name,
        "per_1x32",
        "torch.uint8",
        "bf16",
        "mxfp4",
        "mxfp4:dynamic",
        MLP,
        shapes,
        1,
        before,
        after,
        "native",
        0.5,
        sqnr,
    )


def attention_layer(block: int) -> LayerReport:
    """Return a PTPC layer."""
    name = f"model.layers.{block}.self_attn.q_proj"
    size = 256 * 256
    return LayerReport(
        name,
        "per_Token",
        "torch.float8_e4m3fn",
        "bf16",
        "fp8_e4m3/per_channel",
        "fp8_e4m3/per_token:dynamic",
        GLOBAL,
        ((256, 256),),
        1,
        2 * size,
        size + 4 * 256,
        "native",
        0.25,
        31.0 + 0.1 * block,
    )


REPORT = QuantReport(
    model="models/small",
    online_quant_config={"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*.mlp.*": "mxfp4"}},
    elapsed_seconds=2.34,
    layers=tuple(each for block in range(LAYERS) for each in (attention_layer(block), mlp_layer(block))),
    kept=(
        KeptLayer("lm_head", "bf16", Rule("exclude", "lm_head", "$.exclude_layer[0]"), "excluded", ((96, 64),), 12288),
    ),
    unmatched=(UnmatchedEntry("*.gate.*", "$.exclude_layer[1]", ("gate_proj", "gate_up_proj")),),
    warnings=("$.exclude_layer[1]: '*.gate.*' matches no module",),
    bytes_before=6 * (2 * 512 * 256 + 2 * 256 * 256) + 12288 + 100_000,
    bytes_after=6 * (512 * 256 // 2 + 512 * 8 + 256 * 256 + 4 * 256) + 12288 + 100_000,
    versions={"quant-spec": "0.1.0"},
    digest="ab" * 32,
    output="out",
    others=(OtherModules("embedding", 1, 60_000, "embedding modules are not quantized"),),
)

ATTACKS = (
    "<script>window.hacked=1</script>",
    "\"><img src=x onerror='window.hacked=1'>",
    "</title></style></script><script>window.hacked=1</script>",
    "<!--",
    "&lt;b&gt;",
    "a\x00\x1b[31m\u202eb\ud800",
)


def hostile(attack: str) -> QuantReport:
    """Return a report in which every text that can come from outside is `attack`."""
    rule = Rule("pattern", attack, attack, {attack: attack})
    layers = tuple(
        attrs.evolve(
            layer, layer=f"{attack}.{index}.{attack}", source=attack, target=attack, activation=attack, rule=rule
        )
        for index, layer in enumerate(REPORT.layers)
    )
    return attrs.evolve(
        REPORT,
        model=attack,
        online_quant_config={attack: [attack]},
        layers=layers,
        kept=tuple(attrs.evolve(each, layer=attack, source=attack, rule=rule, reason=attack) for each in REPORT.kept),
        unmatched=(UnmatchedEntry(attack, attack, (attack,)),),
        warnings=(attack,),
        others=(OtherModules(attack, 1, 1, attack),),
        versions={attack: attack},
        digest=attack,
        output=attack,
    )


IN_MEMORY = attrs.evolve(REPORT, output=None, loading=LoadingFacts(8, 12.5, 1 << 30, 1 << 28, 4096))
