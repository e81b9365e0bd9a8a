"""Output for people: tables, JSON and progress, made from typed results and never from a graph."""
