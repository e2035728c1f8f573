"""Selectors: conditions over the headers of messages, after SQL-92.

    region IN ('eu', 'us') AND (price BETWEEN 10 AND 20 OR "x-vip" IS NOT NULL)

`parse` compiles a text once; `Selector.matches` evaluates it for a message. No text is
ever run as code.
"""

from txmq.selector.parser import Selector, parse

__all__ = ["Selector", "parse"]
