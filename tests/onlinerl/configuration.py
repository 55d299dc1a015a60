"""Writes a configuration of the whole stack that uses free ports."""

from pathlib import Path

from examples.support_desk.desk import free_ports
from onlinerl.commands.keys import key_hash


def write_configuration(folder: Path, *, model: Path, key: str) -> Path:
    """Write `onlinerl.toml` into `folder`, with `data` beside it; returns its path."""
    broker, registry, engine, gateway, ingest, schedule, deploy, maintain = free_ports(8)
    path = folder / "onlinerl.toml"
    path.write_text(
        f"""
data_dir = "data"
policy = {{ name = "assistant", base_model = "{model}" }}
broker = {{ bootstrap = "127.0.0.1:{broker}" }}
registry = {{ tracking_uri = "http://127.0.0.1:{registry}" }}
engine = {{ port = {engine}, max_model_len = 512, max_num_seqs = 8 }}
ingest = {{ health_port = {ingest}, max_batch_age_s = 0.5 }}
maintenance = {{ health_port = {maintain} }}
schedule = {{ health_port = {schedule}, interval_s = 3600, check_every_s = 1 }}

[rewards]
metrics = [{{ name = "accepted" }}]

[trainer]
min_labelled_rows = 40
# One thread each, because on two busy cores the threads would wait for each other.
num_threads = 1
heldout_fraction = 0.2

[deploy]
health_port = {deploy}
poll_s = 0.5
gates.perplexity.max_tokens = 256
gates.threads = 1
gates.drift.min_tokens = 20
gates.drift.max_k3 = 0.5

[gateway]
port = {gateway}
engines = ["http://127.0.0.1:{engine}"]
max_model_len = 512
sampling = {{ temperature = 0.7, max_tokens = 16 }}

[[gateway.api_keys]]
name = "test"
sha256 = "{key_hash(key)}"
tenant = "test"
consent = "train"
""",
        encoding="utf-8",
    )
    return path
