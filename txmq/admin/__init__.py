"""Console, health checks, metrics and JSON of a broker over HTTP.

Probes, metrics and JSON only read. Forms of the console change what the table in
`console/actions` lists.
"""
