"""`omni-bus keys new`, and what reads its files: nothing is overwritten, nothing is readable for others, no key is shown."""

from __future__ import annotations

import os
import pathlib
import stat

import pytest

from omni_bus.cli import main
from omni_bus.errors import ConfigError
from omni_bus.keys import KeyPair, KnownKeys, ServerSecrets, server_pair, worker_key


def make(directory: pathlib.Path, *more: str) -> int:
    return main(["keys", "new", str(directory), *more])


def test_the_first_call_makes_two_certificates_for_this_user_only(tmp_path: pathlib.Path) -> None:
    before = os.umask(0o000)
    try:
        assert make(tmp_path / "keys") == 0
    finally:
        os.umask(before)
    files = sorted((tmp_path / "keys").iterdir())
    assert [file.name for file in files] == ["server.key", "server.key_secret", "worker.key", "worker.key_secret"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    key, server = worker_key(tmp_path / "keys/worker.key_secret"), server_pair(tmp_path / "keys")
    assert key.server == server.public != key.pair.public
    known = KnownKeys(tmp_path / "keys")
    assert known.name(key.pair.public.encode()) == "worker"
    assert known.name(server.public.encode()) is None


def test_nothing_is_overwritten_and_further_names_are_added(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make(tmp_path) == 0
    content = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert make(tmp_path) == 2
    assert "is there already; choose another name with --name" in capsys.readouterr().err
    assert make(tmp_path, "--name", "gpu-2") == 0
    assert {file: file.read_bytes() for file in content} == content
    assert worker_key(tmp_path / "gpu-2.key_secret").server == server_pair(tmp_path).public


@pytest.mark.parametrize("name", ["server", "", "../x", "a/b", "A", "x" * 33, ".", "a\n"])
def test_a_name_that_cannot_be_is_refused(tmp_path: pathlib.Path, name: str) -> None:
    assert make(tmp_path / "keys", "--name", name) == 2
    assert not (tmp_path / "keys").exists()


def test_half_a_server_certificate_is_not_completed(tmp_path: pathlib.Path) -> None:
    assert make(tmp_path) == 0
    (tmp_path / "server.key_secret").unlink()
    assert make(tmp_path, "--name", "b") == 2


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (None, 0o600, "No such file"),
        (b"", 0o600, "holds no key"),
        (b"\xff\x00 garbage", 0o600, "holds no key"),
        (b'public-key = "short"\nsecret-key = "short"\n', 0o600, "holds no secret key"),
        (b'public-key = "' + b"a" * 40 + b'"\n', 0o600, "holds no secret key"),
        (b'public-key = "' + b"a" * 40 + b'"\nsecret-key = "' + b"b" * 40 + b'"\n', 0o600, "does not say the server's key"),
        (b'public-key = "' + b"a" * 40 + b'"\nsecret-key = "' + b"b" * 40 + b'"\n', 0o640, "others may read"),
    ],
)
def test_a_file_that_is_no_workers_secret_is_refused(
    tmp_path: pathlib.Path, content: bytes | None, mode: int, says: str
) -> None:
    file = tmp_path / "x.key_secret"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        worker_key(file)
    assert says in caught.value.message and "bbbb" not in caught.value.message
    asked = ["worker", "--broker", "tcp://127.0.0.1:1", "--key", str(file), "--stage", "relay"]
    assert main(asked) == 2


def test_certificates_that_come_and_go_are_noticed(tmp_path: pathlib.Path) -> None:
    assert make(tmp_path) == 0
    known = KnownKeys(tmp_path)
    first = worker_key(tmp_path / "worker.key_secret").pair.public.encode()
    assert known.name(first) == "worker"
    assert make(tmp_path, "--name", "later") == 0
    later = worker_key(tmp_path / "later.key_secret").pair.public.encode()
    assert known.name(later) == "later"
    (tmp_path / "worker.key").unlink()
    assert known.name(first) is None and known.name(later) == "later"


def test_no_key_shows_itself(tmp_path: pathlib.Path) -> None:
    assert make(tmp_path) == 0
    key = worker_key(tmp_path / "worker.key_secret")
    secrets = ServerSecrets.new()
    pair = KeyPair.new()
    shown = f"{key} {key!r} {secrets} {pair!r} {[pair]}"
    assert not any(text in shown for text in (key.pair.secret, key.pair.public, key.server, secrets.data.secret, pair.secret))
