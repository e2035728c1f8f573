"""Selectors: which messages a consumer wants, as a condition over their headers, after
SQL-92.

    region IN ('eu', 'us') AND (price BETWEEN 10 AND 20 OR "x-vip" IS NOT NULL) AND NOT path LIKE '/tmp/%'

`parse` makes a `Selector` of a text, once; `Selector.matches` asks it about a message.
Nothing is ever run as code.
"""

from txmq.selector.parser import Selector, parse

__all__ = ["Selector", "parse"]
