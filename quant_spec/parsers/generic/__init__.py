"""Methods of other tools: one file a family."""
