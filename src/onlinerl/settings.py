"""The root of the configuration: one TOML file, overridden by `--set section.key=value`.

Secrets are never read from here; see `SECRETS` for the environment variables and who needs them.
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
    USER_HASH_KEY: (
        "keys the hash under which user ids are logged; without it no user id is logged at all"
    ),
    ENGINE_SECRET: (
        "opens the guard of an engine that other machines can reach; without it such an engine"
        " does not start"
    ),
    API_KEYS: (
        "adds API keys, as a JSON list of {name, sha256, tenant, consent}; not needed when the "
        "configuration or the keys file has some"
    ),
}
"""Environment variables that hold secrets, and what happens without them."""


class Settings(Config):
    """Everything that the one-machine stack and each of its parts can be told."""

    data_dir: Path = Path(".onlinerl")
    """Folder for everything that is written."""

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
    """What clients talk to."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    """The vLLM engine of `onlinerl engine` and `onlinerl up`."""

    ingest: IngestConfig = Field(default_factory=IngestConfig)
    """From the event log to the tables."""

    scrub: ScrubConfig = Field(default_factory=ScrubConfig)
    """What is looked for in text before it is stored."""

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
        """Where the tables lie: a local path or an object-store URI."""
        return self.store.root or str(self.data_dir / "store")

    @property
    def weights_root(self) -> Path:
        """The chain of anchors and deltas of this policy."""
        return self.data_dir / "weights" / self.policy.name

    def folder(self, name: str) -> Path:
        """A process's own folder below `data_dir`."""
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
    """The port of a service that the stack itself starts; 0 for one that runs elsewhere."""
    port = address.rpartition(":")[2].rstrip("/")
    return int(port) if embedded and port.isdigit() else 0


def load(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """Read a TOML file and apply `section.key=value` overrides.

    Values of overrides are TOML (`1e-5`, `true`, `[1, 2]`); what is not TOML is taken as a string.
    Paths that are relative start at the file's folder, so that a command means the same wherever
    it is run.

    Raises:
        ConfigError: naming the file, the key, the value and the remedy.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"no configuration file at {path}; name one with --config") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        _override(document, override)
    base = path.resolve().parent
    try:
        settings = Settings.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_explain(error)}") from error
    return _anchored(settings, base)


def _anchored(settings: Settings, base: Path) -> Settings:
    """Every path that is relative starts at `base`, and `~` is a home folder."""

    def path(text: str) -> str:
        # Links stay: a mounted secret is renewed by pointing its link elsewhere.
        return os.path.normpath(base / Path(text).expanduser()) if text else text

    def model(text: str) -> str:
        """A Hugging Face id, or another name, stays; what begins with a folder is a path."""
        is_path = text.startswith((".", "~", "/")) or (base / text.partition("/")[0]).is_dir()
        return path(text) if text and is_path else text

    gateway, tls = settings.gateway, settings.gateway.tls
    root, gates = settings.store.root, settings.deploy.gates
    reference = gates.perplexity.reference
    draft = settings.engine.speculative
    presidio = settings.scrub.presidio
    return _changed(
        settings,
        data_dir=(base / settings.data_dir.expanduser()).resolve(),
        policy=_changed(settings.policy, base_model=model(settings.policy.base_model)),
        store=_changed(settings.store, root=root if "://" in root else path(root)),
        gateway=_changed(
            gateway,
            keys_file=path(gateway.keys_file),
            tokenizer=model(gateway.tokenizer),
            spool=_changed(gateway.spool, dir=path(gateway.spool.dir)),
            responses=_changed(gateway.responses, path=path(gateway.responses.path)),
            tls=_changed(
                tls, cert=path(tls.cert), key=path(tls.key), client_ca=path(tls.client_ca)
            ),
        ),
        engine=_changed(
            settings.engine, speculative=_changed(draft, draft_model=model(draft.draft_model))
        ),
        deploy=_changed(
            settings.deploy,
            gates=_changed(
                gates,
                perplexity=_changed(
                    gates.perplexity,
                    reference=None if reference is None else Path(path(str(reference))),
                ),
            ),
        ),
        scrub=_changed(settings.scrub, presidio=_changed(presidio, model=model(presidio.model))),
    )


def _changed(config: ConfigT, **values: object) -> ConfigT:
    return config.model_copy(update=values)


def _override(document: dict[str, object], override: str) -> None:
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
        where = ".".join(str(part) for part in detail["loc"]) or "the file"
        if detail["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown key; see docs/configuration.md for those that exist")
        elif detail["type"] == "missing":
            lines.append(f"{where}: missing")
        else:
            lines.append(f"{where}{_shown(detail['loc'], detail['input'])}: {detail['msg']}")
    return "; ".join(lines)


def _shown(loc: tuple[int | str, ...], value: object) -> str:
    """The value, unless it may be a secret that was pasted into the wrong place."""
    secretive = {"api_keys", "storage_options"} & set(loc)
    if secretive or not isinstance(value, bool | int | float | str):
        return ""
    return f" = {json.dumps(value)}"
