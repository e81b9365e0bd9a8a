"""Edits on a model: its wiring as graphsurgeon objects, changed by name, written back as a ModelProto."""
