"""The services, each a process: `python -m examples.order_flow.services NAME`."""
