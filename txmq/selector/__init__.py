"""Selectors: conditions of SQL-92 over the headers of messages.

    client.consumer("billing", ["orders"], selector="region = 'eu' AND price > 10")

    region IN ('eu', 'us') AND (price BETWEEN 10 AND 20 OR "x-vip" IS NOT NULL)
    $tag = 'paid' OR NOT ($key LIKE 'test-%')

Names are headers, or the message's `$key`, `$tag` and `$topic`; those with unusual
characters are in double quotes. Operators: = <> < <= > >= AND OR NOT BETWEEN IN LIKE
IS NULL. A header beside a number is compared as a number. A comparison with a header
that is not there is unknown, and only messages for which a condition is true match.

A selector can be tried without a broker. No text is ever run as code.

    found = txmq.selector.parse("region = 'eu'")        # or InvalidSelector
    found.matches({"region": "eu"}, key=None, tag=None, topic="orders")     # True
"""

from txmq.selector.parser import Selector, parse

__all__ = ["Selector", "parse"]
