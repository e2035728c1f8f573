"""Templates of the console, and the queue that renders them.

Names, keys, headers, bodies and errors come from elsewhere. Templates escape all of
them, and show control characters, and those that change the direction of text, as
visible signs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup, escape

from txmq.admin.console import fields
from txmq.admin.console.words import in_words, instant, label
from txmq.model.decider import branch_in_words, decided_by
from txmq.model.measures import counted
from txmq.model.tracebacks import last_line
from txmq.model.units import SECOND

if TYPE_CHECKING:
    from txmq.broker.reactor.interfaces import Clock, Timer

TURN_S = 0.002  # of rendering, in one turn of the reactor
MACROS = {"ui.html", "actions.html"}  # in all templates, by these names
MAX_BYTES = 4 << 20  # of one page
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
# seconds below which a duration is given in a unit, and the seconds of the unit
DURATIONS = ((120, 1, "s"), (7_200, 60, "min"), (172_800, 3_600, "h"), (inf, 86_400, "d"))
# C0 and C1 without line breaks and tabs, marks of direction, signs without width, and
# halves of characters
HIDDEN = (
    (0x00, 0x08), (0x0B, 0x1F), (0x7F, 0x9F), (0xAD, 0xAD), (0x061C, 0x061C), (0x200B, 0x200F),
    (0x2028, 0x202E), (0x2060, 0x206F), (0xD800, 0xDFFF), (0xFEFF, 0xFEFF), (0xFFF9, 0xFFFB),
)  # fmt: skip


def visible(text: str) -> str:
    """Return a text whose control characters can be seen."""
    return text.translate(SIGNS)


def _sign(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"


SIGNS = {code: _sign(code) for first, last in HIDDEN for code in range(first, last + 1)}


def _shown(value: object) -> object:
    """Make what a template prints visible; Jinja2 escapes it afterwards."""
    if isinstance(value, Markup):
        return value
    return visible(value) if isinstance(value, str) else value


def exact(value: str) -> Markup:
    """Return a text as it is, for a field that is sent back."""
    return escape(value)


def number(value: float) -> str:
    """Return a number with its thousands apart."""
    return f"{value:,.1f}" if isinstance(value, float) and value % 1 else f"{int(value):,}"


def size(value: float) -> str:
    """Return a number of bytes."""
    unit = 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if unit else f"{int(value)} B"


def duration_us(value: float) -> str:
    """Return a length of time in microseconds."""
    if value < 1_000:
        return f"{value:.0f} µs"
    if value < SECOND:
        return f"{value / 1_000:.3g} ms"
    seconds = value / SECOND
    if seconds < 10:
        return f"{seconds:.1f} s"
    for below, unit, name in DURATIONS:
        if seconds < below:
            return f"{seconds // unit:,.0f} {name}"
    raise AssertionError


def duration_ms(value: float) -> str:
    """Return a length of time in milliseconds."""
    return duration_us(value * 1_000)


def clock(value: int) -> Markup:
    """Return a time of the day as an element, for an axis."""
    text = instant(value)
    named = Markup('<time datetime="{}" title="{}">{}</time>')
    return named.format(text.replace(" UTC", "Z"), text, text[11:16])


def moment(value: int | None) -> Markup:
    """Return a time as an element; nothing for 0 and None."""
    if not value:
        return Markup("–")
    text = instant(value)
    return Markup('<time datetime="{}">{}</time>').format(text.replace(" UTC", "Z"), text)


def gist(text: str, kind: str) -> str:
    """Return what a text of an error says, for a row that has the type already."""
    return last_line(text).removeprefix(f"{kind}: ")


class Templates:
    """The templates, read once. `now` gives microseconds since the epoch."""

    def __init__(self, now: Callable[[], int]) -> None:
        folder = files("txmq.admin") / "templates" / "console"
        sources = {one.name: one.read_text("utf-8") for one in folder.iterdir()}
        self._environment = Environment(
            loader=DictLoader(sources),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=_shown,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
            cache_size=-1,
        )
        self._environment.filters |= {
            each.__name__: each
            for each in (
                exact,
                number,
                counted,
                size,
                duration_us,
                duration_ms,
                instant,
                moment,
                clock,
                gist,
                label,
                in_words,
                decided_by,
                branch_in_words,
            )
        }

        def ago(value: int | None) -> Markup:
            """Return how long ago a time was."""
            if not value:
                return Markup("–")
            text = instant(value)
            return Markup('<time datetime="{}" title="{}">{} ago</time>').format(
                text.replace(" UTC", "Z"), text, duration_us(max(0, now() - value))
            )

        self._environment.filters["ago"] = ago
        self._environment.globals["tables"] = fields  # of forms
        # a part that is rendered by itself runs no import of its page
        for name in MACROS & sources.keys():
            module = self._environment.get_template(name).module
            self._environment.globals[name.removesuffix(".html")] = module

    def compile(self) -> None:
        """Compile all templates. Each costs its first viewer up to 70 ms else (measured
        2026-11-28), and everybody else's sends.
        """
        for name in self._environment.list_templates():
            self._environment.get_template(name)

    def page(self, name: str, values: Mapping[str, Any]) -> Iterator[str]:
        """Return the pieces of a whole page."""
        return self._environment.get_template(name).generate(values)

    def live(self, name: str, values: Mapping[str, Any]) -> Iterator[str]:
        """Return the pieces of a page's live part."""
        template = self._environment.get_template(name)
        # the blocks of a template that extends another one, without running the latter
        return template.blocks["live"](template.new_context(dict(values)))


class _Rendering(NamedTuple):
    pieces: Iterator[str]
    done: Callable[[bytes], None]
    failed: Callable[[Exception], None]
    ready: list[str]


class RenderQueue:
    """Renders pages one after the other: a slice of `TURN_S` in each turn of the
    reactor, however many viewers there are.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[_Rendering] = deque()
        self._timer: Timer | None = None

    def render(
        self,
        pieces: Iterator[str],
        done: Callable[[bytes], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Render pieces to bytes, soon."""
        self._waiting.append(_Rendering(pieces, done, failed, []))
        if self._timer is None:
            self._timer = self._clock.callLater(0, self._work)

    def _work(self) -> None:
        self._timer = None
        until = self._clock.seconds() + TURN_S
        while self._waiting and self._clock.seconds() < until:
            self._advance(self._waiting.popleft(), until)
        if self._waiting and self._timer is None:
            self._timer = self._clock.callLater(0, self._work)

    def _advance(self, one: _Rendering, until: float) -> None:
        try:
            for piece in one.pieces:
                one.ready.append(piece)
                if self._clock.seconds() >= until:
                    self._waiting.append(one)
                    return
            page = "".join(one.ready).encode("utf-8", "replace")
            if len(page) > MAX_BYTES:
                raise ValueError(f"a page of {len(page)} bytes is too large")  # noqa: TRY301  # as others
        except Exception as error:  # noqa: BLE001  # of a template: its viewer gets an error page
            one.failed(error)
            return
        one.done(page)
