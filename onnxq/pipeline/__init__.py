"""The run: prepare, split, equalize, plan, calibrate, refine, emit, check. Commands stand above it."""
