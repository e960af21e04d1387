"""Which addresses may be asked: by default none of this machine, of its network, or of any other
place that the internet cannot reach. Whoever may set a target could otherwise have the daemon ask
what only the daemon can reach.

A name is looked up once, and what was looked up is what is connected to: an answer that changes
between a check and the connection (DNS rebinding) is checked again, because there is only the one
check. IPv6 addresses that carry an IPv4 address are judged by both.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Final

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_NAT64: Final = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))
_COMPATIBLE: Final = IPv6Network("::/96")
"""Addresses that carry an IPv4 address in their last 32 bits."""


class ForbiddenAddress(OSError):
    """An address may not be asked."""


class Guard:
    """Decides whether an address may be asked; ``allow`` are networks that may, though they are not
    public."""

    def __init__(self, allow: Sequence[Network] = ()) -> None:
        self._allow = tuple(allow)

    @classmethod
    def of(cls, texts: Iterable[str]) -> Guard:
        """The guard that allows these networks too, written like 10.0.0.0/8. Raises ValueError."""
        return cls([ip_network(text) for text in texts])

    def check(self, host: str, address: str) -> None:
        """Raises ForbiddenAddress unless ``address``, which ``host`` stands for, may be asked."""
        try:
            found = ip_address(address.partition("%")[0])
        except ValueError:
            raise ForbiddenAddress(f"{host} has the address {address!r}, which is none") from None
        ones = (found, *_carried(found))
        if all(self._allows(one) or _is_public(one) for one in ones):
            return
        named = host if host == address else f"{host} ({address})"
        raise ForbiddenAddress(
            f"{named} is not a public address; push_allow names others that may be asked"
        )

    def _allows(self, address: Address) -> bool:
        return any(address in network for network in self._allow)

    async def resolve(
        self, host: str, port: int, family: int = socket.AF_UNSPEC
    ) -> list[tuple[int, str]]:
        """(family, address) of those addresses of ``host`` that may be asked. Raises
        ForbiddenAddress when there are only others, OSError when there are none."""
        literal = _literal(host)
        if literal is not None:
            self.check(host, str(literal))
            one = socket.AF_INET if literal.version == 4 else socket.AF_INET6
            return [(one, str(literal))]
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(
            host, port, family=socket.AddressFamily(family), type=socket.SOCK_STREAM
        )
        allowed: list[tuple[int, str]] = []
        refusal: ForbiddenAddress | None = None
        for one, _, _, _, where in found:
            address = str(where[0])
            try:
                self.check(host, address)
            except ForbiddenAddress as error:
                refusal = error
            else:
                allowed.append((one, address))
        if refusal is not None and not allowed:
            raise refusal
        return allowed


def _literal(host: str) -> Address | None:
    """The address that ``host`` is; None: it is a name, or an address in another form."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None or address in _NAT64[0]:
            return True  # the IPv4 address decides
        if address in _COMPATIBLE or address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _carried(address: Address) -> Iterable[IPv4Address]:
    """The IPv4 addresses that an IPv6 address carries."""
    if isinstance(address, IPv4Address):
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo
    if any(address in network for network in _NAT64):
        yield IPv4Address(int(address) & 0xFFFFFFFF)
