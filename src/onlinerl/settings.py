"""The whole configuration: one TOML file, with overrides from `--set section.key=value`.

Secrets are environment variables instead; `SECRETS` lists them.
"""

import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from onlinerl.base_config import Config
from onlinerl.deploy.config import DeployConfig
from onlinerl.errors import ConfigError
from onlinerl.ingest.config import IngestConfig
from onlinerl.ingest.scrubbing.config import ScrubConfig
from onlinerl.rollout_store.config import (
    BrokerConfig,
    PolicyConfig,
    RegistryConfig,
    RewardsConfig,
    StoreConfig,
)
from onlinerl.rollout_store.upkeep.config import MaintenanceConfig, RetentionConfig
from onlinerl.secret_names import API_KEYS, ENGINE_SECRET, USER_HASH_KEY
from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.engine.config import EngineConfig
from onlinerl.trainer.config import ScheduleConfig, TrainerConfig

ConfigT = TypeVar("ConfigT", bound=Config)

SECRETS = {
    USER_HASH_KEY: ("is the key under which user ids are hashed; without it no user id is logged"),
    ENGINE_SECRET: (
        "is the bearer token of engines that other machines can reach; without it such an engine"
        " does not start"
    ),
    API_KEYS: (
        "holds API keys as a JSON list of {name, sha256, tenant, consent}; it is not needed when "
        "the configuration or the keys file has keys"
    ),
}
"""Environment variables that hold secrets, each with what it is and what happens without it."""


class Settings(Config):
    """The configuration of the one-machine stack and of each of its parts."""

    data_dir: Path = Path(".onlinerl")
    """Folder for all files that onlinerl writes."""

    policy: PolicyConfig
    """The model that is being improved."""

    broker: BrokerConfig = Field(default_factory=BrokerConfig)
    """The event log."""

    store: StoreConfig = Field(default_factory=StoreConfig)
    """The rollout tables."""

    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    """How feedback becomes a reward."""

    registry: RegistryConfig = Field(default_factory=RegistryConfig)
    """The MLflow server."""

    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    """The process that clients talk to."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    """The vLLM engine of `onlinerl engine` and `onlinerl up`."""

    ingest: IngestConfig = Field(default_factory=IngestConfig)
    """The process that moves events from the log to the tables."""

    scrub: ScrubConfig = Field(default_factory=ScrubConfig)
    """Personal data and secrets that are removed from text before it is stored."""

    maintenance: MaintenanceConfig = Field(default_factory=MaintenanceConfig)
    """Upkeep of the tables."""

    retention: RetentionConfig = Field(default_factory=RetentionConfig)
    """How long rows are kept."""

    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """One cycle of learning."""

    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    """When cycles run."""

    deploy: DeployConfig = Field(default_factory=DeployConfig)
    """Gates, promotion and rollback."""

    @property
    def store_root(self) -> str:
        """Root of the tables: a local path or an object store URI."""
        return self.store.root or str(self.data_dir / "store")

    @property
    def weights_root(self) -> Path:
        """Folder with the anchors and deltas of this policy."""
        return self.data_dir / "weights" / self.policy.name

    def folder(self, name: str) -> Path:
        """The folder or file of this name in `data_dir`."""
        return self.data_dir / name

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        ports = {
            "broker.bootstrap": _own_port(self.broker.bootstrap, self.broker.embedded),
            "registry.tracking_uri": _own_port(self.registry.tracking_uri, self.registry.embedded),
            "gateway.port": self.gateway.port,
            "engine.port": self.engine.port,
            "ingest.health_port": self.ingest.health_port,
            "schedule.health_port": self.schedule.health_port,
            "deploy.health_port": self.deploy.health_port,
            "maintenance.health_port": self.maintenance.health_port,
        }
        seen: dict[int, str] = {}
        for key, port in ports.items():
            if port and port in seen:
                raise ValueError(f"{key} and {seen[port]} are both {port}; give each its own port")
            seen[port] = key
        return self


def _own_port(address: str, embedded: bool) -> int:
    """The port of a service that the stack starts; 0 for a service that runs elsewhere."""
    port = address.rpartition(":")[2].rstrip("/")
    return int(port) if embedded and port.isdigit() else 0


def load(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """Read a TOML file and apply `section.key=value` overrides.

    Values of overrides are TOML (`1e-5`, `true`, `[1, 2]`); a value that is not valid TOML is a
    string. Relative paths start at the folder of the file, so a command does the same from any
    folder.

    Raises:
        ConfigError: the file or an override is wrong; the message names the key and its value.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no configuration file {path}; name one with --config"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        _apply_override(document, override)
    base = path.resolve().parent
    try:
        settings = Settings.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_explain(error)}") from error
    return _resolve_paths(settings, base)


def _resolve_paths(settings: Settings, base: Path) -> Settings:
    """Make every path absolute: relative ones start at `base`, and `~` is the home folder."""

    def path(text: str) -> str:
        # Links are kept, because a mounted secret is renewed by changing its link.
        return os.path.normpath(base / Path(text).expanduser()) if text else text

    def model(text: str) -> str:
        """Resolve `text` if it starts with `.`, `~`, `/` or the name of a folder; else keep it."""
        is_path = text.startswith((".", "~", "/")) or (base / text.partition("/")[0]).is_dir()
        return path(text) if text and is_path else text

    gateway, tls = settings.gateway, settings.gateway.tls
    root, gates = settings.store.root, settings.deploy.gates
    reference = gates.perplexity.reference
    draft = settings.engine.speculative
    presidio = settings.scrub.presidio
    return _replace(
        settings,
        data_dir=(base / settings.data_dir.expanduser()).resolve(),
        policy=_replace(settings.policy, base_model=model(settings.policy.base_model)),
        store=_replace(settings.store, root=root if "://" in root else path(root)),
        gateway=_replace(
            gateway,
            keys_file=path(gateway.keys_file),
            tokenizer=model(gateway.tokenizer),
            spool=_replace(gateway.spool, dir=path(gateway.spool.dir)),
            responses=_replace(gateway.responses, path=path(gateway.responses.path)),
            tls=_replace(
                tls, cert=path(tls.cert), key=path(tls.key), client_ca=path(tls.client_ca)
            ),
        ),
        engine=_replace(
            settings.engine, speculative=_replace(draft, draft_model=model(draft.draft_model))
        ),
        deploy=_replace(
            settings.deploy,
            gates=_replace(
                gates,
                perplexity=_replace(
                    gates.perplexity,
                    reference=None if reference is None else Path(path(str(reference))),
                ),
            ),
        ),
        scrub=_replace(settings.scrub, presidio=_replace(presidio, model=model(presidio.model))),
    )


def _replace(config: ConfigT, **values: object) -> ConfigT:
    return config.model_copy(update=values)


def _apply_override(document: dict[str, object], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override!r} is not of the form section.key=value")
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, leaf = key.split(".")
    target = document
    for section in sections:
        child = target.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {section} is a value, not a section")
        target = child
    target[leaf] = value


def _explain(error: ValidationError) -> str:
    lines = []
    for detail in error.errors():
        key = ".".join(str(part) for part in detail["loc"]) or "the file"
        if detail["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key; docs/configuration.md lists the keys")
        elif detail["type"] == "missing":
            lines.append(f"{key}: missing")
        else:
            lines.append(f"{key}{_format_value(detail['loc'], detail['input'])}: {detail['msg']}")
    return "; ".join(lines)


def _format_value(loc: tuple[int | str, ...], value: object) -> str:
    """The value as ` = value`; empty when it may be a secret that was pasted there."""
    may_be_secret = bool({"api_keys", "storage_options"} & set(loc))
    if may_be_secret or not isinstance(value, bool | int | float | str):
        return ""
    return f" = {json.dumps(value)}"
