"""Settings of consumer groups, checked."""

from __future__ import annotations

from txmq.core.consumers.assignment import STRATEGIES
from txmq.core.consumers.commands import Wanted
from txmq.core.state.consumer_groups import FIRST, LAST, MODES, POLICIES, Settings
from txmq.core.state.state import Rejected
from txmq.errors import BadRequest

SECOND = 1_000_000
LEASES = (
    SECOND,
    12 * 3_600 * SECOND,
)  # shorter ones run out in transit; the longest is what the field's proxies allow
CONSUMES = 7 * 24 * 3_600 * SECOND
SPAN = 100_000_000
PARKED, FLOOD = 100_000_000, 1_000
SESSIONS = (SECOND, 3_600 * SECOND)


def settings_of(wanted: Wanted, base: Settings) -> Settings | Rejected:
    """`base` with what is wanted; Rejected where that is out of range."""
    named = {name: value for name, value in wanted._asdict().items() if value is not None}
    if wanted.retry is not None:
        named["retry"] = wanted.retry.row
    settings = base._replace(**named)
    checks = (
        (settings.mode in MODES, f"mode {settings.mode!r}: one of {', '.join(MODES)}"),
        (
            settings.on_exhausted in POLICIES,
            f"on_exhausted {settings.on_exhausted!r}: one of {', '.join(POLICIES)}",
        ),
        (
            LEASES[0] <= settings.lease_us <= LEASES[1],
            f"a lease is 1 s to 12 h, not {settings.lease_us} µs",
        ),
        (
            SESSIONS[0] <= settings.session_us <= SESSIONS[1],
            f"a session is 1 s to 1 h, not {settings.session_us} µs",
        ),
        (
            settings.start in (FIRST, LAST) or isinstance(settings.start, int),
            "start: first, last or a time",
        ),
        (
            SECOND <= settings.consume_timeout_us <= CONSUMES,
            "a handler may take 1 s to 7 days (consume_timeout)",
        ),
        (
            0 <= settings.max_parked <= PARKED,
            f"max_parked is 0 to {PARKED}, not {settings.max_parked}",
        ),
        (
            0 <= settings.flood_keys <= FLOOD,
            f"flood_keys is 0 to {FLOOD}, not {settings.flood_keys}",
        ),
        (0 <= settings.span <= SPAN, f"span is 0 to {SPAN}, not {settings.span}"),
        (
            settings.strategy in ("", *STRATEGIES),
            f"strategy {settings.strategy!r}: one of {', '.join(STRATEGIES)}",
        ),
    )
    bad = next((message for good, message in checks if not good), None)
    return settings if bad is None else Rejected(BadRequest, bad)


def joined(wanted: Wanted, base: Settings) -> Settings | Rejected:
    """What a member asks for, where no operator has said otherwise."""
    return settings_of(wanted._replace(**dict.fromkeys(base.altered)), base)


def altered(wanted: Wanted, base: Settings) -> Settings | Rejected:
    """What an operator asks for, who is remembered to have done so."""
    named = {name for name, value in wanted._asdict().items() if value is not None}
    return settings_of(wanted, base._replace(altered=tuple(sorted(named.union(base.altered)))))


def agree(settings: Settings, base: Settings) -> bool:
    """Whether a member that asks for `settings` may join a group that has `base`: where
    it begins may differ.
    """
    return (
        settings.policy == base.policy
        and settings._replace(start=base.start, retry=base.retry) == base
    )
