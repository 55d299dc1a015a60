"""What a real vLLM sent; see `benchmarks.record`."""

from pathlib import Path

RECORDED = Path(__file__).resolve().parent
