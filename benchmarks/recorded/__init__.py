"""Recorded answers of a real vLLM; `benchmarks.record` makes them."""

from pathlib import Path

RECORDED = Path(__file__).resolve().parent
