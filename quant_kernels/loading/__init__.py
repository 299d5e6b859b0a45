"""Checkpoints and models: reading them, planning what becomes what, converting them tensor by tensor."""
