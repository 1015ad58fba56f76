"""Ports for the servers and the runs of tests."""

import contextlib
import random
import socket


def free_port() -> int:
    """A port that nobody listens on, outside of the range from which connections are given theirs."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
