"""The blocking faces of a consumer, over the member without I/O of `txmq.client.consuming`; handlers and the inbox."""
