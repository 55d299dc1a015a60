import asyncio
import contextlib
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
from pydantic import ValidationError
from starlette.types import Message, Scope

from onlinerl.errors import ConfigError
from onlinerl.serving.config import CorsConfig, TlsConfig
from onlinerl.serving.http.listener import tls_context, with_cors
from onlinerl.serving.rendering.protocol import Renderer
from tests.serving.world import Caller, World, body, make_world


class Pki:
    """An authority, the gateway's certificate, and a client's."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        server = self.authority.issue_cert("localhost")
        self.ca, self.cert, self.key = (str(folder / n) for n in ("ca.pem", "cert.pem", "key.pem"))
        self.authority.cert_pem.write_to_path(self.ca)
        server.cert_chain_pems[0].write_to_path(self.cert)
        server.private_key_pem.write_to_path(self.key)

    def client(self, *, with_certificate: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca)
        if with_certificate:
            self.authority.issue_cert("client@example.com").configure_cert(context)
        return context


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


async def exchange(server: ssl.SSLContext, client: ssl.SSLContext) -> bytes:
    """A word from client to server and back."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=server)
    async with listener, asyncio.timeout(60):
        port = listener.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=client, server_hostname="localhost"
        )
        try:
            writer.write(b"hello\n")
            return await reader.readline()
        finally:
            writer.close()


def test_without_a_certificate_there_is_no_tls() -> None:
    assert tls_context(TlsConfig()) is None


async def test_a_client_that_trusts_the_authority_connects(pki: Pki) -> None:
    context = tls_context(TlsConfig(cert=pki.cert, key=pki.key))
    assert context is not None

    assert await exchange(context, pki.client()) == b"hello\n"
    with pytest.raises(ssl.SSLCertVerificationError):
        await exchange(context, ssl.create_default_context())


async def test_with_an_authority_for_clients_only_its_clients_connect(pki: Pki) -> None:
    context = tls_context(TlsConfig(cert=pki.cert, key=pki.key, client_ca=pki.ca))
    assert context is not None

    assert await exchange(context, pki.client(with_certificate=True)) == b"hello\n"
    # TLS 1.3 tells the client only after its handshake, as an error or as the end of the stream.
    answer = b""
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        answer = await exchange(context, pki.client())
    assert answer == b""


async def test_old_versions_of_tls_are_refused(pki: Pki) -> None:
    context = tls_context(TlsConfig(cert=pki.cert, key=pki.key))
    assert context is not None

    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("field", ["cert", "key", "client_ca"])
def test_a_missing_file_is_named(pki: Pki, field: str) -> None:
    files = {"cert": pki.cert, "key": pki.key, "client_ca": pki.ca, field: "/no/such/file.pem"}

    with pytest.raises(ConfigError, match=rf"{field} = '/no/such/file.pem' cannot be read"):
        tls_context(TlsConfig(**files))


def test_a_key_of_another_certificate_is_refused(pki: Pki, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(str(other))

    with pytest.raises(ConfigError, match="no PEM pair"):
        tls_context(TlsConfig(cert=pki.cert, key=str(other)))


def test_a_key_with_a_passphrase_is_refused_instead_of_asking_the_terminal(
    pki: Pki, tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(Path(pki.key).read_bytes(), password=None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )

    with pytest.raises(ConfigError, match="without a passphrase"):
        tls_context(TlsConfig(cert=pki.cert, key=str(locked)))


def test_what_is_no_authority_is_refused(pki: Pki, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("")

    with pytest.raises(ConfigError, match="holds no PEM certificates"):
        tls_context(TlsConfig(cert=pki.cert, key=pki.key, client_ca=str(empty)))


@pytest.mark.parametrize(
    "given", [{"cert": "a"}, {"key": "a"}, {"client_ca": "a"}], ids=lambda given: next(iter(given))
)
def test_half_of_tls_is_an_error(given: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="tls:"):
        TlsConfig(**given)


@pytest.mark.parametrize("origin", ["app.example.com", "https://a.com/path", "ftp://a.com", ""])
def test_an_origin_is_scheme_and_host(origin: str) -> None:
    with pytest.raises(ValidationError, match="no origin"):
        CorsConfig(origins=(origin,))


def test_credentials_are_never_for_every_page() -> None:
    with pytest.raises(ValidationError, match="named origins"):
        CorsConfig(origins=("*",), allow_credentials=True)


PAGE = "https://app.example.com"


@pytest.fixture
async def world(renderer: Renderer) -> World:
    world = make_world(renderer)
    await world.gateway.pool.look(world.gateway.pool.replicas[0])
    return world


def from_page(world: World, cors: CorsConfig, **options: Any) -> Caller:
    headers = {"origin": PAGE, **options.pop("headers", {})}
    app: Any = with_cors(world.app, cors)
    return Caller(app, headers=headers, **options)


async def test_no_page_may_call_by_default(world: World) -> None:
    caller = await from_page(world, CorsConfig(), json_body=body()).done()

    assert with_cors(world.app, CorsConfig()) is world.app
    assert not [name for name in caller.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("origins", "allowed"), [((PAGE,), PAGE), (("*",), "*"), (("https://other.com",), None)]
)
async def test_pages_of_the_configured_origins_may_call(
    world: World, origins: tuple[str, ...], allowed: str | None
) -> None:
    cors = CorsConfig(origins=origins)
    caller = await from_page(world, cors, json_body=body()).done()
    refused = await from_page(world, cors, json_body=body(), key=None).done()

    assert caller.headers.get("access-control-allow-origin") == allowed
    assert "x-onlinerl-interaction-id" in caller.headers["access-control-expose-headers"]
    assert (caller.status, refused.status) == (200, 401)
    assert refused.headers.get("access-control-allow-origin") == allowed


@pytest.mark.parametrize(("origin", "status"), [(PAGE, 200), ("https://evil.com", 400)])
async def test_a_browser_that_asks_first_is_told(world: World, origin: str, status: int) -> None:
    app = with_cors(world.app, CorsConfig(origins=(PAGE,)))
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, x-stainless-os, idempotency-key",
    }
    scope: Scope = {
        "type": "http",
        "method": "OPTIONS",
        "path": "/v1/chat/completions",
        "headers": [(name.encode(), value.encode()) for name, value in asked.items()],
    }
    await app(scope, receive, send)

    assert sent[0]["status"] == status
    names = dict(sent[0]["headers"])
    assert (b"access-control-allow-origin" in names) == (status == 200)


async def test_a_page_streams_and_leaves_like_any_other_caller(world: World) -> None:
    world.engine.hold_at = 2
    caller = from_page(world, CorsConfig(origins=(PAGE,)), json_body=body(stream=True))
    await caller.until(b'"content"')
    caller.leave()
    await caller.done()
    await world.ended()

    assert caller.headers["access-control-allow-origin"] == PAGE
    assert len(world.engine.aborted) == 1
    assert world.interactions[0].choices[0].finish_reason == "client_disconnect"
