"""The console: pages for people, rendered by the broker and served at its HTTP port.

page        a page, its request, and what it returns: start here to add one
registry    the table of all pages
rendering   templates, filters, and the queue that renders a slice in each turn
streams     live parts, by server-sent events
site        paths to pages, static files and streams
actions     the table of calls that forms make
forms       what a form does, and shows
completion  what a filter that somebody types may be completed to
csrf        tokens by which a form is known to be one of our own pages
overview, topics, ...  the pages, by subject
"""
