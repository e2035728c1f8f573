"""Console, health checks, metrics and JSON of a broker over HTTP.

edge             the listener, which the service of the broker starts
http             its connections and requests; http_values: what handlers get and give
request_checks   where a request may come from, and which ones may change something
site             the reply to each path
routes           paths of JSON to control calls; addresses: patterns of paths
metrics          for Prometheus
console          pages for people

Probes, metrics and JSON only read. Forms of the console change what the table in
`console/actions` lists.
"""
