"""Recommends a request for a checkpoint: errors and sizes of formats are measured, and the best trade is chosen."""
