"""Checks of the certificate, its key and the authority of clients."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from txmq.cli.doctor.check_result import CheckResult, Health, judged
from txmq.config.listen import is_loopback, listen_address
from txmq.errors import ConfigError
from txmq.errors.extras import MissingExtra, require

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from txmq.config.broker import SettingsFile

OTHERS = stat.S_IRGRP | stat.S_IROTH


def check_tls(settings: SettingsFile) -> Iterator[CheckResult]:
    """Check the encryption of the broker's port, and its files."""
    tls = settings.tls
    if tls is None:
        host = listen_address(settings.broker.listen).host
        yield judged(
            "TLS",
            f"none, on {host}",
            failed=not is_loopback(host),
            advice="others can read and change what goes over the network: set [tls]",
            fatal=not settings.broker.trusted_network,
        )
        return
    try:
        require("tls", "OpenSSL")
        from txmq.broker.reactor.tls import Certificates, certificates_in  # an extra

        Certificates(tls, _NoClock())  # as the broker reads them
        if served := certificates_in(tls.cert):
            yield _validity(served, timedelta(seconds=settings.alarms.certificate_s))
        yield judged(
            "TLS key",
            f"{tls.key}, mode {tls.key.stat().st_mode & 0o777:03o}",
            failed=bool(tls.key.stat().st_mode & OTHERS),
            advice="let the broker's user alone read it: chmod 600",
            fatal=False,
        )
    except MissingExtra as missing:
        yield CheckResult("TLS", Health.FAILURE, missing.message, missing.hint)
    except ConfigError as error:
        yield CheckResult("TLS", Health.FAILURE, error.message.removeprefix("tls: "), error.hint)


class _NoClock:
    """A clock for certificates that nobody looks at again."""

    def seconds(self) -> float:
        return 0.0


def _validity(served: Sequence[Certificate], soon: timedelta) -> CheckResult:
    """Check when a client trusts a certificate and the chain that is served with it."""
    now, end = datetime.now(UTC), min(one.not_valid_after_utc for one in served)
    found = f"valid until {end:%Y-%m-%d %H:%M} UTC"
    if not max(one.not_valid_before_utc for one in served) <= now < end:
        advice = "no client trusts it now: renew it, or set the clock right"
        return CheckResult("TLS", Health.FAILURE, found, advice)
    advice = "renew it: the broker takes the new files by itself"
    return judged("TLS", found, failed=end - now < soon, advice=advice, fatal=False)
