"""The bodies of the command line's commands; `quant_kernels.cli` has their options."""
