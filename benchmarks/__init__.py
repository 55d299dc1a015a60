"""Measurements. Each benchmark writes its method and figures to `results/<name>.json`."""
