"""Engines are built in child processes: a build that crashes ends its process only."""
