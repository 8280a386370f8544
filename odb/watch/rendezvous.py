"""How neighbours find each other: who listens where, and with which token."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from odb.watch.tree import children, parent

CONNECT_S = 3.0
"""Seconds for each address of a parent."""

Gather = Callable[[Any], list[Any]]
"""Collective: what every rank passes, by rank."""


class Offer(NamedTuple):
    """Where a rank listens for its children."""

    addresses: tuple[tuple[str, int], ...]
    token: str


@dataclass
class Place:
    """This rank's place in the tree. `offer`: where its parent listens, None at the root or if it
    could not listen. `waiting`: the children that have not connected yet."""

    rank: int
    world_size: int
    token: str = ""
    offer: Offer | None = None
    listeners: list[socket.socket] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)


def meet(rank: int, world_size: int, gather: Gather) -> Place:
    """Listen for this rank's children and learn where its parent listens (collective)."""
    local = len(set(gather(host_identity()))) == 1
    place = Place(rank, world_size, secrets.token_hex(16))
    place.waiting = set(children(rank, world_size))
    own: Offer | None = None
    if place.waiting:
        place.listeners = list(_listen(["127.0.0.1"] if local else own_addresses()))
        addresses = tuple(listener.getsockname()[:2] for listener in place.listeners)
        own = Offer(addresses, place.token)
    above = parent(rank)
    offers = gather(own)
    place.offer = None if above is None else offers[above]
    return place


def host_identity() -> str:
    """A text that is the same for ranks that can reach each other over the loop-back."""
    boot, network = "", 0
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    with contextlib.suppress(OSError):
        network = os.stat("/proc/self/ns/net").st_ino  # containers have a loop-back of their own
    return f"{socket.gethostname()} {boot} {network}"


def own_addresses() -> list[str]:
    """The addresses by which other hosts reach this one, the likeliest first."""
    found: list[str] = []
    master = os.environ.get("MASTER_ADDR")
    if master:
        with contextlib.suppress(OSError):
            family, kind, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # chooses a route; nothing is sent
                found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    outside = [a for a in dict.fromkeys(found) if not a.startswith("127.") and a != "::1"]
    return outside or found[:1]


def _listen(addresses: list[str]) -> Iterator[socket.socket]:
    for address in addresses:
        with contextlib.suppress(OSError):
            yield _listener(address)


def _listener(address: str) -> socket.socket:
    listener = socket.socket(_family((address, 0)))
    try:
        listener.bind((address, 0))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _family(address: tuple[str, int]) -> int:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


def call_parent(place: Place, make: Callable[[int], socket.socket]) -> socket.socket:
    """Connect to the parent, with a socket that `make` makes of a family. Raises OSError, with
    every address that was tried."""
    if place.offer is None or not place.offer.addresses:
        raise OSError("it could not listen on any address")
    tried = []
    for address in place.offer.addresses:
        sock = make(_family(address))
        try:
            sock.settimeout(CONNECT_S)
            sock.connect(address)
        except OSError as error:
            sock.close()
            tried.append(f"{address[0]}:{address[1]}: {error}")
            continue
        keep_alive(sock)
        return sock
    raise OSError("; ".join(tried))


def token_fits(place: Place, token: object) -> bool:
    """Whether who calls is one of this job's ranks."""
    return isinstance(token, str) and hmac.compare_digest(token.encode(), place.token.encode())


def keep_alive(sock: socket.socket) -> None:
    """Let the system find out about a host that is gone without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
