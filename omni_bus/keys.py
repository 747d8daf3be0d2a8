"""CURVE certificates: making them, reading them, and which keys a server knows. Files are those of ZeroMQ's own tools.

A directory of `omni-bus keys new` holds the server's certificate (`server.key`, `server.key_secret`) and one for each host that may
attach (`NAME.key`, `NAME.key_secret`). The server knows every `NAME.key` in it; a worker's `NAME.key_secret` says the server's public
key too, so that it is all that has to be taken to the other host.
"""

from __future__ import annotations

import os
import pathlib
import re
import secrets
import stat

import msgspec
import zmq
import zmq.auth

from omni_bus.errors import ConfigError

SERVER = "server"
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_SERVER_KEY = "server-key"  # in the metadata of a worker's certificate
_Z85 = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair, each key in 40 characters of Z85. It does not show itself, so that no key gets into a log."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return "KeyPair(…)"

    @classmethod
    def new(cls) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


class WorkerKey(msgspec.Struct, frozen=True):
    """What a worker's certificate file says: its own pair, and the public key of the server it was made for."""

    pair: KeyPair
    server: str

    def __repr__(self) -> str:
        return "WorkerKey(…)"


class ServerSecrets(msgspec.Struct, frozen=True):
    """What the processes of one running server share, for as long as it runs: its id, and the key pair of their data sockets."""

    server: str
    data: KeyPair

    @classmethod
    def new(cls) -> ServerSecrets:
        return cls(secrets.token_hex(8), KeyPair.new())


def new_certificates(directory: pathlib.Path, name: str) -> list[pathlib.Path]:
    """Make the certificate `name`, and the server's first where the directory has none yet; returns the files written, mode 0600.

    Raises ConfigError for a name that cannot be, one that is there already, or a directory that cannot be written.
    """
    if not NAME.fullmatch(name) or name == SERVER:
        raise ConfigError(f'--name: must be lower-case letters, digits, "_" or "-" and not "{SERVER}", not "{name}"')
    made = []
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for wanted in (SERVER, name):
            there = [path for path in (directory / f"{wanted}.key", directory / f"{wanted}.key_secret") if path.exists()]
            if wanted == SERVER and len(there) == 2:
                continue
            if there:
                raise ConfigError(f"{there[0]}: is there already; choose another name with --name, or another directory")
            metadata = None if wanted == SERVER else {_SERVER_KEY: server_pair(directory).public}
            before = os.umask(0o077)  # never, not even for a moment, for others to read
            try:
                made += [pathlib.Path(path) for path in zmq.auth.create_certificates(directory, wanted, metadata)]
            finally:
                os.umask(before)
    except OSError as error:
        raise ConfigError(f"{error.filename or directory}: cannot be written: {error.strerror}") from None
    return made


def server_pair(directory: pathlib.Path) -> KeyPair:
    """The server's own key pair. Raises ConfigError."""
    return _pair(directory / f"{SERVER}.key_secret")


def worker_key(file: pathlib.Path) -> WorkerKey:
    """Read what `--key` names. Raises ConfigError."""
    pair = _pair(file)
    found = re.search(rb"^\s*" + _SERVER_KEY.encode() + rb"\s*=\s*(\S+)\s*$", file.read_bytes(), re.MULTILINE)
    if found is None or not _Z85.fullmatch(found[1]):
        raise ConfigError(f"{file}: does not say the server's key; take the file NAME.key_secret that `omni-bus keys new` made")
    return WorkerKey(pair, found[1].decode())


class KnownKeys:
    """The public keys that may attach. Certificates that are added or taken away later are noticed at the next connection."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._seen = -1
        self._names: dict[bytes, str] = {}

    def name(self, key: bytes) -> str | None:
        """The certificate with that public key (Z85); None: it is not known."""
        try:
            changed = self._directory.stat().st_mtime_ns
            if changed != self._seen:
                self._names = dict(self._read())
                self._seen = changed
        except OSError:
            return None  # a directory that is gone knows nobody
        return self._names.get(key)

    def _read(self) -> list[tuple[bytes, str]]:
        found = []
        for file in sorted(self._directory.glob("*.key")):
            try:
                public, _ = zmq.auth.load_certificate(file)
            except (OSError, ValueError):
                continue
            if file.stem != SERVER:
                found.append((public, file.stem))
        return found


def _pair(file: pathlib.Path) -> KeyPair:
    try:
        mode = file.stat().st_mode
        public, secret = zmq.auth.load_certificate(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it holds no key"
        raise ConfigError(f"{file}: cannot be read: {reason}; make keys with `omni-bus keys new DIR`") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{file}: others may read this secret key; say `chmod 600 {file}`")
    if secret is None or not (_Z85.fullmatch(public) and _Z85.fullmatch(secret)):
        raise ConfigError(f"{file}: holds no secret key; take the file that ends in .key_secret")
    return KeyPair(public.decode(), secret.decode())
