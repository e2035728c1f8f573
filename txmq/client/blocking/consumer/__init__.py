"""The blocking faces of a consumer, over the member without I/O of
`txmq.client.protocol.consumer`; handlers and the inbox.
"""
