"""Make the certificates with which workers from other hosts attach to a server."""

from __future__ import annotations

import argparse
import pathlib

from omni_bus.keys import new_certificates

NAME = "keys"
EPILOG = """The first call makes the server's certificate and one for a worker; later ones with --name add further ones.
DIR is what `bus.keys` names. Take NAME.key_secret, and nothing else, to the other host; delete NAME.key to let it attach no more."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("new",), help="what to do")
    parser.add_argument("directory", metavar="DIR", type=pathlib.Path, help="where the certificates are kept")
    parser.add_argument("--name", default="worker", help="of the certificate for another host (default: worker)")


def run(arguments: argparse.Namespace) -> int:
    for file in new_certificates(arguments.directory, arguments.name):
        print(f"omni-bus: wrote {file}")
    print(f"omni-bus: attach with: omni-bus worker --key {arguments.name}.key_secret --broker tcp://HOST:PORT --stage STAGE")
    return 0
