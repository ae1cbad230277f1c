"""The standard benchmark: each prints a table and writes the same JSON shape; figures in the docs name their command."""
