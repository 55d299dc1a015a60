"""Measurements: each module prints its method and writes `results/<name>.json`."""
