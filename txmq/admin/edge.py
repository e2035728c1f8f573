"""The HTTP listener that the service of the broker starts."""

from __future__ import annotations

from threading import Thread
from typing import TYPE_CHECKING, Any

import structlog
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.error import CannotListenError

from txmq.admin.follower import FollowerSite
from txmq.admin.http import AdminFactory
from txmq.admin.request_checks import HttpAccess
from txmq.admin.site import AdminSite
from txmq.broker.reactor.connection_limits import BACKLOG
from txmq.config.listen import ListenAddress
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.broker.service import BrokerParts, FollowerParts

log = structlog.get_logger()


class AdminEdge:
    """Server of the admin pages at `address`. `url` is the URL of the console, once the
    broker serves.
    """

    def __init__(self, address: ListenAddress) -> None:
        self._address = address
        self._factory: Any = None  # an AdminFactory, while a node follows
        self._port: Any = None
        self.url = ""

    async def follow(self, parts: FollowerParts) -> Any:  # noqa: ANN401  # an IListeningPort; mypy does not know zope's interfaces
        """Start to listen, for a node that does not lead yet. Raises ConfigError."""
        handle = FollowerSite(parts).handle
        self._factory = AdminFactory(handle, parts.reactor, access=self._access(parts))
        self._port = await self._listen(self._factory, parts)
        return self._port

    async def __call__(self, parts: BrokerParts) -> Any:  # noqa: ANN401
        """Start to listen, or go on with all pages. Raises ConfigError where the
        address is in use or invalid.
        """
        site, access = AdminSite(parts), self._access(parts)
        if self._factory is None:
            factory = AdminFactory(site.handle, parts.reactor, access=access, act=site.act)
            self._port = await self._listen(factory, parts)
        else:  # connections of before go on as well
            self._factory.handle, self._factory.act = site.handle, site.act
            self._factory.access = access
        Thread(target=site.prepare, name="console", daemon=True).start()
        listening = self._port.getHost()
        self.url = f"{access.scheme}://{ListenAddress(listening.host, listening.port)}/"
        log.info("admin.serving", console=self.url)
        return self._port

    def _access(self, parts: BrokerParts | FollowerParts) -> HttpAccess:
        hosts = frozenset({*map(str.lower, parts.settings.broker.http_hosts), self._address.host})
        scheme = "http" if parts.certificates is None else "https"
        return HttpAccess(parts.guard.log_in_by_http, hosts, scheme)

    async def _listen(self, factory: Any, parts: BrokerParts | FollowerParts) -> Any:  # noqa: ANN401
        if parts.certificates is not None:
            from txmq.broker.reactor.tls import TlsFactory  # noqa: PLC0415  # an extra

            factory = TlsFactory(parts.certificates, factory, parts.reactor)
        endpoint = TCP4ServerEndpoint(
            parts.reactor, self._address.port, backlog=BACKLOG, interface=self._address.host
        )
        try:
            return await endpoint.listen(factory)
        except CannotListenError as error:
            reason = f"cannot listen on {self._address}: {error.socketError.strerror}"
            raise ConfigError(
                "broker.http", reason, hint="choose another address, or omit it"
            ) from None
