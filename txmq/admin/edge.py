"""Where the broker's service plugs the admin pages in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.error import CannotListenError

from txmq.admin.http import AdminFactory
from txmq.admin.site import Site
from txmq.config.listen import ListenAddress
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.broker.service import Parts

log = structlog.get_logger()


class AdminEdge:
    """Serves the admin pages at `address`; `url` is the console's, once the broker
    serves.
    """

    def __init__(self, address: ListenAddress) -> None:
        self._address = address
        self.url = ""

    async def __call__(self, parts: Parts) -> Any:  # an IListeningPort, which zope keeps from mypy
        """Begin to serve. Raises ConfigError where the address cannot be had."""
        factory = AdminFactory(Site(parts).handle, parts.reactor)
        endpoint = TCP4ServerEndpoint(
            parts.reactor, self._address.port, interface=self._address.host
        )
        try:
            port: Any = await endpoint.listen(factory)
        except CannotListenError as error:
            reason = f"cannot listen on {self._address}: {error.socketError.strerror}"
            raise ConfigError(
                "broker.http", reason, hint="choose another address, or leave it out"
            ) from None
        listening = port.getHost()
        self.url = f"http://{ListenAddress(listening.host, listening.port)}/"
        log.info("admin.serving", console=self.url)
        return port
