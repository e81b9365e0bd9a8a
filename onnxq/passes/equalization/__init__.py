"""Channels scaled and shifted before planning, so that one scale a tensor loses less."""
